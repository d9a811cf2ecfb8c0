"""The mean loss of a task over examples, and its perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from allyouneed.data.batches.packing import Batches
from allyouneed.data.retrieval.neighbours import NeighbourItems
from allyouneed.nn.batch import Batch
from allyouneed.nn.states.segment_memory import with_segment_memory
from allyouneed.runtime.process import evaluation_mode
from allyouneed.tasks.task import Task


@torch.no_grad()
def mean_loss(
    model: nn.Module, task: Task, data: Batches, around: Callable[[], AbstractContextManager[object]] = nullcontext
) -> dict[str, float]:
    """Per token (or text), without label smoothing; perplexity = exp(loss) where the loss is a likelihood. With
    retrieved neighbours, also without them. `around`: a context manager, e.g. autocast."""
    found = _mean(model, task, data.batches(0), around)
    if isinstance(data.items, NeighbourItems):
        alone = _mean(model, task, (replace(batch, source=None) for batch in data.batches(0)), around)
        found |= {f"{name} without neighbours": value for name, value in alone.items()}
    return found


def _mean(
    model: nn.Module, task: Task, batches: Iterable[Batch], around: Callable[[], AbstractContextManager[object]]
) -> dict[str, float]:
    device = next(model.parameters()).device
    sums, tokens, reader = [], [], with_segment_memory(model, task.has_memory)
    figures: dict[str, float] = {}
    with evaluation_mode(model):
        for batch in batches:
            with around():
                loss = task.loss(reader, batch.to(device))
            sums.append(loss.plain)
            tokens.append(loss.tokens)
            for name, value in loss.figures.items():
                figures[name] = figures.get(name, 0.0) + float(value)
    count = int(torch.stack(tokens).sum())
    mean = float(torch.stack(sums).double().sum() / count)
    found = {"loss": mean} | ({"perplexity": math.exp(min(mean, 700.0))} if task.has_perplexity else {})
    return found | {name: total / count for name, total in figures.items()}
