"""Score a predictor on a file of examples with the metrics of its task."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from allyouneed.config import parse
from allyouneed.data.batches.store import Store
from allyouneed.data.files.filters import Filters
from allyouneed.data.files.readers import Files, Report
from allyouneed.errors import UserError
from allyouneed.infer.predictors.base import EvaluationResult, Predictor
from allyouneed.metrics.likelihood import mean_loss
from allyouneed.tasks.task import VALIDATION_SEED, Task

RESAMPLES = 1000
SHOWN = 5  # unknown labels that are listed


def evaluate(
    model: Predictor,
    path: Path | str,
    to: str | None = None,
    from_: str | None = None,
    options: str = "from_ and to",
    layout: Mapping[str, Any] | None = None,
) -> tuple[EvaluationResult, Report]:
    """The scores, and a report of unreadable lines. The file is read like the training data: same columns, same keys.
    `to`, `from_`: the languages of pairs, for multilingual models; `options`: how the user sets them, for errors.
    `layout`: keys of the files that differ from the training data, such as `columns`."""
    kind = model.folder.task.get("kind")
    if Task.find(kind) is None:
        raise UserError(
            f"{model.folder.path}: {kind} cannot be scored on a file of examples; save its results (--output) and "
            "score them with `allyouneed evaluate --hypotheses FILE --target FILE`"
        )
    task: Task = parse(Task, model.folder.task, "task")  # type: ignore[type-abstract]
    keys = model.folder.files | task.entry_defaults() | dict(layout or {}) | {"path": str(path)}
    entry = parse(task.file_type, keys, str(path))
    report = Report()
    examples: Sequence[Any] = list(entry.read(report))
    if not examples:
        raise UserError(f"{path}: no usable {entry.examples}\n{report.text()}")
    examples, note = model.with_languages(examples, to, from_, options)
    notes = [f"{path}: {note}"] if note else []
    result = model.judge(examples, resamples=RESAMPLES)
    if not result.figures:
        return _likelihood(model, task, entry), report
    return replace(result, notes=[*notes, *_unknown_labels(examples, model.folder.labels)]), report


def _unknown_labels(examples: Sequence[Any], known: Sequence[str]) -> list[str]:
    """A note on labels that the model does not know: another label set, or the wrong column."""
    if not known:
        return []
    given = [label for example in examples for label in getattr(example, "labels", ())]
    unknown = [label for label in given if label not in known]
    if not unknown:
        return []
    names = list(dict.fromkeys(unknown))
    shown = ", ".join(map(repr, names[:SHOWN])) + (", …" if len(names) > SHOWN else "")
    return [f"{len(unknown):,} of {len(given):,} labels are not in the training data and count as errors: {shown}"]


def _likelihood(model: Predictor, task: Task, entry: Files) -> EvaluationResult:
    folder = model.folder
    sides = (folder.max_tokens,) * task.sides
    encoding = task.encoding(folder.tokenizers, folder.labels, None if task.splits_documents else folder.max_tokens)
    with tempfile.TemporaryDirectory() as work:
        store = Store.build(Path(work) / "store", [entry], Filters(), encoding)
        items = model.prepare_items(task.items(store, folder.tokenizers, sides, VALIDATION_SEED))
        figures = mean_loss(model.model, task, task.validation_batches(items, folder.max_tokens))
    width = max(map(len, figures))
    text = "\n".join(f"{name:<{width}}  {value:.4f}" for name, value in figures.items())
    return EvaluationResult(figures, f"{text}  per one of the {task.loss_unit} of {len(store)} {entry.examples}")
