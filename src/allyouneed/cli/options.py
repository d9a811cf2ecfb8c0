"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

# the panels of `allyouneed --help`
USE, TRAIN, LOOK, EXCHANGE = "Use a model", "Train and measure", "Look inside", "Exchange with others"
# and of a command's own help
FILES, LANGUAGES, SEARCH, SAMPLING = "Files", "Multilingual models", "Search", "Sampling"


def option(*names: str, panel: str = "Options", show_default: bool = False, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, show_default=show_default, **more)


SetOption = Annotated[
    list[str] | None, option("--set", metavar="KEY=VALUE", help="override a key, e.g. width=256; repeatable")
]
PluginOption = Annotated[
    list[str] | None,
    option("--plugin", metavar="FILE|MODULE", help="import parts from a .py file or a module; repeatable"),
]
JsonOption = Annotated[bool, option("--json", help="print JSON")]
ModelOption = Annotated[
    Path, option("--model", "-m", metavar="FOLDER", help="a model folder: ours, Hugging Face's or translator")
]
TranslatorOption = Annotated[
    Path | None, option("--model", "-m", metavar="FOLDER", help="a model folder; default: the bundled translator")
]
DeviceOption = Annotated[str, option(metavar="cpu|cuda", show_default=True, help="device to compute on")]
DtypeOption = Annotated[
    str | None,
    option("--dtype", metavar="float32|bfloat16|float16", help="precision of the weights; default: as stored"),
]
InputOption = Annotated[
    Path | None, option("--input", "-i", panel=FILES, metavar="FILE", help="read one text per line (.gz, .zst too)")
]
OutputOption = Annotated[
    Path | None,
    option("--output", "-o", panel=FILES, metavar="FILE", help="write here; appears when complete (.gz, .zst too)"),
]
ForceOption = Annotated[bool, option("--force", panel=FILES, help="overwrite an existing output")]
RestartOption = Annotated[bool, option("--restart", panel=FILES, help="discard an interrupted run instead of resuming")]
WholeOption = Annotated[bool, option("--whole", panel=FILES, help="read the input as one text, line breaks included")]
TopOption = Annotated[int | None, option("--top", min=1, help="show the N most likely, with probabilities")]

ToOption = Annotated[str | None, option("--to", panel=LANGUAGES, metavar="LANGUAGE", help="target language")]
FromOption = Annotated[str | None, option("--from", panel=LANGUAGES, metavar="LANGUAGE", help="source language")]

MethodOption = Annotated[str | None, option(panel=SEARCH, metavar="beam|greedy|sample", help="decoding method")]
BeamOption = Annotated[int | None, option(min=1, panel=SEARCH, help="beam width; 1 is greedy")]
BestOption = Annotated[int | None, option(min=1, panel=SEARCH, help="print the N best results, with scores")]
PenaltyOption = Annotated[float | None, option(panel=SEARCH, help="length penalty; higher favours longer texts")]
LengthOption = Annotated[int | None, option("--max-length", min=1, panel=SEARCH, help="at most N new tokens")]
LeastOption = Annotated[int | None, option("--min-length", min=0, panel=SEARCH, help="at least N new tokens")]
RepetitionOption = Annotated[
    float | None, option("--repetition-penalty", panel=SEARCH, help="above 1: penalize tokens already generated")
]
LoopsOption = Annotated[
    int | None,
    option("--loops", min=0, panel=SEARCH, help="stop after N repetitions in a row (default 8); 0: never"),
]
StopOption = Annotated[
    list[str] | None, option("--stop", panel=SEARCH, metavar="TEXT", help="stop before this text; repeatable")
]

DraftOption = Annotated[
    str | None,
    option(
        "--draft",
        panel=SEARCH,
        metavar="FOLDER|lookup",
        help="speculative decoding with a smaller model or prompt lookup: same results, faster; not for beams",
    ),
]
AheadOption = Annotated[int | None, option(min=1, panel=SEARCH, help="tokens to draft per step (default 4; lookup 8)")]

TemperatureOption = Annotated[float | None, option(panel=SAMPLING, help="softmax temperature; higher is more random")]
TopKOption = Annotated[int | None, option(panel=SAMPLING, help="sample from the k most likely tokens")]
TopPOption = Annotated[float | None, option(panel=SAMPLING, help="sample from the smallest set of probability p")]
MinPOption = Annotated[
    float | None, option(panel=SAMPLING, help="drop tokens less likely than p times the most likely one")
]
SeedOption = Annotated[int | None, option(panel=SAMPLING, help="random seed; the same seed gives the same samples")]


NOT_RECORDED = {"input_", "output", "force", "restart", "device"}  # these do not change the result of a line
_recorded: ContextVar[dict[str, Any]] = ContextVar("recorded_options")


def record_options(name: str, command: Callable[..., None]) -> Callable[..., None]:
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
    from allyouneed.cli.resumable_output import model_fingerprint
    from allyouneed.models import TRANSLATOR, resolve

    options = dict(_recorded.get({}))
    if "model" in options:
        options["model"] = model_fingerprint(resolve(options["model"] or TRANSLATOR))
    return {
        name: value if isinstance(value, int | float | list) else str(value)
        for name, value in options.items()
        if name not in NOT_RECORDED and value is not None and value is not False
    }


def accept_plugins(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--plugin` to a command; the plugins are imported before it runs."""
    plain = signature(command, eval_str=True)

    @wraps(command)
    def run(*args: Any, plugin: list[str] | None = None, **values: Any) -> None:
        from allyouneed.plugins import load_all

        load_all(plugin or [])
        command(*args, **values)

    added = Parameter("plugin", Parameter.KEYWORD_ONLY, default=None, annotation=PluginOption)
    run.__signature__ = plain.replace(parameters=[*plain.parameters.values(), added])  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in run.__signature__.parameters.values()}  # type: ignore[attr-defined]
    return run


def set_options(**options: Any) -> dict[str, Any]:
    """The options that were given: not None."""
    return {name: value for name, value in options.items() if value is not None}
