"""How many threads a short pass takes. All of them are quicker where they have the machine to themselves; where others
work too, a thread that is sent away for a moment keeps all others waiting, at every border between two orders. Nobody
can know beforehand, so the clock decides. What is computed does not depend on it."""

from __future__ import annotations

from statistics import median

TRIES = 3  # passes that are compared
HOPELESS = 2.0  # times as slow
SOON, LATE = 64, 8192  # passes until all are tried again: as long again each time one alone is quicker


class Team:
    """One thread, or all of them (`most`) as long as each of their passes is quicker than what one usually takes."""

    def __init__(self, most: int) -> None:
        self.most, self.patience = most, SOON
        self.alone: list[float] = []  # seconds of the last passes of one
        self.left = TRIES  # passes that one does before all are tried
        self.tries = 0  # passes of all since then

    @property
    def size(self) -> int:
        """For the next pass."""
        return 1 if self.left or self.most == 1 else self.most

    def took(self, size: int, seconds: float) -> None:
        if size == 1:
            self.alone, self.left = [*self.alone[1 - TRIES :], seconds], self.left - 1
            return
        usual, self.tries = median(self.alone), self.tries + 1
        if seconds > HOPELESS * usual or (self.tries <= TRIES and seconds >= usual):
            self.left, self.tries, self.patience = self.patience, 0, min(2 * self.patience, LATE)
        elif self.tries == SOON:  # they have had their time: the machine may have changed
            self.left, self.tries, self.patience = TRIES, 0, SOON
