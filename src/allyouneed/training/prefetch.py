"""Batches prepared in a background thread, and their position in the data."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from allyouneed.data.batches.packing import Batches
from allyouneed.nn.batch import Batch
from allyouneed.nn.batch import count_labels as label_count
from allyouneed.runtime.process import short_switch_interval

QUEUE_BATCHES = {"cpu": 4, "cuda": 12}  # batches prepared ahead: a GPU may be ten updates behind the host


class DataPosition(NamedTuple):
    """Epoch and batch index. Together with the seed they determine the batch."""

    epoch: int
    batch: int


@dataclass(frozen=True)
class Update:
    """The batches of one update (`accumulate`, fewer at the end of an epoch) and the position after them."""

    batches: list[Batch]
    positions: list[DataPosition]
    tokens: int  # labels in all batches, counted on the host
    next: DataPosition


class Prefetcher:
    """Infinite iterator over updates from a position on. Close it when done."""

    def __init__(self, data: Batches, start: DataPosition, accumulate: int, device: torch.device) -> None:
        self._data, self._accumulate, self._device = data, accumulate, device
        self._queue: queue.Queue[Update | BaseException] = queue.Queue(max(2, QUEUE_BATCHES[device.type] // accumulate))
        self._closed = threading.Event()
        self._switching = short_switch_interval()
        self._switching.__enter__()
        self._thread = threading.Thread(target=self._fill, args=(start,), name="prefetch", daemon=True)
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
        self._switching.__exit__(None, None, None)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _fill(self, start: DataPosition) -> None:
        try:
            for update in updates(self._data, start, self._accumulate):
                if self._device.type == "cuda":
                    update = replace(update, batches=[_pin(batch) for batch in update.batches])
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


def updates(data: Batches, start: DataPosition, accumulate: int) -> Iterator[Update]:
    """Group the batches of each epoch by `accumulate`; an update never spans two epochs."""
    epoch, first = start
    while True:
        count = data.steps_per_epoch(epoch)
        batches: list[Batch] = []
        for number, batch in enumerate(data.batches(epoch, first), start=first):
            batches.append(batch)
            if len(batches) == accumulate or number + 1 == count:
                positions = [DataPosition(epoch, n) for n in range(number + 1 - len(batches), number + 1)]
                after = DataPosition(epoch, number + 1) if number + 1 < count else DataPosition(epoch + 1, 0)
                yield Update(batches, positions, sum(map(count_labels, batches)), after)
                batches = []
        epoch, first = epoch + 1, 0


def count_labels(batch: Batch) -> int:
    assert batch.labels is not None
    return int(label_count(batch.labels))


def _pin(batch: Batch) -> Batch:
    """The batch in page-locked memory, so that copies to the GPU are asynchronous."""
    return batch.each(lambda tensor: tensor.pin_memory())
