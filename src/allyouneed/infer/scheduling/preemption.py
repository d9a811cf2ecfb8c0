"""Preemption: what a scheduler does when its pool has too few free blocks. Rows of finished requests are dropped, then
cached prefixes evicted, then the least urgent request swapped out; it resumes when there are blocks for it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from allyouneed.infer.block_manager import BlockManager
from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.isolation import isolate
from allyouneed.infer.prefill import PrefillBatch
from allyouneed.infer.running_batch import ActiveBatch, RunningBatch
from allyouneed.nn.states.paged import PagedStates, PoolFullError


class SchedulerProtocol(Protocol):
    """The scheduler, as far as preemption uses it."""

    running: list[ActiveBatch]

    @property
    def prefilling(self) -> list[PrefillBatch]: ...

    def urgency(self, state: RequestState) -> tuple[int, int, int]: ...

    def join(self, batch: RunningBatch) -> None: ...

    def drop(self, batch: ActiveBatch, error: Exception) -> None: ...

    def fail(self, requests: Iterable[RequestState], error: Exception) -> None: ...


class Preemption:
    """`batches`: preempted requests, each in a batch of its own; `count`: preemptions so far."""

    def __init__(self, scheduler: SchedulerProtocol, blocks: BlockManager) -> None:
        self.scheduler, self.blocks = scheduler, blocks
        self.batches: list[RunningBatch] = []
        self.count = 0

    def run(self, act: Callable[[], None], batch: ActiveBatch | None = None) -> None:
        """Call `act`, and free blocks while there are too few for it. `batch`: stop once that batch has left."""
        while batch is None or (batch in self.scheduler.running and batch.active):
            try:
                act()
                return
            except PoolFullError:
                if not self._free_blocks():
                    raise

    def _free_blocks(self) -> bool:
        """False: nothing can be freed."""
        scheduler = self.scheduler
        batches = [batch for batch in scheduler.running if isinstance(batch, RunningBatch)]
        for batch in batches:
            before = len(batch)
            with isolate(partial(scheduler.drop, batch)):
                batch.drop_finished()
            if len(batch) < before or batch not in scheduler.running:
                return True
        if self.blocks.prefixes.evict():
            return True
        running = [(state, batch) for batch in batches for state in batch.requests]
        if not running or len(running) + len(scheduler.prefilling) < 2:  # prefills were admitted with blocks enough
            return False
        state, batch = max(running, key=lambda both: scheduler.urgency(both[0]))
        with isolate(partial(scheduler.drop, batch)):
            self._preempt(state, batch)
        return True

    def _preempt(self, state: RequestState, batch: RunningBatch) -> None:
        alone = batch.split(state)
        assert isinstance(alone.states, PagedStates)
        alone.states.swap_out()
        self.batches.append(alone)
        self.blocks.release(state)
        self.count += 1

    def resume(self) -> None:
        """Resume preempted requests, the most urgent first, as far as there are blocks."""
        scheduler = self.scheduler
        self.batches = [batch for batch in self.batches if not batch.requests[0].cancelled]
        self.batches.sort(key=lambda batch: scheduler.urgency(batch.requests[0]))
        while self.batches:
            resumed = False
            with isolate(self._fail_first):
                resumed = self._swap_in(self.batches[0])
            if not resumed:
                return
            scheduler.join(self.batches.pop(0))

    def _swap_in(self, batch: RunningBatch) -> bool:
        states, scheduler = batch.states, self.scheduler
        assert isinstance(states, PagedStates)
        nothing_else = not scheduler.running and not scheduler.prefilling
        return self.blocks.resume(batch.requests[0], states, len(batch), force=nothing_else)

    def _fail_first(self, error: Exception) -> None:
        self.scheduler.fail(self.batches.pop(0).requests, error)
