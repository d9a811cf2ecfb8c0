"""How likely a model finds what it should have said: the loss of a task over examples, and its perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from allyouneed.data.packing import Batches
from allyouneed.tasks.task import Task


@torch.no_grad()
def mean_loss(
    model: nn.Module, task: Task, data: Batches, around: Callable[[], AbstractContextManager[object]] = nullcontext
) -> dict[str, float]:
    """Per token (or text), without smoothing; where it is a likelihood, exp of it is the perplexity. `around`: the
    precision it is computed in."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    sums, tokens = [], []
    try:
        for batch in data.batches(0):
            with around():
                loss = task.loss(model, batch.to(device))
            sums.append(loss.plain)
            tokens.append(loss.tokens)
    finally:
        model.train(was_training)
    mean = float(torch.stack(sums).double().sum() / torch.stack(tokens).sum())
    return {"loss": mean} | ({"perplexity": math.exp(min(mean, 700.0))} if task.likelihood else {})
