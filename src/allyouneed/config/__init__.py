"""Config is data: a tree of small frozen pydantic models that round-trips through YAML without loss.

A *slot* (mixer, norm, wiring, …) is a base class; a *part* that fills it is a subclass with its own `kind`. Subclassing
registers the part. In YAML a part is `{kind: attention, heads: 8}`, or just `attention` for its defaults. All errors
are reported at once, by path: `decoder[0].mixer.patern: unknown; did you mean 'pattern'?`
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast

import yaml
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, ValidatorFunctionWrapHandler
from pydantic import model_validator as model_validator  # re-exported: parts validate with it
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from allyouneed import models, plugins
from allyouneed.config.messages import describe, find_union, show, suggest, type_text, unknown_key
from allyouneed.errors import UserError
from allyouneed.files.reading import MAX_JSON_BYTES, parse_json, parse_yaml

MAX_INTEGER = 1 << 31
MAX_PROBLEMS = 1000  # of one part of a config that are reported
PRESETS = Path(__file__).parents[1] / "presets"


class ConfigError(UserError):
    """All errors of a config, one line each."""

    def __init__(self, problems: Sequence[str], where: str = "") -> None:
        self.problems = list(problems)
        head = f"{where}: " if where else ""
        many = f"{len(self.problems)} problems\n  " if len(self.problems) > 1 else ""
        super().__init__(head + many + "\n  ".join(self.problems))


class Config(BaseModel):
    """A frozen, typed node of the tree. Unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="wrap")
    @classmethod
    def _reword_errors(cls, data: Any, handler: ValidatorFunctionWrapHandler) -> Self:
        try:
            result: Self = handler(data)
            _check_integers(result)
            return result
        except ValidationError as error:
            raise _reworded(error, cls) from None


def _check_integers(config: Config) -> None:
    """Integers are below 2^31, but for fields with a bound of their own: torch takes no larger sizes."""
    for name in _unbounded_fields(type(config)):
        value = getattr(config, name)
        for number in value if isinstance(value, tuple | list) else (value,):
            if type(number) is int and not -MAX_INTEGER < number < MAX_INTEGER:
                raise _problem(type(config).__name__, (name,), f"{number:,} is too large", number)


@cache
def _unbounded_fields(cls: type[Config]) -> tuple[str, ...]:
    bounds = ((name, field.metadata) for name, field in cls.model_fields.items())
    return tuple(
        name for name, given in bounds if not any(hasattr(bound, "lt") or hasattr(bound, "le") for bound in given)
    )


class Part(Config):
    """One choice for a slot. `class Mixer(Part, slot="mixer")` opens a slot, `class Attention(Mixer)` fills it."""

    slot: ClassVar[str] = ""
    default_kind: ClassVar[str | None] = None
    registry: ClassVar[dict[str, type[Part]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, slot: str = "", default: str | None = None, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if slot:
            cls.slot, cls.default_kind, cls.registry = slot, default, {}
        elif "kind" in cls.model_fields:
            kind = cls.model_fields["kind"].default
            if not plugins.is_builtin(cls.__module__):
                plugins.provide_own(kind)  # a plugin must not take the kind of a part that is not imported yet
            known = cls.registry.get(kind)
            if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise plugins.PartCollision(
                    f"{cls.__name__}: the slot {cls.slot!r} already has a part of kind {kind!r} "
                    f"({known.__module__}.{known.__name__})"
                )
            cls.registry[kind] = cls
            plugins.register(cls.slot, kind, cls.__module__)

    def __init_subclass__(cls, slot: str = "", default: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)

    @classmethod
    def from_text(cls, text: str) -> Any:
        """Parse a bare word in this slot: the part of that kind with its defaults."""
        return {"kind": text}

    def to_text(self) -> Any:
        """A shorter notation than the part's keys, if it has one."""
        return None

    def inputs(self) -> dict[str, bool]:
        """Names of the model inputs that this part reads from a batch (docs/calling.md); true: required."""
        return {}

    @classmethod
    def choose(cls, value: Any) -> Any:
        """Turn the value of a slot into the part it names."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            value = cls.from_text(value)
            if isinstance(value, cls):
                return value
        if not isinstance(value, Mapping):
            raise PydanticCustomError("slot", "expected the name of a {slot} or keys with 'kind'", {"slot": cls.slot})
        kind = value.get("kind", cls.default_kind)
        part = cls.find(kind)
        if part is None:
            message = "'kind' is missing" if kind is None else f"unknown {cls.slot} {kind!r}"
            raise _problem(cls.__name__, ("kind",), message + suggest(kind, cls.known()), value)
        return part.model_validate(value)

    @classmethod
    def find(cls, kind: Any) -> type[Self] | None:
        """The part of this kind for this slot. Its module is imported when it is first asked for."""
        if isinstance(kind, str) and kind not in cls.registry:
            plugins.provide(kind)
        return cast("type[Self] | None", cls.registry.get(kind)) if isinstance(kind, str) else None

    @classmethod
    def known(cls) -> dict[str, type[Self]]:
        """Every part for this slot by its kind, in the order of their modules; imports them all."""
        plugins.import_all_parts()
        return cast("dict[str, type[Self]]", dict(sorted(cls.registry.items(), key=lambda one: one[1].__module__)))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if "kind" in cls.__pydantic_fields__:
            return handler(source)
        return core_schema.no_info_plain_validator_function(
            lambda value: cls.choose(value),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda part, info: _dump_part(part, info), info_arg=True
            ),
        )


def _dump_part(part: Any, info: core_schema.SerializationInfo | _Full) -> Any:
    if not isinstance(part, Part):
        return part
    short = part.to_text()
    if short is not None:
        return short
    tree = part.model_dump(mode=info.mode, exclude_defaults=info.exclude_defaults, by_alias=info.by_alias)
    if "kind" not in type(part).model_fields:
        return tree
    kind = type(part).model_fields["kind"].default
    if info.exclude_defaults and not tree:
        return kind
    return {"kind": kind} | tree


# --- reading and writing -------------------------------------------------------------------------------------------

C = TypeVar("C", bound=Config)


def parse(cls: type[C], tree: Any, where: str = "") -> C:
    """Validate a tree; on failure raise one ConfigError that names every error by its path."""
    try:
        return cls.model_validate(tree)
    except ValidationError as error:
        problems = [f"{_path(e['loc'])}{': ' if e['loc'] else ''}{describe(e)}" for e in error.errors()]
        raise ConfigError(problems, where) from None


def tree_of(config: Config, full: bool = True) -> dict[str, Any]:
    """The config as plain data. `full` includes defaults, so that it keeps its meaning if they change."""
    tree = _dump_part(config, _Full(exclude_defaults=not full)) if isinstance(config, Part) else None
    if isinstance(tree, str):
        tree = {"kind": tree}
    return tree if tree is not None else config.model_dump(mode="json", exclude_defaults=not full, by_alias=True)


@dataclass(frozen=True)
class _Full:
    """Stands in for pydantic's SerializationInfo at the root of a tree."""

    exclude_defaults: bool
    mode: str = "json"
    by_alias: bool = True


def iter_parts(config: Any) -> Iterator[Any]:
    """A config and everything below it, depth first: configs and tuples of them."""
    yield config
    values: Any = ()
    if isinstance(config, BaseModel):
        values = (getattr(config, name) for name in type(config).model_fields)
    elif isinstance(config, tuple | list):
        values = config
    for value in values:
        if isinstance(value, BaseModel | tuple | list):
            yield from iter_parts(value)


def to_yaml(config: Config, full: bool = False) -> str:
    return yaml.safe_dump(tree_of(config, full), sort_keys=False, allow_unicode=True, default_flow_style=None)


def read_tree(path: Path | str) -> Any:
    """Read a YAML or JSON file as plain data; errors name the file."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise UserError(f"{path}: more than {MAX_JSON_BYTES:,} bytes, too large for a config")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{path}: cannot read: {reason}") from None
    try:
        return parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{path}: not valid {'JSON' if path.suffix == '.json' else 'YAML'}: {error}") from None


@cache
def preset_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PRESETS.glob("*.yaml")))


@cache
def _shipped_preset(name: str) -> Any:
    return read_tree(PRESETS / f"{name}.yaml")


def preset_tree(name: str) -> dict[str, Any]:
    """The tree of a preset or of a bundled model (by name), or of a YAML file (by path)."""
    if name in preset_names():
        tree = copy.deepcopy(_shipped_preset(name))
    elif models.is_bundled(name):
        tree = read_tree(models.shipped(name) / "config.json")["model"]
    elif name.endswith((".yaml", ".yml", ".json")):
        tree = read_tree(name)
    else:
        known = [*preset_names(), *models.NAMES]
        hint = suggest(name, known).partition(" (allowed")[0]  # `allyouneed models` says what each is
        raise UserError(f"{name!r}: unknown preset, and not a YAML file{hint}; `allyouneed models` lists them")
    if not isinstance(tree, dict):
        raise UserError(f"{name}: expected a mapping of keys, got {type(tree).__name__}")
    return tree


def override(tree: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """A copy of the tree with `width=256`, `encoder[0].mixer.heads=4`, … applied; values are YAML."""
    changed: dict[str, Any] = copy.deepcopy(tree)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        steps = [step for step in re.split(r"[.\[\]]+", path.strip()) if step]
        if not equals or not steps:
            raise UserError(f"--set {assignment!r}: expected key=value, e.g. width=256 or encoder[0].mixer.heads=4")
        try:
            value = parse_yaml(text)
        except ValueError:
            raise UserError(f"--set {assignment!r}: {text!r} is not a valid YAML value") from None
        _assign(changed, steps, value, assignment)
    return changed


def _assign(tree: Any, steps: list[str], value: Any, assignment: str) -> None:
    node = tree
    for depth, step in enumerate(steps):
        last = depth == len(steps) - 1
        key: Any = step
        if isinstance(node, list):
            if not step.isdigit() or int(step) >= len(node):
                spot = ".".join(steps[:depth])
                raise UserError(f"--set {assignment!r}: {spot} has entries 0 to {len(node) - 1}, not {step!r}")
            key = int(step)
        if last:
            node[key] = value
            return
        child = node[key] if isinstance(node, list) else node.get(key)
        if isinstance(child, str):  # `wiring: post-norm` is short for `wiring: {kind: post-norm}`
            child = node[key] = {"kind": child}
        elif child is None:
            child = node[key] = {}
        if not isinstance(child, dict | list):
            raise UserError(f"--set {assignment!r}: {'.'.join(steps[: depth + 1])} is a value and has no keys")
        node = child


# --- messages ------------------------------------------------------------------------------------------------------


def _path(loc: Iterable[str | int]) -> str:
    text = ""
    for step in loc:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def _problem(title: str, loc: tuple[str | int, ...], message: str, value: Any) -> ValidationError:
    return ValidationError.from_exception_data(title, [_detail(loc, message, value)])


def _detail(loc: tuple[str | int, ...], message: str, value: Any) -> InitErrorDetails:
    return InitErrorDetails(type=PydanticCustomError("config", "{text}", {"text": message}), loc=loc, input=value)


def _reworded(error: ValidationError, cls: type[Config]) -> ValidationError:
    """The same errors in short phrases, with suggestions for unknown keys of this class. Where pydantic has tried
    several types, one error says what all of them expect."""
    types = {field.alias or name: field.annotation for name, field in cls.model_fields.items()}
    details: dict[tuple[str | int, ...], InitErrorDetails] = {}
    errors = error.errors(include_url=False)
    for e in errors[:MAX_PROBLEMS]:
        loc, message = e["loc"], describe(e)
        if e["type"] == "extra_forbidden" and len(loc) == 1:
            message = unknown_key(loc[0], types)
        elif e["type"] != "config" and (union := find_union(types.get(str(loc[0])) if loc else None, loc[1:])):
            depth, annotation = union
            loc, message = loc[: depth + 1], f"expected {type_text(annotation)}, not {show(e['input'])}"
        details.setdefault((*loc, message), _detail(loc, message, e["input"]))
    if (more := len(errors) - MAX_PROBLEMS) > 0:
        details[()] = _detail((), f"and {more:,} more problems", None)
    return ValidationError.from_exception_data(error.title, list(details.values()))
