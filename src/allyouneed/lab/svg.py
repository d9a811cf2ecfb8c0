"""Small plots as SVG text, the same bytes for the same numbers: lines and points with error bars, on linear or
logarithmic axes. They follow a page's colours, and need no library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 280
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 42
COLOURS = ("#2563b8", "#c2410c", "#15803d", "#7e22ce", "#be123c", "#0e7490", "#a16207", "#4b5563")
DASHES = ("none", "6 3", "2 3", "8 3 2 3")
MARKS = "●■▲◆"
GRID = "stroke:currentColor;opacity:.12"
FRONT = "fill:none;stroke:currentColor;opacity:.4;stroke-dasharray:3 3"
STYLE = "font-family:system-ui,'Noto Sans SC',sans-serif;font-size:11px;fill:currentColor"


@dataclass(frozen=True)
class Axis:
    """An axis: what it shows, and whether equal steps are equal factors."""

    label: str
    log: bool = False

    def at(self, value: float) -> float:
        return math.log10(value) if self.log else value


@dataclass(frozen=True)
class Series:
    """Points of one model. `bars`: the interval of each value; `lines`: whether they are joined; `marks`: whether each
    has a mark."""

    points: Sequence[tuple[float, float]]
    bars: Sequence[tuple[float, float]] = ()
    lines: bool = True
    marks: bool = True


def plot(series: Mapping[str, Series], x: Axis, y: Axis, title: str, front: Sequence[tuple[float, float]] = ()) -> str:
    """An SVG element. `front`: points that a thin line joins. Points that the axes cannot show are left out."""
    shown = {name: _usable(one, x, y) for name, one in series.items()}
    right_edge, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    everything = [point for one in shown.values() for point in one.points]
    heights = [v for _, v in everything] + [v for one in shown.values() for bar in one.bars for v in bar]
    if not everything:
        return ""
    left, right = _bounds([x.at(v) for v, _ in everything])
    low, high = _bounds([y.at(v) for v in heights if not y.log or v > 0])

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across, up = (x.at(point[0]) - left) / (right - left), (y.at(point[1]) - low) / (high - low)
        return round(LEFT + across * (right_edge - LEFT), 1), round(floor - up * (floor - TOP), 1)

    legend = 16 * len(series)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + legend}" role="img" '
        f'aria-label="{escape(title)}" style="{STYLE}">'
    ]
    for value, text in _ticks(left, right, x.log):
        at = round(LEFT + (value - left) / (right - left) * (right_edge - LEFT), 1)
        lines.append(
            f'<line x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="currentColor" opacity=".12"/>'
        )
        lines.append(f'<text x="{at}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{text}</text>')
    for value, text in _ticks(low, high, y.log):
        at = round(floor - (value - low) / (high - low) * (floor - TOP), 1)
        lines.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}" stroke="currentColor" opacity=".12"/>'
        )
        lines.append(f'<text x="{LEFT - 6}" y="{at + 4}" text-anchor="end">{text}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    lines.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.label)}</text>')
    up = (TOP + HEIGHT - BOTTOM) / 2
    lines.append(f'<text transform="translate(13 {up}) rotate(-90)" text-anchor="middle">{escape(y.label)}</text>')
    if front:
        points = " ".join("{},{}".format(*place(point)) for point in front)
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="currentColor" opacity=".4" stroke-dasharray="3 3"/>'
        )
    for number, (name, one) in enumerate(shown.items()):
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
        mark, pen, ink = MARKS[number % len(MARKS)], f"stroke:{colour};stroke-width:1.6", f"fill:{colour}"
        if one.lines and len(one.points) > 1:
            points = " ".join("{},{}".format(*place(point)) for point in one.points)
            lines.append(f'<polyline points="{points}" style="fill:none;{pen};stroke-dasharray:{dash}"/>')
        for point, bar in zip(one.points, one.bars, strict=False):
            (at, first), (_, second) = (place((point[0], value)) for value in bar)
            lines.append(f'<line x1="{at}" x2="{at}" y1="{first}" y2="{second}" style="{pen}"/>')
        if one.marks:
            for point in one.points:
                at, up = place(point)
                lines.append(f'<text x="{at}" y="{up + 4}" text-anchor="middle" style="{ink}">{mark}</text>')
        line = HEIGHT + 12 + 16 * number
        lines.append(f'<text x="{LEFT}" y="{line}" style="{ink}">{mark} {escape(name)}</text>')
    return "\n".join([*lines, "</svg>"])


def pareto(points: Mapping[str, tuple[float, float]], higher: bool) -> list[tuple[float, float]]:
    """The points that no other beats in both: `higher` on the x axis is better, or lower; lower on the y axis."""
    ordered = sorted(points.values(), key=lambda point: (-point[0] if higher else point[0], point[1]))
    front: list[tuple[float, float]] = []
    for point in ordered:
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def _usable(one: Series, x: Axis, y: Axis) -> Series:
    def fits(point: tuple[float, float]) -> bool:
        finite = math.isfinite(point[0]) and math.isfinite(point[1])
        return finite and (point[0] > 0 or not x.log) and (point[1] > 0 or not y.log)

    kept = [number for number, point in enumerate(one.points) if fits(point)]
    bars = [one.bars[number] for number in kept] if one.bars else ()
    return Series([one.points[number] for number in kept], bars, one.lines, one.marks)


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _ticks(low: float, high: float, log: bool) -> list[tuple[float, str]]:
    """Round values within the bounds; of a logarithmic axis, its logarithms."""
    if log:
        steps: tuple[float, ...] = (
            (1.0,) if high - low > 2.5 else (1.0, 3.0) if high - low > 1 else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
        )
        values = [digit * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for digit in steps]
        return [(math.log10(value), short(value)) for value in values if low <= math.log10(value) <= high]
    step = 10.0 ** math.floor(math.log10((high - low) / 3))
    step *= next((factor for factor in (1, 2, 5) if (high - low) / (step * factor) <= 6), 10)
    first = math.ceil(low / step)
    return [(n * step, short(round(n * step, 9))) for n in range(first, math.floor(high / step) + 1)]


def short(value: float) -> str:
    """A number in few characters."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.0e}".replace("e-0", "e-")
