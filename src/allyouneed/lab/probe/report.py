"""Results of probes: a table for the terminal, a page, and a heat map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from allyouneed.lab.probe.run import ProbeCell
from allyouneed.lab.probe.task import find
from allyouneed.lab.statistics import Control, interval

ProbeCells = Mapping[tuple[str, str], ProbeCell]
SIDE, ROW, LEFT, TOP = 46, 20, 190, 118
LOW, HIGH = (247, 249, 252), (22, 92, 168)  # colours of chance and of 100%
STYLE = "font-family:system-ui,'Noto Sans SC',sans-serif;font-size:11px"


def above_chance(accuracy: float, task: str) -> float:
    """0: as good as guessing, 1: always right."""
    chance = find(task).chance
    return min(1.0, max(0.0, (accuracy - chance) / (1 - chance)))


def mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


def axes(cells: ProbeCells) -> tuple[list[str], list[str]]:
    """Models, the best first by their mean over tasks and lengths, and tasks."""
    tasks = list(dict.fromkeys(task for _, task in cells))

    def rank(model: str) -> float:
        pairs = [(cells[model, task], task) for task in tasks]
        both = [above_chance(mean(side) or 0.0, task) for cell, task in pairs for side in (cell.accuracy, cell.longer)]
        return -sum(both) / len(both)

    return sorted(dict.fromkeys(model for model, _ in cells), key=lambda model: (rank(model), model)), tasks


def percent(values: Sequence[float | None]) -> str:
    found = [value for value in values if value is not None]
    if not found:
        return "–"
    one = interval(found)
    return f"{100 * one.mean:.0f}" + (f" ± {100 * one.width / 2:.0f}" if len(found) > 1 else "")


def table(cells: ProbeCells) -> str:
    """Markdown: accuracy at the longest trained length / on longer examples."""
    models, tasks = axes(cells)
    lines = ["| model | " + " | ".join(tasks) + " |", "|---" * (len(tasks) + 1) + "|"]
    lines.append("| *guessing* | " + " | ".join(f"{100 * find(task).chance:.0f}" for task in tasks) + " |")
    for model in models:
        shown = (f"{percent(cells[model, task].accuracy)} / {percent(cells[model, task].longer)}" for task in tasks)
        lines.append(f"| {model} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def notes(cells: ProbeCells) -> Iterator[str]:
    """What a reader must know: models that diverged, or whose best rate is at the edge of those tried."""
    for (model, task), cell in cells.items():
        for warning in cell.curve.warnings():
            yield f"{model} on {task}: {warning}"


def page(cells: ProbeCells, landed: Sequence[Control], command: str, how: str) -> str:
    _, tasks = axes(cells)
    about = [f"* **{task}**: {find(task).about[0]}; {_lengths(task)} ({find(task).source})" for task in tasks]
    edges = list(notes(cells))
    lines = [
        "# Probes: what each token mixer can learn",
        "",
        f"`{command}`",
        "",
        how,
        "",
        "![A heat map of models and tasks: how far above guessing](../pictures/probe.svg)",
        "",
        "Accuracy in % at the longest trained length / on longer examples, which training has not seen. Nothing here "
        "says "
        "what a model could learn from more steps; a low number says that it did not learn it from these.",
        "",
        table(cells),
        "",
        "## Tasks",
        "",
        *about,
        "",
        "## Controls",
        "",
        "The command prints nothing if one of them does not land.",
        "",
        *(f"* {one.name}: {100 * one.value:.1f}%" for one in landed),
        "",
        "## Learning rates",
        "",
        f"The best rate is the lowest or highest that was tried in {len(edges)} of {len(cells)} cells"
        + (", where a better one may lie outside." if edges else "."),
    ]
    return "\n".join(lines) + "\n"


def _lengths(task: str) -> str:
    one = find(task)
    return f"{one.trained[0]} to {one.trained[1]}, tested at {one.trained[1]} and {one.longer}"


def heat_map(cells: ProbeCells) -> str:
    """An SVG: a cell for each model and task, its left half the trained length, its right half longer examples."""
    models, tasks = axes(cells)
    width, height = LEFT + len(tasks) * SIDE + 12, TOP + len(models) * ROW + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" style="{STYLE}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for column, task in enumerate(tasks):
        x, y = LEFT + column * SIDE + SIDE / 2, TOP - 8
        lines.append(f'<text transform="translate({x:.0f} {y}) rotate(-50)">{escape(task)}</text>')
    for row, model in enumerate(models):
        y = TOP + row * ROW
        lines.append(f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(model)}</text>')
        for column, task in enumerate(tasks):
            cell = cells[model, task]
            for half, side in enumerate((cell.accuracy, cell.longer)):
                x, value = LEFT + column * SIDE + half * (SIDE - 2) / 2, mean(side)
                share = None if value is None else above_chance(value, task)
                ink = "#fff" if share is not None and share > 0.55 else "#3d4a5a"
                text = "–" if value is None else f"{100 * value:.0f}"
                box = f'x="{x:.1f}" y="{y}" width="{(SIDE - 2) / 2:.1f}" height="{ROW - 2}"'
                lines.append(f'<rect {box} fill="{_colour(share)}"/>')
                place = f'x="{x + SIDE / 4 - 0.5:.1f}" y="{y + 13}" text-anchor="middle" font-size="9.5"'
                lines.append(f'<text {place} fill="{ink}">{text}</text>')
    lines.append(
        f'<text x="{LEFT}" y="{height - 12}" fill="#5f6b7a">left: the longest trained length; right: longer; '
        "accuracy in %, colour: above guessing</text>"
    )
    return "\n".join([*lines, "</svg>", ""])


def _colour(share: float | None) -> str:
    if share is None:
        return "#eeeeee"
    return "#" + "".join(f"{round(low + share * (high - low)):02x}" for low, high in zip(LOW, HIGH, strict=True))
