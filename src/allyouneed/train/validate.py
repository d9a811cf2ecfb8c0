"""Validation: loss and perplexity, and which scores are better."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from allyouneed.data.batches.packing import Batches
from allyouneed.evaluate.likelihood import mean_loss
from allyouneed.tasks.task import Task
from allyouneed.train.backend import Backend

DIGITS = 3  # printed; scores that agree to this many digits tie
LOSS_METRICS = ("loss", "perplexity")  # need no predictions


def validation_loss(model: nn.Module, task: Task, data: Batches, backend: Backend) -> dict[str, float]:
    """In training precision, not compiled."""
    with backend.eager():
        return mean_loss(model, task, data, backend.autocast)


def is_better(metric: str, higher: bool, new: Mapping[str, float], old: Mapping[str, float] | None) -> bool:
    """By the metric (`higher` is better, or lower); if it ties to `DIGITS` digits, by the loss. BLEU is 0 early on, and
    always for correct outputs of fewer than four words, while nonsense may score slightly above 0."""
    if math.isnan(new.get(metric, math.nan)):  # absent if scoring failed
        return False
    sign = 1 if higher else -1

    def rank(scores: Mapping[str, float]) -> tuple[float, float]:
        return sign * round(scores[metric], DIGITS), -scores.get("loss", math.inf)

    return old is None or metric not in old or rank(new) > rank(old)
