"""Batches of forward-pass tasks (embed, classify, …): inputs that have arrived together are computed together."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from allyouneed.apps.serve.errors import ApiError

current_client: ContextVar[str] = ContextVar("current_client", default="")  # whose request a route answers
CHUNK = 256  # inputs computed at once by default: other requests wait no longer than that


@dataclass(eq=False)
class ForwardJob:
    """Inputs of one request. Jobs with equal `key` are computed together by `compute`, which returns one output per
    input, `chunk` inputs at most at once."""

    key: Hashable
    inputs: Sequence[Any]
    compute: Callable[[list[Any]], Sequence[Any]]
    chunk: int = CHUNK
    client: str = ""
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


def fault_of_the_model(error: BaseException) -> BaseException:
    """Numbers that are not finite are no fault of a request: status 500."""
    from allyouneed.infer.decoding.rules import NonFiniteError  # imports torch

    return ApiError(str(error), 500, code="non_finite") if isinstance(error, NonFiniteError) else error


class ForwardQueue:
    """Jobs by key, in order of arrival. Each round takes as many inputs of every client, of its jobs of one key, so
    that neither many requests nor a long list hold up others. One thread calls `run_round`."""

    def __init__(self) -> None:
        self.jobs: dict[Hashable, deque[ForwardJob]] = {}
        self.lock = Lock()

    def sizes(self) -> Counter[str]:
        """Inputs that are waiting, by client."""
        found = Counter[str]()
        with self.lock:
            for job in (job for jobs in self.jobs.values() for job in jobs):
                found[job.client] += job.left
        return found

    def add(self, job: ForwardJob) -> None:
        with self.lock:
            self.jobs.setdefault(job.key, deque()).append(job)

    def run_round(self) -> None:
        with self.lock:
            key = next(iter(self.jobs))
            waiting = [job for job in self.jobs.pop(key) if not job.future.done()]  # others were cancelled
        clients: dict[str, list[ForwardJob]] = {}
        for job in waiting:
            clients.setdefault(job.client, []).append(job)
        chunk = waiting[0].chunk if waiting else 0
        portion = max(1, chunk // max(1, len(clients)))
        parts: dict[ForwardJob, Sequence[Any]] = {}
        for own in list(clients.values())[:chunk]:
            share = max(1, portion // len(own))
            parts |= {job: job.inputs[len(job.outputs) : len(job.outputs) + share] for job in own[:portion]}
        self.compute(list(parts), list(parts.values()))
        with self.lock:
            others = [job for job in waiting if job not in parts]
            left = [job for job in [*others, *parts] if not job.future.done()]
            if left or key in self.jobs:  # to the end: other keys are next
                self.jobs[key] = deque([*left, *self.jobs.pop(key, ())])

    def compute(self, jobs: list[ForwardJob], parts: list[Sequence[Any]]) -> None:
        try:
            found = iter(jobs[0].compute([one for part in parts for one in part])) if jobs else iter(())
            for job, part in zip(jobs, parts, strict=True):
                outputs = [next(found) for _ in part]
                for output in outputs:
                    check_finite(output)
                job.add(outputs)
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].fail(fault_of_the_model(error))
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


def check_finite(output: Any) -> None:
    """Refuse a tensor with NaN, which base64 would hide in an embedding; JSON of other outputs cannot hold one."""
    isfinite = getattr(output, "isfinite", None)
    if isfinite is not None and not bool(isfinite().all()):
        from allyouneed.infer.decoding.rules import NonFiniteError

        raise NonFiniteError
