"""Batches of forward-pass tasks (embed, classify, …): inputs that have arrived together are computed together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

CHUNK = 256  # inputs computed at once by default: other requests wait no longer than that


@dataclass(eq=False)
class ForwardJob:
    """Inputs of one request. Jobs with equal `key` are computed together by `compute`, which returns one output per
    input, `chunk` inputs at most at once."""

    key: Hashable
    inputs: Sequence[Any]
    compute: Callable[[list[Any]], Sequence[Any]]
    chunk: int = CHUNK
    future: Future[list[Any]] = field(default_factory=Future)
    outputs: list[Any] = field(default_factory=list)

    @property
    def left(self) -> int:
        return len(self.inputs) - len(self.outputs)

    def add(self, outputs: Sequence[Any]) -> None:
        self.outputs += outputs
        if not self.left and not self.future.done():
            self.future.set_result(self.outputs)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class ForwardQueue:
    """Jobs by key, in order of arrival. Each round takes a fair share of every job of one key, so that a long list does
    not hold up short ones. One thread calls `run_round`."""

    def __init__(self) -> None:
        self.jobs: dict[Hashable, deque[ForwardJob]] = {}
        self.lock = Lock()

    @property
    def size(self) -> int:
        """Inputs that are waiting."""
        with self.lock:
            return sum(job.left for jobs in self.jobs.values() for job in jobs)

    def add(self, job: ForwardJob) -> None:
        with self.lock:
            self.jobs.setdefault(job.key, deque()).append(job)

    def run_round(self) -> None:
        with self.lock:
            key = next(iter(self.jobs))
            waiting = [job for job in self.jobs.pop(key) if not job.future.done()]  # others were cancelled
        chunk = waiting[0].chunk if waiting else 0
        jobs = waiting[:chunk]
        share = max(1, chunk // max(1, len(jobs)))
        self.compute(jobs, [job.inputs[len(job.outputs) : len(job.outputs) + share] for job in jobs])
        with self.lock:
            left = [job for job in [*waiting[chunk:], *jobs] if not job.future.done()]
            if left or key in self.jobs:  # to the end: other keys are next
                self.jobs[key] = deque([*left, *self.jobs.pop(key, ())])

    def compute(self, jobs: list[ForwardJob], parts: list[Sequence[Any]]) -> None:
        try:
            found = iter(jobs[0].compute([one for part in parts for one in part])) if jobs else iter(())
            for job, part in zip(jobs, parts, strict=True):
                job.add([next(found) for _ in part])
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].fail(error)
            else:  # find out whose input it was
                for job, part in zip(jobs, parts, strict=True):
                    self.compute([job], [part])

    def close(self, error: BaseException) -> None:
        """Fail what is waiting."""
        with self.lock:
            for jobs in self.jobs.values():
                for job in jobs:
                    job.fail(error)
            self.jobs.clear()
