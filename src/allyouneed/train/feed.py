"""Batches prepared in a background thread, and the place in the data they come from."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from allyouneed.data.batches.packing import Batches
from allyouneed.nn.batch import IGNORE, Batch

PROMPT = 5e-4  # seconds after which Python, asked to, lets another thread go on: ten times as often as by itself
AHEAD = {"cpu": 4, "cuda": 12}  # batches ready before they are needed: a GPU may be ten updates behind the host


class Place(NamedTuple):
    """A batch in the data: which one of which epoch. Together with the seed it says which sentences."""

    epoch: int
    batch: int


@dataclass(frozen=True)
class Update:
    """The batches of one update (`accumulate` of them, fewer at the end of an epoch) and the place after them."""

    batches: list[Batch]
    places: list[Place]
    tokens: int  # labelled target tokens of all of them, counted before they left the host
    next: Place


class Feed:
    """Iterate over updates from a place on, without end. Close it when done."""

    def __init__(self, data: Batches, start: Place, accumulate: int, device: torch.device) -> None:
        self._data, self._accumulate, self._device = data, accumulate, device
        self._queue: queue.Queue[Update | BaseException] = queue.Queue(max(2, AHEAD[device.type] // accumulate))
        self._closed = threading.Event()
        self._before = sys.getswitchinterval()
        sys.setswitchinterval(PROMPT)  # whoever launches an update must not wait for whoever makes a batch
        self._thread = threading.Thread(target=self._fill, args=(start,), name="feed", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Update]:
        return self

    def __next__(self) -> Update:
        got = self._queue.get()
        if isinstance(got, BaseException):
            raise got
        return replace(got, batches=[batch.to(self._device) for batch in got.batches])

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        sys.setswitchinterval(self._before)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _fill(self, start: Place) -> None:
        try:
            for update in updates(self._data, start, self._accumulate):
                if self._device.type == "cuda":
                    update = replace(update, batches=[_pinned(batch) for batch in update.batches])
                if not self._put(update):
                    return
        except BaseException as error:
            self._put(error)

    def _put(self, item: Update | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False


def updates(data: Batches, start: Place, accumulate: int) -> Iterator[Update]:
    """Group the batches of each epoch by `accumulate`; an update never spans two epochs."""
    epoch, first = start
    while True:
        count = data.steps_per_epoch(epoch)
        batches: list[Batch] = []
        for number, batch in enumerate(data.batches(epoch, first), start=first):
            batches.append(batch)
            if len(batches) == accumulate or number + 1 == count:
                places = [Place(epoch, n) for n in range(number + 1 - len(batches), number + 1)]
                after = Place(epoch, number + 1) if number + 1 < count else Place(epoch + 1, 0)
                yield Update(batches, places, sum(map(labelled, batches)), after)
                batches = []
        epoch, first = epoch + 1, 0


def labelled(batch: Batch) -> int:
    assert batch.labels is not None
    return int((batch.labels != IGNORE).sum())


def _pinned(batch: Batch) -> Batch:
    """In memory the GPU can fetch from while the host goes on."""
    return batch.each(lambda tensor: tensor.pin_memory())
