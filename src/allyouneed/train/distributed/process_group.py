"""The processes of one run and their collectives.

torchrun sets their number in the environment. Small values (a flag, a path, validation scores) are exchanged through
host memory and never block a GPU; gradients are handled in `apply.py`.
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
from allyouneed.train.distributed.tensor_parallel import tensor_parallel_problems
from allyouneed.train.recipe import Recipe

T = TypeVar("T")
TIMEOUT = timedelta(hours=6)  # others wait while the main process validates; torchrun detects dead processes
# how gloo and NCCL report a lost peer
PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "gloo/transport",
    "NCCL",
    "Broken pipe",
    "DistBackend",
)


@dataclass(frozen=True)
class ProcessGroup:
    """`tensor`: that many consecutive ranks read the same rows and form one data rank."""

    rank: int = 0
    world_size: int = 1
    tensor: int = 1

    @property
    def is_main(self) -> bool:
        """The main process writes files and prints; the others only compute."""
        return self.rank == 0

    @property
    def is_single(self) -> bool:
        return self.world_size == 1

    @property
    def data_rank(self) -> int:
        """Index of this process among the `data_ranks` readers of the data."""
        return self.rank // self.tensor

    @property
    def data_ranks(self) -> int:
        return self.world_size // self.tensor

    def any_flag(self, *flags: bool) -> list[bool]:
        """For each flag, whether any process sets it."""
        if self.is_single:
            return list(flags)
        any_set = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(any_set, dist.ReduceOp.MAX)
        return [bool(flag) for flag in any_set.tolist()]

    def broadcast(self, value: T) -> T:
        """The main process's value; the others' arguments are ignored."""
        if self.is_single:
            return value
        box: list[Any] = [value if self.is_main else None]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        found: T = box[0]
        return found

    def gather(self, value: T) -> list[T]:
        """The values of all processes, on the main process; empty on the others."""
        if self.is_single:
            return [value]
        boxes: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, boxes, dst=0)
        return boxes or []

    def sum(self, numbers: Tensor) -> Tensor:
        """Sum over data ranks, on the device or the host."""
        if not self.is_single:
            numbers = numbers if self.rank % self.tensor == 0 else torch.zeros_like(numbers)
            dist.all_reduce(numbers)
        return numbers

    def sum_count(self, count: int) -> int:
        """Sum of counts over data ranks, on the host."""
        return count if self.is_single else int(self.sum(torch.tensor(count)))

    @property
    def shard(self) -> DataShard:
        """This process's rows of every batch. The shards partition the batch, so updates do not depend on their
        number."""
        return DataShard(self.data_rank, self.data_ranks)


SINGLE_PROCESS = ProcessGroup()


@contextmanager
def join_process_group(recipe: Recipe) -> Iterator[ProcessGroup]:
    """The group started by torchrun; a single process without it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield SINGLE_PROCESS
        return
    _check(recipe, world)
    cuda = recipe.device != "cpu" and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    try:
        yield ProcessGroup(dist.get_rank(), world, recipe.parallel.tensor)
    finally:
        dist.destroy_process_group()


def _check(recipe: Recipe, world: int) -> None:
    """Raise if the recipe does not support this many processes."""
    problems = []
    if recipe.parallel.kind == "none":
        problems.append(f"parallel.kind: none, but torchrun started {world} processes; start one, or set ddp or fsdp")
    degree = recipe.parallel.tensor
    if world % degree:
        problems.append(
            f"parallel.tensor: {world} processes are not divisible by {degree}; start a multiple of {degree}"
        )
    if recipe.batch.rows < world // degree:
        problems.append(
            f"batch.rows: {recipe.batch.rows} rows cannot be divided among {world} processes; it counts those of all "
            "processes"
        )
    if degree > 1:
        problems += tensor_parallel_problems(recipe.model_for(None), degree)
    if degree > 1 and recipe.task.has_memory:
        problems.append("task.memory: not supported with parallel.tensor; remove one of them")
    if degree > 1 and isinstance(recipe.task, Contrastive):
        problems.append("task.kind: contrastive does not support parallel.tensor, whose processes read the same texts")
    if problems:
        raise UserError("\n".join(problems))


def is_peer_lost(error: BaseException) -> bool:
    """Whether this error means that another process has died."""
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in PEER_LOST)
    )
