"""How good the model is now: loss and perplexity over the validation examples, and answers held against them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from allyouneed.data.batches.packing import Batches
from allyouneed.evaluate.likelihood import mean_loss
from allyouneed.tasks.task import Task
from allyouneed.train.cuda.machine import Machine

DIGITS = 3  # that are shown of a figure; below them two are equal
OF_THE_LOSS = ("loss", "perplexity")  # figures that need no answers


def validation_loss(model: nn.Module, task: Task, data: Batches, machine: Machine) -> dict[str, float]:
    """In the precision that is trained in, but not compiled."""
    with machine.uncompiled():
        return mean_loss(model, task, data, machine.autocast)


def better(metric: str, higher: bool, new: Mapping[str, float], old: Mapping[str, float] | None) -> bool:
    """By the metric (`higher` is better, or lower); where that ties as it is shown (BLEU is 0 for a while, and always
    for right answers of fewer than four words, while nonsense gets a trace of it), by the loss."""
    if math.isnan(new[metric]):
        return False
    sign = 1 if higher else -1

    def rank(scores: Mapping[str, float]) -> tuple[float, float]:
        return sign * round(scores[metric], DIGITS), -scores["loss"]

    return old is None or rank(new) > rank(old)
