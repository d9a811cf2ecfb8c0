"""The processes of one run: who we are among them, and what they tell each other.

torchrun says in the environment how many there are. Small things (a flag, a path, the scores of a validation) go
through the hosts' memory and never make a GPU wait; gradients are the business of `distributed.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from allyouneed.errors import UserError
from allyouneed.nn.batch import IGNORE, Batch, Rows
from allyouneed.tasks.contrastive import Contrastive
from allyouneed.train.recipe import Recipe

T = TypeVar("T")
PATIENCE = timedelta(hours=6)  # others wait while the first validates; torchrun itself notices who died
# how gloo and NCCL say that somebody does not answer any more
GONE = ("Connection closed by peer", "Connection reset by peer", "gloo/transport", "NCCL", "Broken pipe", "DistBackend")


@dataclass(frozen=True)
class Team:
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """It writes files and speaks; the others only compute."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.world == 1

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
        """Over all processes, on the device."""
        if not self.alone:
            dist.all_reduce(numbers)
        return numbers

    def share(self, batch: Batch) -> Batch:
        """Our rows of a batch. All shares together are the batch, so an update is the same however many share it."""
        return batch if self.alone else share_of(batch, self.rank, self.world)


ALONE = Team()


def share_of(batch: Batch, number: int, of: int) -> Batch:
    """The rows of reader `number`, neighbours in the batch. One for whom there is none gets a row without labels."""
    rows = _count(batch)
    begin, end = number * rows // of, (number + 1) * rows // of
    if begin == end:
        return _idle(batch)
    labels = batch.labels
    if labels is not None:
        starts = _label_starts(batch, rows)
        labels = labels[starts[begin] : starts[end]]
    return replace(batch.each(lambda tensor: tensor[begin:end] if len(tensor) == rows else tensor), labels=labels)


def _count(batch: Batch) -> int:
    target = batch.target
    return len(target.tokens) if isinstance(target, Rows) else len(next(iter(vars(target).values())))


def _label_starts(batch: Batch, rows: int) -> list[int]:
    """Where the labels of each row begin: one entry a row, or one for each sentence of it."""
    assert batch.labels is not None
    segments = batch.target.segments if isinstance(batch.target, Rows) else None
    if batch.labels.ndim > 1 or segments is None:
        return list(range(rows + 1))
    return [0, *segments.amax(1).cumsum(0).tolist()]


def _idle(batch: Batch) -> Batch:
    """Something to compute that counts for nothing: others wait for this process in every layer."""
    rows = _count(batch)

    def one(side: Any) -> Any:
        first = side.each(lambda tensor: tensor[:1] if len(tensor) == rows else tensor)
        if isinstance(first, Rows) and first.segments is not None:
            return replace(first, segments=torch.zeros_like(first.segments))  # no sentence stands in it
        return first

    labels = batch.labels
    if labels is not None:
        packed = isinstance(batch.target, Rows) and batch.target.segments is not None
        labels = labels[:0] if labels.ndim == 1 and packed else torch.full_like(labels[:1], IGNORE)
    source = None if batch.source is None else one(batch.source)
    return Batch(one(batch.target), source, labels, batch.begins)


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
        yield Team(dist.get_rank(), world)
    finally:
        dist.destroy_process_group()


def _check(recipe: Recipe, world: int) -> None:
    """What cannot be shared by so many."""
    problems = []
    if recipe.parallel.kind == "none":
        problems.append(f"parallel.kind: none, but torchrun started {world} processes; start one, or say ddp or fsdp")
    if recipe.batch.rows < world:
        problems.append(
            f"batch.rows: {recipe.batch.rows} rows cannot be shared by {world} processes; rows are those of all "
            "processes together"
        )
    if isinstance(recipe.task, Contrastive):
        problems.append("task.kind: contrastive compares all pairs of a batch with each other; it needs one process")
    if recipe.task.carries:
        problems.append("task.memory: what a model remembers from batch to batch stays in one process; start one")
    if problems:
        raise UserError("\n".join(problems))


def lost(error: BaseException) -> bool:
    """Whether this is how the end of another process is felt here."""
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in GONE)
    )
