"""A model folder and a file of examples: how good it is, by what its task is judged by."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from allyouneed.config import parse
from allyouneed.data.batches.store import Store
from allyouneed.data.files.filters import Filters
from allyouneed.data.files.pairs import Pair
from allyouneed.data.files.readers import Files, Report
from allyouneed.errors import UserError
from allyouneed.evaluate.likelihood import mean_loss
from allyouneed.infer.predictors.base import Judged, Predictor
from allyouneed.infer.predictors.translator import Translator
from allyouneed.infer.translation.direction import direction
from allyouneed.tasks.task import VALIDATION_SEED, Task

RESAMPLES = 1000
SHOWN = 5  # labels that are named


def evaluate(
    model: Predictor, path: Path | str, to: str | None = None, from_: str | None = None, options: str = "from_ and to"
) -> tuple[Judged, Report]:
    """The judgement, and what could not be read. The file is read as the training data was: same columns, same keys.
    `to`, `from_`: the languages of pairs, for a model of several; `options`: what a user may say them by."""
    kind = model.folder.task.get("kind")
    if kind not in Task.registry:
        raise UserError(
            f"{model.folder.path}: for {kind} there is no file of examples to judge by; keep its answers (--output), "
            "and score texts by `allyouneed evaluate --hypotheses FILE --target FILE`"
        )
    task: Task = parse(Task, model.folder.task, "task")  # type: ignore[type-abstract]
    entry = parse(task.file_type, model.folder.files | {"path": str(path)}, str(path))
    report = Report()
    examples = list(entry.read(report))
    if not examples:
        raise UserError(f"none of the {entry.examples} in {path} can be used\n{report.text()}")
    notes: list[str] = []
    if isinstance(model, Translator) and isinstance(examples[0], Pair):
        sides = [pair.source for pair in examples], [pair.target for pair in examples]
        way = direction(model.routes, *sides, to, from_, options)
        examples = [pair._replace(to=way.to, from_=way.from_) for pair in examples]
        notes = [f"{path}: {way.note}"] if way.note else []
    judged = model.judge(examples, resamples=RESAMPLES)
    if not judged.figures:
        return _by_likelihood(model, task, entry), report
    return replace(judged, notes=[*notes, *_unseen(examples, model.folder.labels)]), report


def _unseen(examples: Sequence[Any], known: Sequence[str]) -> list[str]:
    """What the model cannot answer rightly, for it never heard of it: another set of labels, or the wrong column."""
    if not known:
        return []
    given = [label for example in examples for label in example.labels]
    strange = [label for label in given if label not in known]
    if not strange:
        return []
    names = list(dict.fromkeys(strange))
    shown = ", ".join(map(repr, names[:SHOWN])) + (", …" if len(names) > SHOWN else "")
    return [f"{len(strange):,} of {len(given):,} labels do not occur in the training data and count as missed: {shown}"]


def _by_likelihood(model: Predictor, task: Task, entry: Files) -> Judged:
    folder = model.folder
    sides = (folder.max_tokens,) * task.sides
    encoding = task.encoding(folder.tokenizers, folder.labels, None if task.splits_documents else folder.max_tokens)
    with tempfile.TemporaryDirectory() as place:
        store = Store.build(Path(place) / "store", [entry], Filters(), encoding)
        items = model.completed(task.items(store, folder.tokenizers, sides, VALIDATION_SEED))
        figures = mean_loss(model.model, task, task.validation_batches(items, folder.max_tokens))
    wide = max(map(len, figures))
    text = "\n".join(f"{name:<{wide}}  {value:.4f}" for name, value in figures.items())
    return Judged(figures, f"{text}  per one of the {task.loss_unit} of {len(store)} {entry.examples}")
