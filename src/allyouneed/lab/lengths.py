"""Length extrapolation of a trained model, as a curve.

A language model predicts the same tokens after more and more context (Press et al. 2022, section 2.2 and figure 1): a
model that uses longer contexts gets better, one that cannot read them worse. Models of other tasks are scored on the
examples of each range of lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allyouneed.config import parse
from allyouneed.data.files.readers import Report
from allyouneed.errors import UserError
from allyouneed.lab.statistics import ConfidenceInterval, difference, interval, verdict
from allyouneed.lab.svg import Axis, Series, plot
from allyouneed.nn.batch import Batch, Rows
from allyouneed.runtime.process import inference
from allyouneed.tasks.task import Task

PREDICTED = 32  # tokens at the end of every context
PLACES = 48  # in the text
LEAST_PLACES = 8


@dataclass(frozen=True)
class LengthRow:
    """A length: its loss or score, how it differs from the first length, and on how much. `note`: why there is none."""

    length: int
    value: ConfidenceInterval | None
    change: ConfidenceInterval | None = None
    note: str = ""


@dataclass(frozen=True)
class LengthCurve:
    metric: str
    trained: int  # tokens of the longest text in training
    rows: list[LengthRow]

    def tree(self) -> dict[str, Any]:
        rows = [
            {"length": row.length, self.metric: None if row.value is None else row.value.mean}
            | ({} if row.value is None else {"low": row.value.low, "high": row.value.high})
            | ({"note": row.note} if row.note else {})
            for row in self.rows
        ]
        return {"metric": self.metric, "trained": self.trained, "lengths": rows}

    def text(self) -> str:
        lines = [f"{'length':>8}  {self.metric}, 95% interval"]
        for row in self.rows:
            if row.value is None:
                lines.append(f"{row.length:>8,}  {row.note}")
                continue
            change = ""
            if row.change is not None:
                words = {"higher": "higher", "lower": "lower", "inconclusive": "inconclusive"}
                change = f"  {row.change.mean:+.3f} than at {self.rows[0].length:,}: {words[verdict(row.change)]}"
            longer = "  (longer than in training)" if row.length > self.trained else ""
            lines.append(f"{row.length:>8,}  {row.value.text()}{change}{longer}{'  ' + row.note if row.note else ''}")
        return "\n".join(lines)

    def svg(self, name: str) -> str:
        shown = [row for row in self.rows if row.value is not None]
        points = [(float(row.length), row.value.mean) for row in shown if row.value is not None]
        bars = [(row.value.low, row.value.high) for row in shown if row.value is not None]
        lines = {name: Series(points, bars)}
        if bars and points[0][0] <= self.trained <= points[-1][0]:
            lowest, highest = min(low for low, _ in bars), max(high for _, high in bars)
            edge = [(float(self.trained), lowest), (float(self.trained), highest)]
            lines[f"trained with up to {self.trained:,} tokens"] = Series(edge, marks=False)
        return plot(lines, Axis("tokens", True), Axis(self.metric), f"{self.metric} of {name} by length")


def length_curve(model: Any, path: Path, lengths: Sequence[int], layout: dict[str, Any] | None = None) -> LengthCurve:
    """The curve of a predictor on a file of examples, which is read like its training data."""
    folder = model.folder
    task: Task = parse(Task, folder.task, "task")  # type: ignore[type-abstract]
    keys = folder.files | task.entry_defaults() | (layout or {}) | {"path": str(path)}
    entry = parse(task.file_type, keys, str(path))
    examples = list(entry.read(Report()))
    if not examples:
        raise UserError(f"{path}: no usable {entry.examples}")
    lengths = sorted(set(lengths))
    if folder.task["kind"] == "causal-lm":
        return _contexts(model, path, examples, lengths)
    return _ranges(model, examples, lengths, task)


def _contexts(model: Any, path: Path, examples: Sequence[Any], lengths: Sequence[int]) -> LengthCurve:
    """The loss of the same tokens after contexts of each length."""
    tokenizer, module = model.folder.tokenizers.target, model.model
    text = torch.tensor(tokenizer.encode("\n\n".join(example.text for example in examples)))
    if min(lengths) <= PREDICTED:
        raise UserError(f"--lengths: {min(lengths)}; at least {PREDICTED + 1}, as the last {PREDICTED} are predicted")
    room = len(text) - max(lengths) - 1
    if room < LEAST_PLACES:
        raise UserError(
            f"{path}: has {len(text):,} tokens, too few for contexts of {max(lengths):,}; give a longer text, or "
            "shorter --lengths"
        )
    ends = [max(lengths) + room * n // PLACES for n in range(min(PLACES, room))]
    limit = module.config.limit
    found: dict[int, np.ndarray[Any, Any]] = {}
    rows = []
    for length in lengths:
        if limit is not None and length > limit:
            rows.append(LengthRow(length, None, note=f"this model reads at most {limit:,} tokens"))
            continue
        found[length] = np.array([[_loss(module, text[end - length : end + 1]) for end in ends]])
        first = found[lengths[0]]
        change = None if length == lengths[0] else difference(found[length], first)
        finite = bool(np.isfinite(found[length]).all())
        note = "" if finite else "not finite"
        rows.append(LengthRow(length, interval(found[length]) if finite else None, change if finite else None, note))
    return LengthCurve("loss", model.folder.max_tokens, rows)


def _loss(module: Any, tokens: torch.Tensor) -> float:
    """The mean loss of the last tokens."""
    device = next(module.parameters()).device
    with inference(module):
        hidden = module(Batch(Rows(tokens[None, :-1].to(device))))[:, -PREDICTED:]
        return float(module.head.loss(hidden, tokens[None, -PREDICTED:].to(device), 0.0)[1]) / PREDICTED


def _ranges(model: Any, examples: Sequence[Any], lengths: Sequence[int], task: Task) -> LengthCurve:
    """Scores of the examples of each range of lengths; intervals are those of the task's own scores, where it has
    any."""
    tokenizer = model.folder.tokenizers.source if task.sides == 2 else model.folder.tokenizers.target
    counts = [
        len(tokenizer.encode(example.texts[0] if task.sides == 2 else " ".join(example.texts))) for example in examples
    ]
    metric = next(iter(task.metrics))
    rows = []
    for low, high in pairwise((0, *lengths)):
        chosen = [example for example, count in zip(examples, counts, strict=True) if low < count <= high]
        if not chosen:
            rows.append(LengthRow(high, None, note=f"no example has {low + 1:,} to {high:,} tokens"))
            continue
        value = model.judge(chosen).figures.get(metric, math.nan)
        rows.append(
            LengthRow(high, ConfidenceInterval(value, value, value, 1, len(chosen)), note=f"{len(chosen):,} examples")
        )
    return LengthCurve(metric, model.folder.max_tokens, rows)
