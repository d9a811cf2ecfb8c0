"""All presets side by side, from their configs alone: no model is built, so a 70B preset takes milliseconds."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from allyouneed import model_config
from allyouneed.config import PRESETS, preset_names, tree_of
from allyouneed.errors import UserError
from allyouneed.models import NAMES, find
from allyouneed.nn.models.base import Model

LENGTHS = (1024, 32768)
BYTES = 2  # bf16


@dataclass(frozen=True)
class CostAt:
    """The cost of a model at one context length."""

    length: int
    flops: float  # forward, per token; per source and target token of an encoder-decoder
    state: float | None  # bytes of decoding state in bf16, in a CUDA graph; None for models that do not generate
    reached: bool  # within the limit of its positions


@dataclass(frozen=True)
class Row:
    name: str
    kind: str
    parameters: int
    limit: int | None
    at: tuple[CostAt, ...]
    paper: str

    def tree(self) -> dict[str, Any]:
        return asdict(self)


def row(name: str, lengths: Sequence[int] = LENGTHS) -> Row:
    config = model_config(name)
    at = tuple(_at(config, length) for length in lengths)
    kind = str(tree_of(config, full=False)["kind"])
    return Row(name, kind, config.cost(lengths[0]).parameters, config.limit, at, paper(name))


def _at(config: Model, length: int) -> CostAt:
    cost = config.cost(length)
    state = cost.state_bytes(length, BYTES, captured=True)
    reached = config.limit is None or length <= config.limit
    return CostAt(length, cost.flops, state if config.generates else None, reached)


def paper(name: str) -> str:
    """The source of a preset: the first sentence of its file's leading comment."""
    if name in NAMES:
        return "bundled with its weights (docs/translator.md)"
    lines = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))
    return re.split(r";|\.(?= [A-Z])|\.$", comment)[0]


ORDERS: dict[str, Callable[[Row], Any]] = {
    "name": lambda row: row.name,
    "kind": lambda row: (row.kind, row.parameters, row.name),
    "parameters": lambda row: (row.parameters, row.name),
    "flops": lambda row: (row.at[-1].flops, row.name),
    "state": lambda row: (row.at[-1].state or 0.0, row.name),
}


def rows(wanted: Sequence[str] = (), order: str = "name", lengths: Sequence[int] = LENGTHS) -> list[Row]:
    """Presets and bundled models whose name contains one of the words; all without words."""
    if order not in ORDERS:
        raise UserError(f"unknown --sort {order} (allowed: {', '.join(ORDERS)})")
    names = sorted([*preset_names(), *(name for name in NAMES if find(name))])
    for word in wanted:
        if not any(word in name for name in names):
            close = difflib.get_close_matches(word, names, n=1)
            near = f"; did you mean {close[0]!r}?" if close else ""
            raise UserError(f"no preset contains {word!r}{near} (allowed: {', '.join(names)})")
    chosen = [name for name in names if not wanted or any(word in name for word in wanted)]
    return sorted((row(name, lengths) for name in chosen), key=ORDERS[order])


def table(found: Sequence[Row], papers: bool = False) -> RenderableType:
    lengths = [at.length for at in found[0].at] if found else []
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    grid.add_column("model", no_wrap=True)
    grid.add_column("kind", no_wrap=True)
    for head in ("parameters", *(f"FLOPs/token\nat {short(n, 1024)}" for n in lengths)):
        grid.add_column(head, justify="right", no_wrap=True)
    for length in lengths:
        grid.add_column(f"state, bf16\nat {short(length, 1024)}", justify="right", no_wrap=True)
    if papers:
        grid.add_column("paper", no_wrap=True)
    for one in found:
        flops = [short(at.flops) + ("" if at.reached else "*") for at in one.at]
        states = ["–" if at.state is None else short(at.state) + "B" + ("" if at.reached else "*") for at in one.at]
        grid.add_row(one.name, one.kind, short(one.parameters), *flops, *states, *([one.paper] if papers else []))
    return grid


def notes(found: Sequence[Row]) -> list[str]:
    """Legend of the table."""
    lines = ["FLOPs: one forward pass; state: decoding state of one text (2 bytes per number)."]
    if any(one.kind in ("encoder-decoder", "two-towers") for one in found):
        lines.append("Two inputs: FLOPs of one token of each, both inputs of that length.")
    if any(not at.reached for one in found for at in one.at):
        lines.append("*: beyond the limit of the model's positions; extrapolated.")
    return lines


def short(value: float, base: int = 1000) -> str:
    """Three digits and a letter: 63.1M."""
    for letter in ("", "k", "M", "G", "T", "P"):
        if value < base or letter == "P":
            break
        value /= base
    return f"{value:.3g}{letter}" if value < 999.5 else f"{value:.0f}{letter}"
