"""Parts of the scheduler: which requests are admitted, how their prompts are read, what happens when blocks run out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from allyouneed.infer.decoding.base import RequestState
    from allyouneed.infer.running_batch import ActiveBatch, RunningBatch
    from allyouneed.infer.scheduling.admission import FairQueue
    from allyouneed.infer.scheduling.chunked_prefill import ChunkedPrefill


class SchedulerProtocol(Protocol):
    """The scheduler, as far as its parts use it."""

    budget: int  # prompt tokens read in one step
    steps: int
    fair: FairQueue
    prefill: ChunkedPrefill
    running: list[ActiveBatch]
    preempted: list[RunningBatch]
    preemptions: int
    with_blocks: Callable[..., None]

    def join(self, batch: RunningBatch) -> None: ...

    def end(self, batch: ActiveBatch) -> None: ...

    def drop(self, batch: ActiveBatch, error: Exception) -> None: ...

    def fail(self, requests: Iterable[RequestState], error: Exception) -> None: ...

    def fail_unheld(self, requests: list[RequestState], error: Exception) -> None: ...
