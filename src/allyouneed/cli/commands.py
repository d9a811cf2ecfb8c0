"""How a function becomes a command: groups of options, the options that all commands share, and flags.

`expand_groups` turns a parameter whose type is a group (options.py) into one option per field. `accept_plugins` and
`accept_quiet` add an option each. `App` makes commands whose flags take no value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from itertools import pairwise
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from allyouneed.cli.messages import quieted
from allyouneed.cli.options import PluginOption, QuietOption
from allyouneed.errors import UserError

UsageError: type[Any] = typer.BadParameter.__bases__[0]  # click's, which new releases of Typer contain

Function = Callable[..., None]
Effect = Callable[[Any], AbstractContextManager[None]]
BOOLEANS = {"true", "false", "yes", "no", "on", "off"}
NOT_RECORDED = {"input_", "output", "force", "restart", "shard", "device"}  # these do not change the result of a line
_recorded: ContextVar[dict[str, Any]] = ContextVar("recorded_options")


# --- flags ----------------------------------------------------------------------------------------------------------


def _without_type(params: list[Any]) -> list[Any]:
    """`--json`, not `--json <bool>`: a flag takes no value."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def _text_with_hyphen(args: list[str]) -> str | None:
    """The first argument that was probably meant as a text: `- buy milk`."""
    options = args[: args.index("--")] if "--" in args else args
    return next((arg for arg in options if arg.startswith("-") and not arg.startswith("--") and " " in arg), None)


@contextmanager
def _wrong_usage_is_one_message(ctx: Any, args: list[str]) -> Iterator[None]:
    """Replace Typer's usage, hint and panel by one message. A group without a command still prints its help."""
    text = _text_with_hyphen(args)  # parsing takes arguments away
    try:
        yield
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        usage = ctx.get_usage().replace("Usage:", "usage:").replace("{", "").replace("}", "")
        message = " ".join(f"{error.format_message().removesuffix('.')}; {usage} (--help explains it)".split())
        if text is not None:
            message += f"\nnote: {text!r} begins with a hyphen and is read as an option; put -- before the texts"
        raise UserError(message) from None


class Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse `--json true`: 'true' would be taken for a text."""
        flags = {name for one in self.params if getattr(one, "is_flag", False) for name in one.opts}
        options = args[: args.index("--")] if "--" in args else args
        for flag, value in pairwise(options):
            if flag in flags and value.lower() in BOOLEANS:
                raise UserError(
                    f"{flag} {value}: {flag} is a flag and takes no value; remove {value!r} (a text goes after `--`)"
                )
        with _wrong_usage_is_one_message(ctx, args):
            return super().parse_args(ctx, args)


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _wrong_usage_is_one_message(ctx, args):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        with _wrong_usage_is_one_message(ctx, args):
            return super().resolve_command(ctx, args)


class App(typer.Typer):
    """An application of such commands. One that is only declared is imported when it is called, or when all are."""

    def __init__(self, **options: Any) -> None:
        self._declared: dict[str, Callable[[], None] | None] = {}  # what registers a command; None: it has
        super().__init__(cls=Group, no_args_is_help=True, rich_markup_mode="markdown", **options)

    def declare(self, name: str, register: Callable[[], None]) -> None:
        """A command or group of this name; `register` imports and registers it."""
        self._declared[name] = register

    def load(self, name: str | None = None) -> None:
        """Register this command; all that are declared, in their order, if there is none of this name."""
        order = list(self._declared)
        for one in [name] if name in self._declared else order:
            if (register := self._declared[one]) is not None:
                register()
                self._declared[one] = None
        self.registered_commands.sort(key=lambda info: order.index(info.name) if info.name in order else -1)

    def __call__(self, args: Sequence[str] | None = None, **options: Any) -> Any:
        words = sys.argv[1:] if args is None else args
        self.load(next((word for word in words if not word.startswith("-")), None))
        return super().__call__(args, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Function], Function]:  # type: ignore[override]
        def register(function: Function) -> Function:
            own = name or function.__name__.replace("_", "-")
            return super(App, self).command(own, cls=Command, **options)(function)

        return register


# --- options --------------------------------------------------------------------------------------------------------


def expand_groups(command: Function) -> Function:
    """Wrap a command so that each parameter whose type is a group of options becomes one parameter per option."""
    plain = signature(command, eval_str=True)
    groups: dict[str, Any] = {
        one.name: one.annotation for one in plain.parameters.values() if is_dataclass(one.annotation)
    }
    listed: list[Parameter] = []
    for one in plain.parameters.values():
        listed += _group_parameters(groups[one.name]) if one.name in groups else [one]

    @wraps(command)
    def run(*args: Any, **values: Any) -> None:
        built = {
            name: kind(**{field.name: values.pop(field.name) for field in fields(kind) if field.name in values})
            for name, kind in groups.items()
        }
        command(*args, **values, **built)

    return _with_signature(run, plain.replace(parameters=listed))


def _group_parameters(kind: Any) -> list[Parameter]:
    types = get_type_hints(kind, include_extras=True)
    defaults = {field.name: Parameter.empty if field.default is MISSING else field.default for field in fields(kind)}
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
        for name, default in defaults.items()
    ]


def accept_plugins(command: Function) -> Function:
    """Add `--plugin` to a command; the plugins are imported before it runs."""
    added = Parameter("plugin", Parameter.KEYWORD_ONLY, default=None, annotation=PluginOption)
    return _with_option(command, added, _plugins_loaded)


def accept_quiet(command: Function) -> Function:
    """Add `--quiet` to a command."""
    added = Parameter("quiet", Parameter.KEYWORD_ONLY, default=False, annotation=QuietOption)
    return _with_option(command, added, quieted)


@contextmanager
def _plugins_loaded(named: list[str] | None) -> Iterator[None]:
    from allyouneed.plugins import load_all

    load_all(named or [])
    yield


def _with_option(
    command: Function, added: Parameter, effect: Callable[[Any], AbstractContextManager[None]]
) -> Function:
    """The command with one more option. It runs inside `effect(value)`."""
    plain = signature(command, eval_str=True)

    @wraps(command)
    def run(*args: Any, **values: Any) -> None:
        with effect(values.pop(added.name, added.default)):
            command(*args, **values)

    return _with_signature(run, plain.replace(parameters=[*plain.parameters.values(), added]))


def _with_signature(run: Function, shown: Signature) -> Function:
    run.__signature__ = shown  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in shown.parameters.values()}
    return run


# --- what determines the results of a command -----------------------------------------------------------------------


def record_options(name: str, command: Function) -> Function:
    """Wrap a command so that `recorded_options` returns its options while it runs."""
    options = {one.name for one in signature(command).parameters.values() if one.kind is Parameter.KEYWORD_ONLY}

    @wraps(command)
    def run(*args: Any, **values: Any) -> None:
        before = _recorded.set({"command": name} | {key: value for key, value in values.items() if key in options})
        try:
            command(*args, **values)
        finally:
            _recorded.reset(before)

    return run


def recorded_options() -> dict[str, Any]:
    """The options of the running command that determine its results, as plain data."""
    from allyouneed.cli.text.resumable_output import model_fingerprint
    from allyouneed.models import TRANSLATOR, resolve

    options = dict(_recorded.get({}))
    if "model" in options:
        options["model"] = model_fingerprint(resolve(options["model"] or TRANSLATOR))
    return {
        name: value if isinstance(value, int | float | list) else str(value)
        for name, value in options.items()
        if name not in NOT_RECORDED and value is not None and value is not False
    }
