"""Tables and curves of the family benchmarks, written into result pages between marks: `<!-- name -->` and
`<!-- /name -->`, each on a line of its own. No figure is copied by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from allyouneed.lab.mixer_sizes import STATED, UNEQUAL, SkeletonSizes, ratios, settings

AIM = 0.7
Curves = dict[str, dict[int, float]]  # by name and length
PEER_NAMES = {
    "mla": "DeepSeek-V2 of Hugging Face, static cache, compiled",
    "experts": "Mixtral of Hugging Face, static cache, compiled",
    "rwkv": "RWKV of Hugging Face",
    "retention": "RetNet of flash-linear-attention",
    "gated-retention": "GLA of flash-linear-attention",
}
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


def weights(s: SkeletonSizes, name: str) -> str:
    """Weights of the mixer, and of the whole model, relative to those with attention."""
    mixer, whole = ratios(s, settings(s)[name])
    return f"{'–' if name == 'experts' else f'{mixer:.2f}'} / {whole:.2f}"


def unequal(s: SkeletonSizes, names: Sequence[str]) -> str:
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


def picture(what: str, file: str) -> str:
    return f"\n\n![{what}]({file})"


def plot(found: Curves, path: Path, label: str, across: str = "tokens of context") -> None:
    """Tokens per second against the length. Many lines are divided: what reads all tokens, and what has a state of
    constant size, with attention in both."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "family"  # the same file for the same numbers
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator

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
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda speed, _: f"{speed:,.0f}")
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
    heights = spread([(math.log(ends[name][1]) - low) / (high - low) for name in order], 0.036)
    colours = {name: line.get_color() for name, line in zip(found, axes.get_lines(), strict=True)}
    for name, height in zip(order, heights, strict=True):
        axes.annotate(
            name, xy=ends[name], xycoords="data", xytext=(1.045, height), textcoords="axes fraction", va="center",
            fontsize=8, color=colours[name], annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colours[name], "linewidth": 0.5, "alpha": 0.6, "shrinkB": 2,
                        "relpos": (0, 0.5)},
        )  # fmt: skip


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Heights in [0, 1] near those wanted, which ascend, at least `gap` apart: too close ones form groups around their
    mean (isotonic regression)."""
    groups: list[list[float]] = []
    for number, height in enumerate(wanted):
        groups.append([height - number * gap])
        while len(groups) > 1 and mean(groups[-2]) >= mean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    levels = [mean(group) for group in groups for _ in group]
    limit = 1 - (len(wanted) - 1) * gap
    return [min(max(level, 0.0), limit) + number * gap for number, level in enumerate(levels)]


def grows(name: str) -> bool:
    """Whether decoding reads more, the longer the text."""
    from allyouneed.config import parse
    from allyouneed.nn.models.base import Model

    keys = settings(SkeletonSizes()).get(name)
    return keys is None or parse(Model, keys).cost(65536).state_per_token > 0  # type: ignore[type-abstract]


# --- runs on a GPU, from their JSON files -----------------------------------------------------------------------------


def table(sizes: SkeletonSizes, runs: list[dict[str, Any]]) -> str:
    """Every model with the attention of its own run; of several runs with the same model, the last."""
    one, many = (f"b{count}" for count in sizes.rows)
    found = {name: (values, run) for run in runs for name, values in run.items() if f"{many} share" in values}
    body = []
    for name, (values, run) in found.items():
        base = run.get("attention", {})
        cells = [f"{name}{'' if values.get('captured', True) else ' (plain)'}{' ¹' if name in UNEQUAL else ''}"]
        cells += [text for key in (one, many) for text in (f"{values[key]:,.0f}", share(values[key], base.get(key)))]
        cells += [f"{values[f'{key} share']:.0%}" for key in (one, many)]
        states = values.get(f"{many} state declared")
        cells += [f"{values[f'{many} state bytes'] / states:.2f}" if states else "–", weights(sizes, name)]
        body.append(cells)
    head = ["mixer", f"{sizes.rows[0]} row", "of attention", f"{sizes.rows[1]} rows", "of attention"]
    head += ["share of copying, 1 row", f"{sizes.rows[1]} rows", "state bytes: allocated / declared"]
    return markdown([*head, "weights: mixer / model"], body) + f"\n\n¹ {unequal(sizes, list(found))}" if body else ""


def long_table(sizes: SkeletonSizes, runs: list[dict[str, Any]]) -> tuple[str, dict[str, dict[int, float]]]:
    """The table and its curves; behind a figure of fewer rows, their number."""
    found = {name: (values, run) for run in runs for name, values in run.items() if "by context" in values}
    curves = {name: {int(n): speed for n, speed in values["by context"].items()} for name, (values, _) in found.items()}
    if not curves:
        return "", {}
    fewer = {
        name: {int(n): f" ({count} rows)" for n, count in values["long rows"].items() if count < sizes.rows[-1]}
        for name, (values, _) in found.items()
    }
    text = curve_table(curves, f"tokens/s of {sizes.rows[-1]} rows", fewer).splitlines()
    stated = min(STATED, sizes.long // 2)
    ends = [f" of attention at {short(stated)} |", " ---: |"]
    for values, run in found.values():
        base = run.get("attention", {}).get("long")
        ends.append(f" {values['long'] / base:.1f} |" if base else " |")
    return "\n".join(line + end for line, end in zip(text, ends, strict=True)), curves


def peer_table(sizes: SkeletonSizes, runs: list[dict[str, Any]]) -> str:
    names = {f"peer {name}": (PEER_NAMES[name], name) for name in PEER_NAMES}
    found = {name: values for run in runs for name, values in run.items() if name in names}
    keys = [f"b{count}" for count in sizes.rows]
    body = []
    for name, values in found.items():
        cells = [f"{names[name][1]}: {names[name][0]}"]
        for key in keys:
            theirs, ours = values.get(key), values.get(f"{key} ours")
            cells += [f"{theirs:,.0f}", f"{ours:,.0f}", f"{ours / theirs:.1f}"] if theirs and ours else ["–"] * 3
        body.append(cells)
    head = [text for count in sizes.rows for text in (f"{count} row{'s' * (count > 1)}", "ours", "×")]
    return markdown(["peer, tokens/s", *head], body) if body else ""


def write_gpu(files: list[Path], page: Path) -> None:
    """Replace the GPU's tables that these runs hold, and the plot beside the page."""
    runs = [json.loads(file.read_text("utf-8")) for file in files]
    sizes = SkeletonSizes(**{key: tuple(value) if key == "rows" else value for key, value in runs[-1]["sizes"].items()})
    results = [run["results"] for run in runs]
    long, curves = long_table(sizes, results)
    parts = {"gpu-mixers": table(sizes, results), "gpu-long": long, "gpu-peers": peer_table(sizes, results)}
    if curves:
        parts["gpu-long"] += picture("decode speed against context", "family-speed-gpu.svg")
        plot(curves, page.with_name("family-speed-gpu.svg"), f"tokens/s of {sizes.rows[-1]} rows, bf16")
    fill(page, {mark: text for mark, text in parts.items() if text})


def write_training(files: list[Path], page: Path, names: Sequence[str]) -> None:
    """Tables and plot of these runs; each figure is compared with the attention of its own run."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for file in files:
        for name, lengths in json.loads(file.read_text("utf-8"))["results"].items():
            good = {int(length): values for length, values in lengths.items() if "speed" in values}
            found.setdefault(name, {}).update(good)
    order = [name for name in names if found.get(name)]
    theirs = found.get("hf mla", {}).get(1024, {}).get("speed")
    whole = []
    for name in order:
        if one := found[name].get(1024):
            beside = f" and {one['speed'] / theirs:.2f} × Hugging Face" if name == "mla" and theirs else ""
            cells = [f"{one.get('share', 0):.1%}", f"{one.get('share_ratio', 0):.2f}{beside}", f"{one['peak']:.1f}"]
            whole.append([name, f"{one['speed']:,.0f}", *cells])
    curves = {name: {n: one["speed"] for n, one in sorted(found[name].items())} for name in order if name != "hf mla"}
    curves = {name: speeds for name, speeds in curves.items() if set(speeds) - {1024}}
    ratios = {
        name: {n: f" ({found[name][n]['ratio']:.2f})" for n in speeds if "ratio" in found[name][n]}
        for name, speeds in curves.items()
    }
    parts = {}
    if whole:
        head = ["16 rows of 1,024 tokens", "tokens/s", "share of ceiling", "of attention's share", "peak GiB"]
        parts["train-mixers"] = markdown(head, whole)
    if curves:
        parts["train-lengths"] = curve_table(curves, "tokens/s (× attention)", ratios)
        parts["train-lengths"] += picture("training speed against the length of rows", "family-train-gpu.svg")
        plot(curves, page.with_name("family-train-gpu.svg"), "trained tokens/s, bf16", "tokens of a row")
    fill(page, parts)
