"""Contrastive objectives over several processes: gather the vectors of all texts of a batch."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from allyouneed.nn.batch import Batch
from allyouneed.tasks.task import Loss, Task
from allyouneed.training.distributed.process_group import ProcessGroup


class Objective(Protocol):
    """The part of a task that an update uses."""

    def loss(self, model: Any, batch: Batch) -> Loss: ...


def over_all_processes(task: Task, processes: ProcessGroup) -> Objective:
    """The task itself; a contrastive task in a multi-process run compares the texts of all processes."""
    return GatheredContrastive(task, processes.world_size) if task.compares_batch and not processes.is_single else task


class GatheredContrastive:
    """Each process computes the loss over all pairs and contributes 1 / world_size of it."""

    def __init__(self, task: Task, world_size: int) -> None:
        self.task, self.world_size = task, world_size

    def loss(self, model: Any, batch: Batch) -> Loss:
        found = self.task.loss(_GatheredModel(model), batch)
        return found._replace(total=found.total / self.world_size, plain=found.plain / self.world_size)


class _GatheredModel:
    """A model whose head, or whose towers, return the vectors of all processes' texts and images."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def head(self, *given: Any) -> Tensor:
        return _AllGather.apply(self.model.head(*given))

    def vectors(self, *given: Any) -> Tensor:
        vectors: Tensor = _AllGather.apply(self.model.vectors(*given))
        return vectors


class _AllGather(torch.autograd.Function):
    """(own texts, width) -> (all texts, width), in rank order; ranks may have different numbers of texts."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        world = dist.get_world_size()
        counts = [torch.zeros((), dtype=torch.long) for _ in range(world)]
        dist.all_gather(counts, torch.tensor(len(own)))
        sizes = [int(count) for count in counts]
        padded = own.new_zeros(max(sizes), *own.shape[1:])
        padded[: len(own)] = own
        found = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(found, padded)
        before = sum(sizes[: dist.get_rank()])
        ctx.own = slice(before, before + len(own))
        return torch.cat([part[:size] for part, size in zip(found, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed)
        return summed[ctx.own]
