"""How many threads a short pass uses. All of them are faster on an idle machine; on a busy one a preempted thread makes
all others wait at every barrier between two instructions. That cannot be known beforehand, so it is measured. The
numbers computed do not depend on it."""

from __future__ import annotations

from statistics import median

TRIES = 3  # passes that are compared
HOPELESS = 2.0  # times as slow
FORGOTTEN = 16  # passes without a slow one after which a slow one is forgotten
SOON, LATE = 64, 8192  # passes until all threads are tried again: twice as many each time one thread is faster


class ThreadCount:
    """One thread, or all of them (`most`) while their passes are faster than the median of one thread. A single slow
    pass says nothing: any machine has one now and then. Beside a busy core they come in quick succession, and two of
    them end a trial; where all threads have lost before, one does."""

    def __init__(self, most: int) -> None:
        self.most, self.retry_after = most, SOON
        self.single: list[float] = []  # seconds of the last passes on one thread
        self.left = TRIES  # passes on one thread before all are tried
        self.tries = 0  # passes on all threads since then
        self.slow = self.fast = 0  # slow passes among them that count, and others since the last one
        self.lost = False  # whether the last trial of all threads was ended

    @property
    def current(self) -> int:
        """For the next pass."""
        return 1 if self.left or self.most == 1 else self.most

    def record(self, threads: int, seconds: float) -> None:
        if threads == 1:
            self.single, self.left = [*self.single[1 - TRIES :], seconds], self.left - 1
            return
        usual, self.tries = median(self.single), self.tries + 1
        if seconds > HOPELESS * usual or (self.tries <= TRIES and seconds >= usual):
            self.slow, self.fast = self.slow + 1, 0
        else:
            self.fast += 1
            self.slow = 0 if self.fast == FORGOTTEN else self.slow
        forgiven = 0 if self.lost else 1
        if self.slow > forgiven:
            self.left, self.lost, self.retry_after = self.retry_after, True, min(2 * self.retry_after, LATE)
            self.tries = self.slow = self.fast = 0
        elif self.tries == SOON:  # measure one thread again: the load may have changed
            self.left, self.lost, self.retry_after = TRIES, False, SOON
            self.tries = self.slow = self.fast = 0
