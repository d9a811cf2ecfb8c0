"""One of many copies of a model whose gradients meet: torch's DistributedDataParallel around model and task, or, where
matrices are split besides, which it does not know, a sum after the last batch of an update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from allyouneed.nn.batch import Batch
from allyouneed.tasks.task import Loss
from allyouneed.train.distributed.objective import Objective


class Judged(nn.Module):
    """The model with its task: a batch in, its loss out, which is what DistributedDataParallel wants to see. `reader`:
    the model as it reads, which may remember."""

    def __init__(self, model: nn.Module, reader: Any, task: Objective) -> None:
        super().__init__()
        self.model, self.reader, self.task = model, reader, task

    def forward(self, batch: Batch) -> Loss:
        return self.task.loss(self.reader, batch)


class Replica:
    """Gradients are summed, not averaged: each process divides its loss by the tokens of all. A weight that nobody used
    (an expert nobody chose) has none, as with one process."""

    def __init__(self, model: nn.Module, reader: Any, task: Objective) -> None:
        self.model, self.reader = model, reader
        self.inner = DistributedDataParallel(Judged(model, reader, task), find_unused_parameters=True)
        self.inner.register_comm_hook(None, lambda state, bucket: _summed(bucket.buffer()))

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def loss(self, batch: Batch) -> Loss:
        found: Loss = self.inner(batch)
        return found

    def gathering(self, more: bool) -> AbstractContextManager[Any]:
        """With `more` batches of the update to come gradients wait: they meet once, in the last backward pass."""
        return self.inner.no_sync() if more else nullcontext()


class Copy:
    """As `Replica`, of a model whose matrices are split: gradients meet those of the same part in the other groups."""

    def __init__(self, model: nn.Module, reader: Any, task: Objective, group: Any) -> None:
        self.model, self.reader, self.task, self.group = model, reader, task, group

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def loss(self, batch: Batch) -> Loss:
        return self.task.loss(self.reader, batch)

    @contextmanager
    def gathering(self, more: bool) -> Iterator[None]:
        yield
        if more:
            return
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        used = torch.tensor([weight.grad is not None for weight in weights], dtype=torch.int32)
        dist.all_reduce(used, dist.ReduceOp.MAX)
        under_way: list[Any] = []
        for weight, anywhere in zip(weights, used.tolist(), strict=True):
            if anywhere:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                part = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
                under_way.append(dist.all_reduce(part, group=self.group, async_op=True))
        for work in under_way:
            work.wait()


def _summed(gradients: Tensor) -> torch.futures.Future[Tensor]:
    work: Any = dist.all_reduce(gradients, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
