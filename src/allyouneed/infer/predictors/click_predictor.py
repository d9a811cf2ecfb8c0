"""Probabilities of clicks: recommendation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allyouneed.config import parse
from allyouneed.data.batches.logs import ImpressionEncoding
from allyouneed.data.files.logs import Impression, LogFiles
from allyouneed.data.files.readers import Report
from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import EvaluationResult, Predictor, evenly_spaced, run_in_batches, to_list
from allyouneed.metrics.ranking import auc, log_loss
from allyouneed.nn.batch import Batch, Rows
from allyouneed.tasks.click import ClickPrediction

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RankedItem:
    """An item and the probability that it is clicked."""

    item: str
    probability: float


class ClickPredictor(Predictor):
    """Predicts clicks on items (Chen et al. 2019). A row has the columns of the training log, without the click."""

    @cached_property
    def log(self) -> LogFiles:
        """The columns of the training log."""
        return parse(LogFiles, self.folder.files | {"path": "row"}, str(self.folder.path))

    @cached_property
    def _encoding(self) -> ImpressionEncoding:
        task = parse(ClickPrediction, self.folder.task, str(self.folder.path))
        return ImpressionEncoding(self.tokenizer, min(task.length, self.max_input - 1))

    def predict_click(self, rows: Row | Sequence[Row]) -> Any:
        """The probability of a click for a row, or for each row of a list: `{"items": ["a", "b"], "item": "c", …}`."""
        if isinstance(rows, Mapping):
            return self.predict_click([rows])[0]
        return self._probabilities([self.read_row(row, number) for number, row in enumerate(rows)])

    def rank(self, row: Row, candidates: Sequence[Any], top: int | None = None) -> list[RankedItem]:
        """Items by the probability of a click, the highest first, for the user of `row` (without the item). A candidate
        is an item, or, with side information, a row of the item's columns."""
        column, *sides = self.log.sequence
        given = []
        for one in candidates:
            if sides and not isinstance(one, Mapping):
                raise UserError(f"a candidate needs its side information: {{{', '.join([column, *sides])}}}")
            given.append(one if isinstance(one, Mapping) else {column: one})
        found = self.predict_click([{**row, **one} for one in given])
        ranked = [RankedItem(str(one[column]), chance) for one, chance in zip(given, found, strict=True)]
        return sorted(ranked, key=lambda one: -one.probability)[:top]

    def read_row(self, row: Any, number: int = 0) -> Impression:
        found = self.log.impression(row, with_click=False) if isinstance(row, Mapping) else "not a mapping of columns"
        if isinstance(found, str):
            raise UserError(f"row {number}: {found} (columns: {', '.join(self.log.input_columns)})")
        return found

    def table_rows(self, path: Path) -> list[str]:
        """The rows of a table of a log as JSON objects; raise if one cannot be read."""
        report = Report()
        log = parse(LogFiles, self.folder.files | {"path": str(path)}, str(path))
        found = [json.dumps(row, ensure_ascii=False) for _, _, row in log.rows(report, with_clicks=False)]
        if report.dropped:
            raise UserError(report.text())
        return found

    def _probabilities(self, examples: Sequence[Impression]) -> list[float]:
        rows = [self._encoding.row(example) for example in examples]

        def answer(batch: list[int]) -> list[float]:
            given = Batch(self._rows([rows[n] for n in batch]).to(self.device))
            return to_list(self.model.logits(given).sigmoid())

        return run_in_batches(self.model, [len(row[0]) for row in rows], answer)

    def _rows(self, encoded: Sequence[Any]) -> Rows:
        """Padded on the left, so that the item shown is always last."""
        rows = Rows.of([row[0] for row in encoded], self.tokenizer.pad, "left")
        ages = Rows.of([row[1] for row in encoded], 0, "left").tokens
        time, sides = rows.tokens.shape[1], len(self.log.sequence) - 1
        details = np.zeros((len(encoded), time, sides + len(self.log.features)), np.int64)
        for number, (items, _, beside, features, _) in enumerate(encoded):
            details[number, time - len(items) :, :sides] = np.reshape(beside, (len(items), sides))
            details[number, -1, sides:] = features
        return Rows(rows.tokens, rows.lengths, side="left", ages=ages, details=torch.from_numpy(details))

    def judge(
        self, examples: Sequence[Impression], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        found = self._probabilities(examples)
        clicks = [example.click for example in examples]
        figures = {"auc": auc(found, clicks), "loss": log_loss(found, clicks)}
        text = f"AUC      {figures['auc']:.4f}\nlog loss {figures['loss']:.4f}  of {len(found)} impressions"
        notes = [] if any(clicks) and not all(clicks) else ["AUC needs examples with and without a click"]
        samples = [
            {"items": " ".join(e.items[0][:-1]), "shown": e.items[0][-1], f"click {e.click:d}": f"{chance:.3f}"}
            for e, chance in evenly_spaced(list(zip(examples, found, strict=True)), show)
        ]
        return EvaluationResult(figures, text, samples, notes)
