"""One of many copies of a model whose gradients meet: torch's DistributedDataParallel around model and task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from allyouneed.nn.batch import Batch
from allyouneed.tasks.task import Loss, Task


class Judged(nn.Module):
    """The model with its task: a batch in, its loss out, which is what DistributedDataParallel wants to see."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, batch: Batch) -> Loss:
        return self.task.loss(self.model, batch)


class Replica:
    """Gradients are summed, not averaged: each process divides its loss by the tokens of all. A weight that nobody used
    (an expert nobody chose) has none, as with one process."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        self.model = model
        self.inner = DistributedDataParallel(Judged(model, task), find_unused_parameters=True)
        self.inner.register_comm_hook(None, lambda state, bucket: _summed(bucket.buffer()))

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def loss(self, batch: Batch) -> Loss:
        found: Loss = self.inner(batch)
        return found

    def gathering(self, more: bool) -> AbstractContextManager[Any]:
        """With `more` batches of the update to come gradients wait: they meet once, in the last backward pass."""
        return self.inner.no_sync() if more else nullcontext()


def _summed(gradients: Tensor) -> torch.futures.Future[Tensor]:
    work: Any = dist.all_reduce(gradients, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
