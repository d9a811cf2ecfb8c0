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
    list[str] | None, option("--set", metavar="KEY=VALUE", help="change a key, e.g. width=256; repeatable")
]
JsonOption = Annotated[bool, option("--json", help="answer in JSON")]
ModelOption = Annotated[
    Path, option("--model", "-m", metavar="FOLDER", help="the model to use: ours, or a Hugging Face folder")
]
TranslatorOption = Annotated[
    Path | None, option("--model", "-m", metavar="FOLDER", help="the model to use; the one that comes with the package")
]
DeviceOption = Annotated[str, option(metavar="cpu|cuda", show_default=True, help="where to compute")]
DtypeOption = Annotated[
    str | None, option("--dtype", metavar="float32|bfloat16|float16", help="numbers to compute with; the folder's own")
]
InputOption = Annotated[
    Path | None, option("--input", "-i", panel=FILES, metavar="FILE", help="a text a line (.gz, .zst too)")
]
OutputOption = Annotated[
    Path | None,
    option("--output", "-o", panel=FILES, metavar="FILE", help="appears when it is complete (.gz, .zst too)"),
]
ForceOption = Annotated[bool, option("--force", panel=FILES, help="replace an output that is there")]
RestartOption = Annotated[
    bool, option("--restart", panel=FILES, help="begin anew what was interrupted, instead of going on with it")
]
WholeOption = Annotated[bool, option("--whole", panel=FILES, help="what is read is one text, line breaks included")]
TopOption = Annotated[int | None, option("--top", min=1, help="so many of the likeliest, with their probabilities")]

ToOption = Annotated[str | None, option("--to", panel=LANGUAGES, metavar="LANGUAGE", help="translate into it")]
FromOption = Annotated[str | None, option("--from", panel=LANGUAGES, metavar="LANGUAGE", help="translate from it")]

MethodOption = Annotated[str | None, option(panel=SEARCH, metavar="beam|greedy|sample", help="how to search")]
BeamOption = Annotated[int | None, option(min=1, panel=SEARCH, help="width of the beam search; 1 is greedy")]
BestOption = Annotated[int | None, option(min=1, panel=SEARCH, help="so many answers to each, with scores")]
PenaltyOption = Annotated[float | None, option(panel=SEARCH, help="higher prefers longer texts")]
LengthOption = Annotated[int | None, option("--max-length", min=1, panel=SEARCH, help="at most so many new tokens")]
LeastOption = Annotated[int | None, option("--min-length", min=0, panel=SEARCH, help="and at least so many")]
RepetitionOption = Annotated[
    float | None, option("--repetition-penalty", panel=SEARCH, help="above 1, what was said gets less likely")
]
LoopsOption = Annotated[
    int | None,
    option("--loops", min=0, panel=SEARCH, help="stop what says the same so many times on end (8); 0: never"),
]
StopOption = Annotated[
    list[str] | None, option("--stop", panel=SEARCH, metavar="TEXT", help="end before this text; repeatable")
]

DraftOption = Annotated[
    str | None,
    option(
        "--draft",
        panel=SEARCH,
        metavar="FOLDER|lookup",
        help="a smaller model, or the text itself, guesses ahead: the same answers, sooner; not for beams",
    ),
]
AheadOption = Annotated[
    int | None, option(min=1, panel=SEARCH, help="so many tokens are guessed at a time (4, looked up 8)")
]

TemperatureOption = Annotated[float | None, option(panel=SAMPLING, help="higher is bolder")]
TopKOption = Annotated[int | None, option(panel=SAMPLING, help="only among the k likeliest tokens")]
TopPOption = Annotated[float | None, option(panel=SAMPLING, help="only among the likeliest of probability p")]
MinPOption = Annotated[float | None, option(panel=SAMPLING, help="only those p times as likely as the likeliest")]
SeedOption = Annotated[int | None, option(panel=SAMPLING, help="the same seed draws the same")]


UNSAID = {"input_", "output", "force", "restart", "device"}  # they do not change how a line is answered
_told: ContextVar[dict[str, Any]] = ContextVar("told")


def remembered(name: str, command: Callable[..., None]) -> Callable[..., None]:
    """The command, which remembers the options it was given while it runs: see `said`."""
    options = {one.name for one in signature(command).parameters.values() if one.kind is Parameter.KEYWORD_ONLY}

    @wraps(command)
    def run(*args: Any, **values: Any) -> None:
        before = _told.set({"command": name} | {key: value for key, value in values.items() if key in options})
        try:
            command(*args, **values)
        finally:
            _told.reset(before)

    return run


def said() -> dict[str, Any]:
    """All that the command in hand was told and that decides its answers, as plain data."""
    from allyouneed.cli.unfinished import glimpse
    from allyouneed.models import shipped

    told = dict(_told.get({}))
    if "model" in told:
        told["model"] = glimpse(told["model"] or shipped())
    return {
        name: value if isinstance(value, int | float | list) else str(value)
        for name, value in told.items()
        if name not in UNSAID and value is not None and value is not False
    }


def given(**options: Any) -> dict[str, Any]:
    """Those that were said."""
    return {name: value for name, value in options.items() if value is not None}
