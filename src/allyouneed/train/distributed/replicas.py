"""Data parallelism: torch's DistributedDataParallel around model and task; with tensor parallelism, which it does not
support, an explicit all-reduce after the last batch of an update."""

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


class LossModule(nn.Module):
    """The model with its task as one module from batch to loss, as DistributedDataParallel requires. `stateful_model`:
    the model with its segment memory, if it has one."""

    def __init__(self, model: nn.Module, stateful_model: Any, task: Objective) -> None:
        super().__init__()
        self.model, self.stateful_model, self.task = model, stateful_model, task

    def forward(self, batch: Batch) -> Loss:
        return self.task.loss(self.stateful_model, batch)


class DataParallelModel:
    """Gradients are summed, not averaged: each process divides its loss by the tokens of all. Unused parameters (an
    expert without tokens) have no gradient, as in a single process."""

    def __init__(self, model: nn.Module, stateful_model: Any, task: Objective) -> None:
        self.model, self.stateful_model = model, stateful_model
        self.inner = DistributedDataParallel(LossModule(model, stateful_model, task), find_unused_parameters=True)
        self.inner.register_comm_hook(None, lambda state, bucket: _all_reduce(bucket.buffer()))

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def loss(self, batch: Batch) -> Loss:
        found: Loss = self.inner(batch)
        return found

    def sync_gradients(self, more: bool) -> AbstractContextManager[Any]:
        """With `more` batches to come in this update, gradients are not synchronised yet."""
        return self.inner.no_sync() if more else nullcontext()


class TensorParallelReplica:
    """Like `DataParallelModel`, for a tensor-parallel model: gradients are reduced over ranks with the same part."""

    def __init__(self, model: nn.Module, stateful_model: Any, task: Objective, group: Any) -> None:
        self.model, self.stateful_model, self.task, self.group = model, stateful_model, task, group

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def loss(self, batch: Batch) -> Loss:
        return self.task.loss(self.stateful_model, batch)

    @contextmanager
    def sync_gradients(self, more: bool) -> Iterator[None]:
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


def _all_reduce(gradients: Tensor) -> torch.futures.Future[Tensor]:
    work: Any = dist.all_reduce(gradients, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
