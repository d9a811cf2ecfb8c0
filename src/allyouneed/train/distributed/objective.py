"""Objectives that look at all texts of a batch, where several processes read it: what each finds is shown to all."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from allyouneed.nn.batch import Batch
from allyouneed.tasks.contrastive import Contrastive
from allyouneed.tasks.task import Loss, Task
from allyouneed.train.distributed.process_group import Team


class Objective(Protocol):
    """What training asks of a task, batch by batch."""

    def loss(self, model: Any, batch: Batch) -> Loss: ...


def all_pairs(task: Task, team: Team) -> Objective:
    """The task itself, or, where it compares all texts of a batch and several processes read these, over all."""
    return AllPairs(task, team.world) if isinstance(task, Contrastive) and not team.alone else task


class AllPairs:
    """Each process compares the vectors of all and counts its share of the loss, so that all shares are the loss."""

    def __init__(self, task: Task, world: int) -> None:
        self.task, self.world = task, world

    def loss(self, model: Any, batch: Batch) -> Loss:
        found = self.task.loss(_Shown(model), batch)
        return found._replace(total=found.total / self.world, plain=found.plain / self.world)


class _Shown:
    """A model whose head gives the vectors of everybody's texts."""

    def __init__(self, model: Any) -> None:
        self.model, self.run = model, model.run

    def head(self, *given: Any) -> Tensor:
        vectors: Tensor = _Everybodys.apply(self.model.head(*given))
        return vectors


class _Everybodys(torch.autograd.Function):
    """(own texts, width) -> (all texts, width), in the order of processes, which may have any number of them."""

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
