"""report.html: what a run did, on one page that needs no network: scores beside baselines, losses, examples right and
wrong, confusion of classes, cost, data, recipe. In English and Chinese.

It knows no task: a predictor's samples are texts by label, of which one is what was expected and one what was found.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from allyouneed.data.files.readers import Report
from allyouneed.errors import UserError
from allyouneed.files import write_text
from allyouneed.training.reporting.log import read_log

PAGE, CURVES = "report.html", "curves.svg"
TEMPLATE = Path(__file__).with_name("page.html")
EXPECTED, FOUND = ("expected", "reference"), ("found", "hypothesis", "answer")  # labels of samples
POINTS = 400  # of a curve
EXAMPLES = 20  # right, and wrong
LONGEST = 1000  # characters of a text
CLASSES = 30  # in the table of confusions


@dataclass(frozen=True)
class RunFacts:
    """What is on the page. `title`, `facts`: names and values; `scores`: rows of a set or a baseline; `columns`: the
    metrics, the deciding one first."""

    title: str
    facts: dict[str, str]
    columns: list[str]
    higher: dict[str, bool]
    scores: list[tuple[str, str, dict[str, float]]]  # set, baseline or "", figures
    samples: list[dict[str, str]]
    labels: list[str]
    data: Report
    recipe: str


def write_page(folder: Path, run: RunFacts) -> Path:
    """The page in the folder of the run, and its curves as a picture beside it."""
    pairs = [pair for sample in run.samples if (pair := _pair(sample)) is not None]
    right = [sample for sample in run.samples if (pair := _pair(sample)) and pair[0] == pair[1]]
    wrong = [sample for sample in run.samples if (pair := _pair(sample)) and pair[0] != pair[1]]
    other = [sample for sample in run.samples if _pair(sample) is None]
    drawn = curves(read_log(folder / "log.jsonl")) if (folder / "log.jsonl").is_file() else {}
    write_text(folder / CURVES, picture(drawn))
    content = {
        "title": run.title,
        "facts": run.facts,
        "columns": run.columns,
        "higher": run.higher,
        "scores": [
            (split, name, {k: v for k, v in row.items() if math.isfinite(v)}) for split, name, row in run.scores
        ],
        "curves": drawn,
        "examples": {name: _shortened(found) for name, found in (("wrong", wrong), ("right", right), ("any", other))},
        "counts": {"wrong": len(wrong), "right": len(right)},
        "confusion": confusion(pairs, run.labels),
        "data": {"read": run.data.read, "kept": run.data.kept, "text": run.data.text()},
        "recipe": run.recipe,
    }
    # "<" spelled as JSON can: no text of the data ends the script
    text = json.dumps(content, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    write_text(folder / PAGE, TEMPLATE.read_text(encoding="utf-8").replace("{{content}}", text))
    return folder / PAGE


def _finite(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if math.isfinite(value)}


def _pair(sample: Mapping[str, str]) -> tuple[str, str] | None:
    """What was expected, and what was found."""
    expected = next((sample[key] for key in EXPECTED if key in sample), None)
    found = next((sample[key] for key in FOUND if key in sample), None)
    return None if expected is None or found is None else (expected, found)


def _shortened(samples: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Evenly spaced ones."""
    chosen = samples[:: max(1, len(samples) // EXAMPLES)][:EXAMPLES]
    return [{key: str(text)[:LONGEST] for key, text in sample.items()} | _shown(sample) for sample in chosen]


def _shown(sample: Mapping[str, str]) -> dict[str, str]:
    """The picture of an image that is a file."""
    if not (name := sample.get("image")) or not Path(name).is_file():
        return {}
    from allyouneed.data.media.image import thumbnail

    try:
        return {"picture": thumbnail(Path(name))}
    except UserError:
        return {}


def confusion(pairs: Sequence[tuple[str, str]], labels: Sequence[str]) -> dict[str, Any] | None:
    """How often each class was found for each, the most frequent classes first; None if the answers are no classes."""
    known = set(labels)
    counts = Counter(pair for pair in pairs if known.issuperset(pair))
    if len(known) < 2 or sum(counts.values()) < len(pairs) or not pairs:
        return None
    frequent = [label for label, _ in Counter(expected for expected, _ in pairs).most_common(CLASSES)]
    rows = [[counts[expected, found] for found in frequent] for expected in frequent]
    return {"labels": frequent, "rows": rows, "left_out": len(known) - len(frequent)}


def curves(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Points (step, value) of the training loss, the mean of several steps each, and of every figure of the
    validations."""
    steps = [(entry["step"], entry["loss"]) for entry in entries if entry.get("loss") is not None]
    size = max(1, -(-len(steps) // POINTS))
    groups = [steps[at : at + size] for at in range(0, len(steps), size)]
    found = {"train loss": [(group[-1][0], sum(loss for _, loss in group) / len(group)) for group in groups]}
    for entry in entries:
        for name, value in (entry.get("valid") or {}).items():
            if isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(f"valid {name}", []).append((entry["step"], value))
    return {name: points for name, points in found.items() if points}


def picture(found: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """The curves as SVG: one plot each, with its first and last step and its lowest and highest value."""
    drawn = [(name, points) for name, points in found.items() if len(points) > 1]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {max(1, len(drawn)) * 170}" '
        'font-family="sans-serif" font-size="12">'
    ]
    for row, (name, points) in enumerate(drawn):
        low, high = min(value for _, value in points), max(value for _, value in points)
        first, last, top = points[0][0], points[-1][0], row * 170 + 30
        places = (
            (80 + 540 * (step - first) / max(1, last - first), top + 110 * (high - value) / ((high - low) or 1.0))
            for step, value in points
        )
        lines += [
            f'<text x="80" y="{top - 10}" font-weight="bold">{escape(name)}</text>',
            f'<path d="M80 {top}V{top + 110}H620" fill="none" stroke="#999"/>',
            *(
                f'<text x="74" y="{y}" text-anchor="end">{value:.4g}</text>'
                for y, value in ((top + 4, high), (top + 114, low))
            ),
            f'<text x="80" y="{top + 126}">{first:,}</text>',
            f'<text x="620" y="{top + 126}" text-anchor="end">{last:,}</text>',
            f'<polyline fill="none" stroke="#1f77b4" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>',
        ]
    return "\n".join([*lines, "</svg>", ""])
