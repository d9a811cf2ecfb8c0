"""Pictures in a terminal: a matrix of marks or shades, curves as rows of bars.

A `Panel` is one picture, whatever it will be drawn with: here with characters, in figure.py with matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import torch
from rich.cells import cell_len, set_cell_size
from rich.text import Text
from torch import Tensor

HALVES = "·▄▀█"  # nothing, the lower of two rows, the upper, both
SHADES = " ░▒▓█"
BARS = " ▁▂▃▄▅▆▇█"
GAP = "   "
COLUMNS = 64  # of one picture


@dataclass(frozen=True)
class Panel:
    """A picture and what is said about it.

    `values` are (rows, columns), of True and False (marks) or of numbers (matrix); of curves they are (lines, places).
    `start`: what the first column is called.
    """

    title: str
    notes: Sequence[str]
    shape: Literal["marks", "matrix", "curves"]
    values: Tensor
    down: str
    across: str
    start: int = 0
    lines: Sequence[str] = ()  # names of the curves


def draw(panels: Sequence[Panel], width: int) -> Text:
    """Side by side as far as they fit, then below each other."""
    drawn = [_drawn(panel, min(COLUMNS, width)) for panel in panels]
    groups: list[list[list[str]]] = []
    for lines in drawn:
        wide = _wide(lines)
        room = width - sum(_wide(other) + len(GAP) for other in groups[-1]) if groups else 0
        if groups and wide <= room:
            groups[-1].append(lines)
        else:
            groups.append([lines])
    return Text("\n\n".join(_beside(group) for group in groups))


def _wide(lines: Sequence[str]) -> int:
    return max(map(cell_len, lines))


def _beside(group: Sequence[Sequence[str]]) -> str:
    widths = [_wide(lines) for lines in group]
    rows = zip_longest(*group, fillvalue="")
    joined = (GAP.join(set_cell_size(cell, size) for cell, size in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in joined)


def _drawn(panel: Panel, columns: int) -> list[str]:
    make = {"marks": _marks, "matrix": _matrix, "curves": _curves}[panel.shape]
    picture, legend = make(panel, columns)
    return [panel.title, *picture, *([legend] if legend else []), *panel.notes]


def _marks(panel: Panel, columns: int) -> tuple[list[str], str]:
    """Exactly, two rows a character, or, where there are too many, shades by how many of a spot are marked."""
    seen = panel.values
    if seen.shape[1] <= columns:
        rows = seen.long()
        rows = torch.cat([rows, rows.new_zeros(len(rows) % 2, rows.shape[1])])
        return ["".join(HALVES[2 * a + b] for a, b in zip(up, low, strict=True)) for up, low in _pairs(rows)], ""
    across = math.ceil(seen.shape[1] / columns)
    share = _means(seen.float(), 2 * across, across)
    # only what is empty is a dot and only what is full is full: neither a line nor a gap disappears
    marks = [
        ["·" if part == 0 else SHADES[4 if part == 1 else 1 + int(part * 3)] for part in row] for row in share.tolist()
    ]
    return ["".join(row) for row in marks], f"a mark is {2 * across} × {across} tokens"


def _pairs(rows: Tensor) -> list[tuple[list[int], list[int]]]:
    return list(zip(rows[0::2].tolist(), rows[1::2].tolist(), strict=True))


def _matrix(panel: Panel, columns: int) -> tuple[list[str], str]:
    """From the smallest value, empty, to the largest, full."""
    values = panel.values.float()
    across = math.ceil(values.shape[1] / columns)
    down = math.ceil(len(values) / max(1, columns // 2))
    low, high = float(values.min()), float(values.max())
    # a spot of alternating values would average to grey everywhere: its first value stands for it
    kept = values[::down, ::across]
    level = ((kept - low) / max(high - low, 1e-9) * 4).round().long().clamp(0, 4).tolist()
    picture = ["".join(SHADES[v] for v in row) for row in level]
    sides = f"{_each(panel.down, down)} down, {_each(panel.across, across)} across"
    return picture, f"{sides}; {low:.2g} is empty, {high:.2g} full"


def _each(name: str, step: int) -> str:
    return name if step == 1 else f"{name} (one of {step})"


def _curves(panel: Panel, columns: int) -> tuple[list[str], str]:
    values = panel.values.float()
    across = math.ceil(values.shape[1] / columns)
    kept = values[:, ::across]
    low, high = float(values.min()), float(values.max())
    level = ((kept - low) / max(high - low, 1e-9) * 8).round().long().clamp(0, 8).tolist()
    longest = max(map(len, panel.lines), default=0)
    names = [f"{name:<{longest}} " for name in panel.lines] or [""] * len(values)
    bars = [f"{name}{''.join(BARS[v] for v in row)}" for name, row in zip(names, level, strict=True)]
    end = panel.start + values.shape[1] - 1
    return bars, f"{panel.across} from {panel.start} to {end}; {low:.2g} is empty, {high:.2g} full"


def _means(values: Tensor, down: int, across: int) -> Tensor:
    """The mean of each spot of `down` × `across`; spots at the edges are as large as what is left."""
    rows, columns = (math.ceil(side / step) for side, step in zip(values.shape, (down, across), strict=True))
    room = values.new_zeros(rows * down, columns * across)
    count = torch.zeros_like(room)
    room[: values.shape[0], : values.shape[1]] = values
    count[: values.shape[0], : values.shape[1]] = 1

    def summed(x: Tensor) -> Tensor:
        return x.unflatten(1, (columns, across)).unflatten(0, (rows, down)).sum((1, 3))

    return summed(room) / summed(count)
