"""Preemption: what a scheduler does when its pool has too few free blocks. Rows of finished requests are dropped, then
cached prefixes evicted, then the least urgent request swapped out; it resumes when there are blocks for it again."""

from __future__ import annotations

from collections.abc import Callable

from allyouneed.infer.block_manager import BlockManager
from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.running_batch import ActiveBatch, RunningBatch
from allyouneed.infer.scheduling import SchedulerProtocol
from allyouneed.nn.states.paged import PagedStates, PoolFullError


class Preemption:
    def __init__(self, scheduler: SchedulerProtocol, blocks: BlockManager) -> None:
        self.scheduler, self.blocks = scheduler, blocks

    def run(self, act: Callable[[], None], batch: ActiveBatch | None = None) -> None:
        """Call `act`, and free blocks while there are too few for it. `batch`: stop once that batch has left."""
        while batch is None or batch in self.scheduler.running:
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
            try:
                batch.drop_finished()
                scheduler.end(batch)
            except Exception as error:
                scheduler.drop(batch, error)
            if len(batch) < before or batch not in scheduler.running:
                return True
        if self.blocks.prefixes.evict():
            return True
        running = [(state, batch) for batch in batches for state in batch.requests]
        if (
            not running or len(running) + len(scheduler.prefill.batches) < 2
        ):  # prefills were admitted with blocks enough
            return False
        state, batch = max(running, key=lambda both: scheduler.fair.urgency(both[0], scheduler.steps))
        try:
            self._preempt(state, batch)
        except Exception as error:
            scheduler.drop(batch, error)
        return True

    def _preempt(self, state: RequestState, batch: RunningBatch) -> None:
        alone = batch.split(state)
        assert isinstance(alone.states, PagedStates)
        alone.states.swap_out()
        self.scheduler.end(batch)
        self.scheduler.preempted.append(alone)
        self.blocks.release(state)
        self.scheduler.preemptions += 1

    def resume(self) -> None:
        """Resume preempted requests, the most urgent first, as far as there are blocks."""
        scheduler = self.scheduler
        left = [batch for batch in scheduler.preempted if not batch.requests[0].cancelled]
        scheduler.preempted = sorted(left, key=lambda batch: scheduler.fair.urgency(batch.requests[0], scheduler.steps))
        while scheduler.preempted:
            try:
                if not self._swap_in(scheduler.preempted[0]):
                    return
            except Exception as error:
                scheduler.fail(scheduler.preempted.pop(0).requests, error)
                return
            scheduler.join(scheduler.preempted.pop(0))

    def _swap_in(self, batch: RunningBatch) -> bool:
        states, scheduler = batch.states, self.scheduler
        assert isinstance(states, PagedStates)
        nothing_else = not scheduler.running and not scheduler.prefill.batches
        return self.blocks.resume(batch.requests[0], states, len(batch), force=nothing_else)
