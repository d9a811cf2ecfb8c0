"""Data parallelism: torch's DistributedDataParallel around model and task; with tensor parallelism, which it does not
support, an explicit all-reduce after the last batch of an update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from allyouneed.nn.batch import Batch
from allyouneed.nn.states.segment_memory import SegmentMemory
from allyouneed.tasks.task import Loss
from allyouneed.training.distributed.objective import Objective


class LossModule(nn.Module):
    """The model with its task as one module from batch to loss, as DistributedDataParallel requires. `stateful_model`:
    the model with its segment memory, if it has one."""

    def __init__(self, model: nn.Module, stateful_model: Any, task: Objective) -> None:
        super().__init__()
        self.model, self.stateful_model, self.task = model, stateful_model, task

    def forward(self, batch: Batch) -> Loss:
        return self.task.loss(self.stateful_model, batch)


class TensorParallelReplica:
    """Gradients are summed over ranks with the same part of a tensor-parallel model, after the last batch of an
    update."""

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


class DataParallelModel(TensorParallelReplica):
    """Gradients are summed, not averaged: each process divides its loss by the tokens of all. Unused parameters (an
    expert without tokens) have no gradient, as in a single process.

    DistributedDataParallel finds them by a walk through the graph of every batch, so it does that only where there are
    some: in models with parts that say so (`may_skip_parameters`), or where the first update (the dry run), which goes
    without it, has left a parameter unused."""

    def __init__(self, model: nn.Module, stateful_model: Any, task: Objective) -> None:
        super().__init__(model, stateful_model, task, None)
        self.inner: DistributedDataParallel | None = None
        varies = any(getattr(module, "may_skip_parameters", False) for module in model.modules())
        self.finds_unused = varies or isinstance(stateful_model, SegmentMemory)

    def loss(self, batch: Batch) -> Loss:
        return super().loss(batch) if self.inner is None else self.inner(batch)

    @contextmanager
    def sync_gradients(self, more: bool) -> Iterator[None]:
        """With `more` batches to come in this update, gradients are not synchronised yet."""
        if self.inner is not None:
            with self.inner.no_sync() if more else nullcontext():
                yield
            return
        with super().sync_gradients(more):
            yield
        if not more:
            unused = any(weight.requires_grad and weight.grad is None for weight in self.parameters())
            self.finds_unused = self.finds_unused or unused
            wrapped = LossModule(self.model, self.stateful_model, self.task)
            self.inner = DistributedDataParallel(wrapped, find_unused_parameters=self.finds_unused)
            self.inner.register_comm_hook(None, lambda state, bucket: _all_reduce(bucket.buffer()))


def _all_reduce(gradients: Tensor) -> torch.futures.Future[Tensor]:
    work: Any = dist.all_reduce(gradients, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
