"""How many threads a short pass uses. All of them are faster on an idle machine; on a busy one a preempted thread makes
all others wait at every barrier between two instructions. That cannot be known beforehand, so it is measured. The
numbers computed do not depend on it."""

from __future__ import annotations

from statistics import median

TRIES = 3  # passes of one thread whose median is compared with
SOON, LATE = 64, 8192  # passes until all threads are tried again: twice as many each time one thread is faster


class ThreadCount:
    """One thread, or all of them (`most`) while they are faster in total than the median of one thread. The slowest of
    their passes does not count, since any machine stalls now and then: beside a busy core more than one does. Where all
    threads have lost before, their first pass decides."""

    def __init__(self, most: int) -> None:
        self.most, self.retry_after = most, SOON
        self.single: list[float] = []  # seconds of the last passes on one thread
        self.lost = False  # all threads were slower when they were tried last
        self.measure(TRIES)

    def measure(self, passes: int) -> None:
        """Measure this many passes on one thread before all are tried."""
        self.left, self.current = passes, 1  # `current`: the number of threads of the next pass
        self.tries = 0  # passes on all threads since then
        self.total = self.slowest = 0.0  # their seconds

    def record(self, threads: int, seconds: float) -> None:
        if threads == 1:
            self.single, self.left = [*self.single[1 - TRIES :], seconds], self.left - 1
            self.current = 1 if self.left else self.most
            return
        self.tries, self.total, self.slowest = self.tries + 1, self.total + seconds, max(self.slowest, seconds)
        count, spent = self.tries - 1, self.total - self.slowest
        if self.lost and self.tries == 1:
            count, spent = 1, seconds
        if count and spent >= count * median(self.single):
            self.measure(self.retry_after)
            self.lost, self.retry_after = True, min(2 * self.retry_after, LATE)
        elif self.tries == SOON:  # measure one thread again: the load may have changed
            self.measure(TRIES)
            self.lost, self.retry_after = False, SOON
