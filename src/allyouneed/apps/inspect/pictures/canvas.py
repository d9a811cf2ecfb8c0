"""Pictures in a terminal: a matrix as marks or shades, curves as rows of bars.

A `Panel` is one picture, independent of how it is rendered: with characters here, with matplotlib in figure.py.
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

HALVES = "·▄▀█"  # neither of two rows, the lower, the upper, both
SHADES = " ░▒▓█"
BARS = " ▁▂▃▄▅▆▇█"
GAP = "   "
COLUMNS = 64  # of one picture


@dataclass(frozen=True)
class Panel:
    """A picture with its caption.

    `values`: (rows, columns) of bool (marks) or numbers (matrix), or (lines, points) of curves. `start`: the coordinate
    of the first column.
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
    """Draw panels side by side where they fit, then in further rows."""
    rendered = [_render(panel, min(COLUMNS, width)) for panel in panels]
    groups: list[list[list[str]]] = []
    for lines in rendered:
        needed = _width_of(lines)
        free = width - sum(_width_of(other) + len(GAP) for other in groups[-1]) if groups else 0
        if groups and needed <= free:
            groups[-1].append(lines)
        else:
            groups.append([lines])
    return Text("\n\n".join(_side_by_side(group) for group in groups))


def _width_of(lines: Sequence[str]) -> int:
    return max(map(cell_len, lines))


def _side_by_side(group: Sequence[Sequence[str]]) -> str:
    widths = [_width_of(lines) for lines in group]
    rows = zip_longest(*group, fillvalue="")
    joined = (GAP.join(set_cell_size(cell, size) for cell, size in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in joined)


def _render(panel: Panel, columns: int) -> list[str]:
    render = {"marks": _marks, "matrix": _matrix, "curves": _curves}[panel.shape]
    picture, legend = render(panel, columns)
    return [panel.title, *picture, *([legend] if legend else []), *panel.notes]


def _marks(panel: Panel, columns: int) -> tuple[list[str], str]:
    """Two rows per character; where there are too many, shades by the marked share of each cell."""
    marked = panel.values
    if marked.shape[1] <= columns:
        rows = marked.long()
        rows = torch.cat([rows, rows.new_zeros(len(rows) % 2, rows.shape[1])])
        return ["".join(HALVES[2 * a + b] for a, b in zip(up, low, strict=True)) for up, low in _pairs(rows)], ""
    across = math.ceil(marked.shape[1] / columns)
    share = _means(marked.float(), 2 * across, across)
    # a dot is exactly empty and a full block exactly full, so that neither lines nor gaps disappear
    marks = [
        ["·" if part == 0 else SHADES[4 if part == 1 else 1 + int(part * 3)] for part in row] for row in share.tolist()
    ]
    return ["".join(row) for row in marks], f"one character is {2 * across} × {across} tokens"


def _pairs(rows: Tensor) -> list[tuple[list[int], list[int]]]:
    return list(zip(rows[0::2].tolist(), rows[1::2].tolist(), strict=True))


def _matrix(panel: Panel, columns: int) -> tuple[list[str], str]:
    """Shades from the smallest value (empty) to the largest (full)."""
    values = panel.values.float()
    across = math.ceil(values.shape[1] / columns)
    down = math.ceil(len(values) / max(1, columns // 2))
    low, high = float(values.min()), float(values.max())
    # averaging alternating values would give grey everywhere: take the first value of each cell
    kept = values[::down, ::across]
    level = ((kept - low) / max(high - low, 1e-9) * 4).round().long().clamp(0, 4).tolist()
    picture = ["".join(SHADES[v] for v in row) for row in level]
    sides = f"{_axis(panel.down, down)} down, {_axis(panel.across, across)} across"
    return picture, f"{sides}; {low:.2g} is empty, {high:.2g} full"


def _axis(name: str, step: int) -> str:
    return name if step == 1 else f"{name} (1 in {step})"


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
    """The mean of each cell of `down` × `across` values; cells at the edges may be smaller."""
    rows, columns = (math.ceil(side / step) for side, step in zip(values.shape, (down, across), strict=True))
    padded = values.new_zeros(rows * down, columns * across)
    count = torch.zeros_like(padded)
    padded[: values.shape[0], : values.shape[1]] = values
    count[: values.shape[0], : values.shape[1]] = 1

    def cell_sums(x: Tensor) -> Tensor:
        return x.unflatten(1, (columns, across)).unflatten(0, (rows, down)).sum((1, 3))

    return cell_sums(padded) / cell_sums(count)
