"""How good the model is now: loss and perplexity over the validation examples, and answers held against them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from allyouneed.data.packing import Batches
from allyouneed.tasks.task import Task
from allyouneed.train.machine import Machine

OF_THE_LOSS = ("loss", "perplexity")  # figures that need no answers


@torch.no_grad()
def validation_loss(model: nn.Module, task: Task, data: Batches, machine: Machine) -> dict[str, float]:
    """Per token (or text), without smoothing; where it is a likelihood, exp of it is the perplexity."""
    was_training = model.training
    model.eval()
    sums, tokens = [], []
    try:
        for batch in data.batches(0):
            with machine.autocast(), machine.uncompiled():
                loss = task.loss(model, batch.to(machine.device))
            sums.append(loss.plain)
            tokens.append(loss.tokens)
    finally:
        model.train(was_training)
    mean = float(torch.stack(sums).double().sum() / torch.stack(tokens).sum())
    return {"loss": mean} | ({"perplexity": math.exp(min(mean, 700.0))} if task.likelihood else {})


def better(metric: str, higher: bool, new: Mapping[str, float], old: Mapping[str, float] | None) -> bool:
    """By the metric (`higher` is better, or lower); where that ties (BLEU is 0 for a while), by the loss."""
    if math.isnan(new[metric]):
        return False
    sign = 1 if higher else -1

    def rank(scores: Mapping[str, float]) -> tuple[float, float]:
        return sign * scores[metric], -scores["loss"]

    return old is None or rank(new) > rank(old)
