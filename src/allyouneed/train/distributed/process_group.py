"""The processes of one run: who we are among them, and what they tell each other.

torchrun says in the environment how many there are. Small things (a flag, a path, the scores of a validation) go
through the hosts' memory and never make a GPU wait; gradients are the business of `apply.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from allyouneed.data.batches.sharding import DataShard
from allyouneed.errors import UserError
from allyouneed.tasks.contrastive import Contrastive
from allyouneed.train.distributed.tensor_parallel import tensor_problems
from allyouneed.train.recipe import Recipe

T = TypeVar("T")
PATIENCE = timedelta(hours=6)  # others wait while the first validates; torchrun itself notices who died
# how gloo and NCCL say that somebody does not answer any more
GONE = ("Connection closed by peer", "Connection reset by peer", "gloo/transport", "NCCL", "Broken pipe", "DistBackend")


@dataclass(frozen=True)
class Team:
    """`tensor`: so many neighbours read the same rows, and together are one reader of the data."""

    rank: int = 0
    world: int = 1
    tensor: int = 1

    @property
    def first(self) -> bool:
        """It writes files and speaks; the others only compute."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.world == 1

    @property
    def reader(self) -> int:
        """Which of the `readers` of the data this process belongs to."""
        return self.rank // self.tensor

    @property
    def readers(self) -> int:
        return self.world // self.tensor

    def any(self, *flags: bool) -> list[bool]:
        """Whether anybody says so, of each of these."""
        if self.alone:
            return list(flags)
        said = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(said, dist.ReduceOp.MAX)
        return [bool(flag) for flag in said.tolist()]

    def told(self, value: T) -> T:
        """What the first says; the others wait for it, and whatever they bring along is forgotten."""
        if self.alone:
            return value
        box: list[Any] = [value if self.first else None]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        found: T = box[0]
        return found

    def gathered(self, value: T) -> list[T]:
        """What everybody has, for the first; for the others nothing."""
        if self.alone:
            return [value]
        boxes: list[Any] | None = [None] * self.world if self.first else None
        dist.gather_object(value, boxes, dst=0)
        return boxes or []

    def sum(self, numbers: Tensor) -> Tensor:
        """Over all readers of the data, on the device or on the host."""
        if not self.alone:
            numbers = numbers if self.rank % self.tensor == 0 else torch.zeros_like(numbers)
            dist.all_reduce(numbers)
        return numbers

    def total(self, count: int) -> int:
        """Of what readers have counted, each in its own rows; through the hosts' memory."""
        return count if self.alone else int(self.sum(torch.tensor(count)))

    @property
    def share(self) -> DataShard:
        """Of the rows of every batch. All shares together are the batch: an update is the same however many read."""
        return DataShard(self.reader, self.readers)


ALONE = Team()


@contextmanager
def assembled(recipe: Recipe) -> Iterator[Team]:
    """The team that torchrun started us in; alone when nobody did."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield ALONE
        return
    _check(recipe, world)
    cuda = recipe.device != "cpu" and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE)
    try:
        yield Team(dist.get_rank(), world, recipe.parallel.tensor)
    finally:
        dist.destroy_process_group()


def _check(recipe: Recipe, world: int) -> None:
    """What cannot be shared by so many."""
    problems = []
    if recipe.parallel.kind == "none":
        problems.append(f"parallel.kind: none, but torchrun started {world} processes; start one, or say ddp or fsdp")
    ways = recipe.parallel.tensor
    if world % ways:
        problems.append(f"parallel.tensor: {world} processes cannot be grouped by {ways}; start a multiple of {ways}")
    if recipe.batch.rows < world // ways:
        problems.append(
            f"batch.rows: {recipe.batch.rows} rows cannot be shared by {world} processes; rows are those of all "
            "processes together"
        )
    if ways > 1:
        problems += tensor_problems(recipe.model_for(None), ways)
    if ways > 1 and recipe.task.has_memory:
        problems.append("task.memory: what is remembered of every head is not split (parallel.tensor); leave one out")
    if ways > 1 and isinstance(recipe.task, Contrastive):
        problems.append(
            "task.kind: contrastive gathers the texts of all processes, and these (parallel.tensor) read the same"
        )
    if problems:
        raise UserError("\n".join(problems))


def lost(error: BaseException) -> bool:
    """Whether this is how the end of another process is felt here."""
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in GONE)
    )
