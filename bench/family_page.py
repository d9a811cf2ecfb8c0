"""Tables and curves of the family benchmarks, written into result pages between marks: `<!-- name -->` and
`<!-- /name -->`, each on a line of its own. Nobody copies figures by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from family_sizes import UNEQUAL, Sizes, ratios, settings

AIM = 0.7
Curves = dict[str, dict[int, float]]  # by name and length
PANEL = 16  # lines that a panel holds


def fill(page: Path, parts: dict[str, str]) -> None:
    """Replace what stands between the marks; an unknown mark is an error."""
    text = page.read_text("utf-8")
    for name, new in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        before, first, rest = text.partition(begin)
        _, last, after = rest.partition(end)
        if not first or not last:
            raise SystemExit(f"{page} has no lines {begin.strip()} and {end.strip()}")
        text = f"{before}{begin}\n{new.strip()}\n\n{end}{after}"
    page.write_text(text, "utf-8")


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *body))


def share(found: float | None, base: float | None, aim: float = AIM) -> str:
    if not found or not base:
        return ""
    return f"{found / base:.2f}{'' if found / base >= aim else ' ↓'}"


def weights(s: Sizes, name: str) -> str:
    """Of the mixer, and of the whole model, over those with attention."""
    mixer, whole = ratios(s, settings(s)[name])
    return f"{'–' if name == 'experts' else f'{mixer:.2f}'} / {whole:.2f}"


def unequal(s: Sizes, names: Sequence[str]) -> str:
    """Which rows have not as many weights as attention, and why."""
    found = [f"{name} ({why})" for name, why in UNEQUAL.items() if name in names]
    return f"Other numbers of weights, because keys allow no equal one: {'; '.join(found)}." if found else ""


def short(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 else str(length)


def curve_table(found: Curves, what: str, more: dict[str, dict[int, str]] | None = None) -> str:
    """`more`: words behind a figure, by name and length."""
    lengths = sorted({length for speeds in found.values() for length in speeds})
    body = []
    for name, speeds in found.items():
        words = (more or {}).get(name, {})
        cells = [f"{speeds[n]:,.0f}{words.get(n, '')}" if n in speeds else words.get(n, "–") for n in lengths]
        body.append([name, *cells])
    return markdown([what, *map(short, lengths)], body)


def plot(found: Curves, path: Path, label: str, across: str = "tokens of context") -> None:
    """Tokens per second against the length. Many lines are divided: what reads all tokens, and what has a state of
    constant size, with attention in both."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "family"  # the same file for the same numbers
    from matplotlib import pyplot

    panels = {"": list(found)}
    if len(found) > PANEL:
        grow = [name for name in found if grows(name)]
        rest = [name for name in found if name not in grow]
        panels = {"reads all tokens": grow, "state of constant size": ["attention", *rest]}
    figure, all_axes = pyplot.subplots(
        1, len(panels), figsize=(1 + 6.2 * len(panels), 5.6), sharey=True, squeeze=False, facecolor="white"
    )
    lengths = sorted({length for speeds in found.values() for length in speeds})
    for axes, (title, names) in zip(all_axes[0], panels.items(), strict=True):
        for number, name in enumerate(name for name in names if found.get(name)):
            style = ("-", "--", ":")[number // 10 % 3]
            colour = "black" if name == "attention" else f"C{number % 10}"
            at, speeds = zip(*sorted(found[name].items()), strict=True)
            axes.plot(at, speeds, style, marker="o", markersize=2.5, linewidth=1.4, color=colour)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [short(length) for length in lengths])
        axes.set_xlabel(across)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.25)
        axes.minorticks_off()
    all_axes[0][0].set_ylabel(label)
    figure.tight_layout(w_pad=9)
    for axes, names in zip(all_axes[0], panels.values(), strict=True):
        name_lines(axes, {name: found[name] for name in names if found.get(name)})
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def name_lines(axes: Any, found: Curves) -> None:
    """The name beside the end of each line, moved apart where ends lie close."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    ends = {name: (max(speeds), speeds[max(speeds)]) for name, speeds in found.items()}
    order = sorted(ends, key=lambda name: ends[name][1])
    gap = 0.036
    wanted = [(math.log(ends[name][1]) - low) / (high - low) for name in order]
    heights: list[float] = []
    for height in wanted:  # from below
        heights.append(max(height, heights[-1] + gap) if heights else max(height, 0.01))
    over = max(0.0, heights[-1] - 0.99)
    heights = [height - over for height in heights]
    for number in range(len(heights) - 2, -1, -1):  # and back, where they would leave the panel
        heights[number] = min(heights[number], heights[number + 1] - gap)
    colours = {name: line.get_color() for name, line in zip(found, axes.get_lines(), strict=True)}
    for name, height in zip(order, heights, strict=True):
        axes.annotate(
            name, xy=ends[name], xycoords="data", xytext=(1.045, height), textcoords="axes fraction", va="center",
            fontsize=8, color=colours[name], annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colours[name], "linewidth": 0.5, "alpha": 0.6, "shrinkB": 2},
        )  # fmt: skip


def grows(name: str) -> bool:
    """Whether decoding reads more, the longer the text."""
    from allyouneed.config import parse
    from allyouneed.nn.models.base import Model

    keys = settings(Sizes()).get(name)
    return keys is None or parse(Model, keys).cost(65536).state_per_token > 0  # type: ignore[type-abstract]
