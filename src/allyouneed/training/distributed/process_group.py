"""The processes of one run and their collectives.

torchrun sets their number in the environment. Small values (a flag, a path, validation scores) are exchanged through
host memory and never block a GPU, in a `control` group of their own; gradients are handled in `apply.py`.

A process that hangs is noticed after `parallel.patience`: the others wait no longer for anything, and say where each of
them waited and who did not answer (`lost_peer_report`). While the main process works alone (`on_main`), a thread of it
tells the others from time to time that it is alive.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from allyouneed.data.batches.sharding import DataShard
from allyouneed.errors import UserError
from allyouneed.training.distributed.tensor_parallel import tensor_parallel_problems
from allyouneed.training.recipe.recipe import Recipe

T = TypeVar("T")
# torchrun notices processes that die; NCCL aborts the process without a report, so it waits longer than the host
NCCL_EXTRA = timedelta(minutes=1)
GRACE = timedelta(seconds=10)  # for all processes to say where they waited
LEAVE = timedelta(seconds=5)  # to leave the group after an error; torchrun kills after 30
# how gloo and NCCL report a lost peer
PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "gloo/transport",
    "NCCL",
    "Broken pipe",
    "DistBackend",
)


@dataclass
class Place:
    """What this process is doing, for the report of a process that hangs."""

    text: str = "the start"


@dataclass(frozen=True)
class ProcessGroup:
    """`tensor`: that many consecutive ranks read the same rows and form one data rank. `control`: the group of what is
    exchanged through host memory. `patience`: how long a process is waited for."""

    rank: int = 0
    world_size: int = 1
    tensor: int = 1
    control: Any = field(default=None, compare=False, repr=False)
    patience: timedelta = field(default=timedelta(minutes=10), compare=False, repr=False)
    place: Place = field(default_factory=Place, compare=False, repr=False)

    def at(self, place: str) -> None:
        """Note what this process is doing from now on."""
        self.place.text = place

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
        dist.all_reduce(any_set, dist.ReduceOp.MAX, group=self.control)
        return [bool(flag) for flag in any_set.tolist()]

    def broadcast(self, value: T) -> T:
        """The main process's value; the others' arguments are ignored."""
        if self.is_single:
            return value
        box: list[Any] = [value if self.is_main else None]
        dist.broadcast_object_list(box, src=0, group=self.control, device=torch.device("cpu"))
        return box[0]

    def on_main(self, work: Callable[[], T], place: str) -> T:
        """What `work` returns on the main process, which alone does it; the others wait as long as that is alive.

        A `UserError` of `work` ends all processes with exit code 2; only the main process prints it."""
        self.at(place)
        if self.is_single:
            return work()
        refused: UserError | None = None
        done: T | None = None
        if self.is_main:
            with self._signs_of_life():
                try:
                    done = work()
                except UserError as error:
                    refused = error
            self._send_sign(False)
        else:
            while self._send_sign(False):
                pass
        done, is_refused = self.broadcast((done, refused is not None))
        if refused is not None:
            raise refused
        if is_refused:
            raise SystemExit(2)
        return cast(T, done)

    @contextmanager
    def _signs_of_life(self) -> Iterator[None]:
        """Inside, a thread tells the waiting processes that this one is alive."""
        stop, interval = threading.Event(), self.patience.total_seconds() / 4

        def send() -> None:
            while not stop.wait(interval):
                try:
                    self._send_sign(True)
                except RuntimeError:  # a process was lost: the main thread will notice
                    return

        thread = threading.Thread(target=send, name="signs of life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _send_sign(self, works: bool) -> bool:
        """Whether the main process is still working, as it says."""
        sign = torch.tensor([works], dtype=torch.int32)
        dist.broadcast(sign, src=0, group=self.control)
        return bool(sign)

    def gather(self, value: T) -> list[T]:
        """The values of all processes, on the main process; empty on the others."""
        if self.is_single:
            return [value]
        boxes: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, boxes, dst=0, group=self.control)
        return boxes or []

    def sum(self, numbers: Tensor) -> Tensor:
        """Sum over data ranks, on the device or the host."""
        if not self.is_single:
            numbers = numbers if self.rank % self.tensor == 0 else torch.zeros_like(numbers)
            dist.all_reduce(numbers, group=self.control if numbers.device.type == "cpu" else None)
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
    patience = timedelta(minutes=recipe.parallel.patience)
    timeout = patience + NCCL_EXTRA * cuda
    store, rank, _ = next(iter(rendezvous("env://", timeout=timeout)))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout, store=_of_attempt(store), rank=rank, world_size=world
    )
    try:
        control = dist.new_group(backend="gloo", timeout=patience)
        yield ProcessGroup(dist.get_rank(), world, recipe.parallel.tensor, control, patience)
    except BaseException:
        # in a thread: if another process is lost, this may not end, and the error must be reported
        leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(LEAVE.total_seconds())
        raise
    dist.destroy_process_group()


def _of_attempt(store: Store) -> PrefixStore:
    """The keys of this start of the processes: torchrun keeps its store when it restarts them, with the addresses of
    those that have died."""
    return PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


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
    if recipe.batch.rows is not None and recipe.batch.rows < world // degree:
        problems.append(
            f"batch.rows: {recipe.batch.rows} rows cannot be divided among {world} processes; it counts those of all "
            "processes"
        )
    if degree > 1:
        problems += tensor_parallel_problems(recipe.model_for(None), degree)
    if degree > 1 and recipe.task.has_memory:
        problems.append("task.memory: not supported with parallel.tensor; remove one of them")
    if degree > 1 and recipe.task.compares_batch:
        text = "does not support parallel.tensor, whose processes read the same examples"
        problems.append(f"task.kind: {recipe.task_kind} {text}")
    if problems:
        raise UserError("\n".join(problems))


def is_peer_lost(error: BaseException) -> bool:
    """Whether this error means that another process has died."""
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in PEER_LOST)
    )


def lost_peer_report(processes: ProcessGroup, error: BaseException) -> str:
    """Where this process waited, and, if others hang, who waits with it and who does not answer."""
    text, place = str(error), processes.place.text
    if "timed out" not in text.lower():
        what = text.splitlines()[0].partition(". This is")[0]  # without gloo's advice
        return f"lost another process of the run in {place} ({what})"
    waiting, answered = _waiting_places(processes)
    others = [f"{rank} in {where}" for rank, where in waiting.items() if rank != processes.rank]
    # the store is in the main process or, with torchrun, beside it
    silent = [rank for rank in range(processes.world_size) if rank not in waiting] if answered else [0]
    return (
        f"lost another process of the run: waited {processes.patience.total_seconds() / 60:g} minutes in {place}, but "
        f"process {', '.join(map(str, silent)) or 'of the run'} does not answer"
        + (f" (also waiting: {', '.join(others)})" if others else "")
        + "; `py-spy dump` shows what it does"
    )


def _waiting_places(processes: ProcessGroup) -> tuple[dict[int, str], bool]:
    """Where the processes that have noticed wait, by rank, through the store that they started with; and whether that
    has answered."""
    found, grace = {processes.rank: processes.place.text}, min(GRACE, processes.patience / 4).total_seconds()
    answered = threading.Event()

    def ask() -> None:
        store = _of_attempt(TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        store.set(f"waits/{processes.rank}", processes.place.text)
        answered.set()
        while len(found) < processes.world_size:
            for rank in range(processes.world_size):
                if rank not in found and store.check([f"waits/{rank}"]):
                    found[rank] = store.get(f"waits/{rank}").decode()
            time.sleep(0.05)

    # in a thread: if the store is in the process that hangs, even connecting to it does not end
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(grace)
    return dict(sorted(dict(found).items())), answered.is_set()
