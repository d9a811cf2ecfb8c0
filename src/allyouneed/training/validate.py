"""Validation: loss, scores of predictions, and which scores are better."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from allyouneed.data.batches.packing import Batches
from allyouneed.folder import Folder
from allyouneed.infer.predictors.base import EvaluationResult, Sample, evenly_spaced
from allyouneed.infer.predictors.generator import Generator
from allyouneed.infer.predictors.registry import predictor
from allyouneed.metrics.likelihood import mean_loss
from allyouneed.tasks.task import Task
from allyouneed.training.backend import Backend
from allyouneed.training.prepare import PreparedData
from allyouneed.training.recipe.recipe import Recipe

DIGITS = 3  # printed; scores that agree to this many digits tie
LOSS_METRICS = ("loss", "perplexity")  # need no predictions


def validation_loss(model: nn.Module, task: Task, data: Batches, backend: Backend) -> dict[str, float]:
    """The validation loss, in training precision and not compiled."""
    with backend.eager():
        return mean_loss(model, task, data, backend.autocast)


def is_better(metric: str, higher: bool, new: Mapping[str, float], old: Mapping[str, float] | None) -> bool:
    """Compare by the metric (`higher` is better, or lower); if it ties to `DIGITS` digits, by the loss. BLEU is 0 early
    on, and always for correct outputs of fewer than four words, while nonsense may score slightly above 0."""
    if math.isnan(new.get(metric, math.nan)):  # absent if scoring failed
        return False
    sign = 1 if higher else -1

    def rank(scores: Mapping[str, float]) -> tuple[float, float]:
        return sign * round(scores[metric], DIGITS), -scores.get("loss", math.inf)

    return old is None or metric not in old or rank(new) > rank(old)


class Scorer:
    """Scores the model that is being trained. `folder` returns it as the model folder that would be written."""

    def __init__(
        self,
        recipe: Recipe,
        prepared: PreparedData,
        backend: Backend,
        report: Callable[[str], None],
        folder: Callable[[], Folder],
    ) -> None:
        self.recipe, self.prepared, self.backend, self.report, self.folder = recipe, prepared, backend, report, folder
        self.samples: list[Sample] = []  # of the latest evaluation: every example that was predicted

    def evaluate(self, beam: int, show: int = 0, limit: int | None = None) -> dict[str, float]:
        """Loss over all validation examples, and metrics of the predictions for up to `limit` of them. What cannot be
        computed is reported and absent: a scorer that fails does not end the run."""
        assert self.prepared.valid is not None
        found: dict[str, float] = {}
        with self.warn_on_failure("computing the validation loss"):
            found |= validation_loss(self.folder().model, self.recipe.task, self.prepared.valid, self.backend)
        examples = self.prepared.valid_examples[:limit]
        only_shown = self.recipe.metric in LOSS_METRICS
        if only_shown:
            examples = examples[:: max(1, len(examples) // show)][:show] if show else []
        if not examples:
            return found
        with self.warn_on_failure("scoring the validation data"):
            judged = self.score(examples, beam, show if only_shown else len(examples))
            self.samples = judged.samples
            if show and judged.samples:
                self.report(replace(judged, samples=evenly_spaced(judged.samples, show)).samples_text())
            found |= {} if only_shown else judged.figures
        return found

    def limit_text(self, limit: int | None) -> str:
        """How many of the validation examples `limit` leaves for predictions; empty if all."""
        total = len(self.prepared.valid_examples)
        if limit is None or limit >= total or self.recipe.metric in LOSS_METRICS:
            return ""
        return f"  ({limit:,} of {total:,} {self.recipe.task.file_type.examples})"

    @contextmanager
    def warn_on_failure(self, what: str) -> Iterator[None]:
        """Report an exception of a scorer instead of raising it: training or its result is worth more."""
        try:
            yield
        except Exception as error:
            reason = " ".join(str(error).split())
            self.report(f"warning: {what} failed ({type(error).__name__}: {reason}); continuing without it")

    def score(self, examples: list[Any], beam: int, show: int = 0, resamples: int = 0) -> EvaluationResult:
        """Score predictions for examples, made exactly as by a predictor loaded from the model folder."""
        decoding = self.recipe.decoding.model_copy(update={"beam": beam, "best": 1})
        with self.backend.eager():  # in fp32: autocast would cast every weight again for every token
            model = predictor(self.folder())
            if self.prepared.retriever is not None and isinstance(model, Generator):
                model.retrieve(self.prepared.retriever)  # already open
            return model.judge(examples, decoding, show, resamples)
