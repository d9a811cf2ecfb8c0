"""Batches are prefetched in order and in bounded number."""

import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from allyouneed.data.batches.packing import Items
from allyouneed.data.batches.sharding import DataShard
from allyouneed.nn.batch import Batch, Rows
from allyouneed.runtime import process
from allyouneed.runtime.process import SWITCH_INTERVAL
from allyouneed.training.prefetch import QUEUE_BATCHES, DataPosition, Prefetcher
from waiting import until

CPU = torch.device("cpu")


class Counted:
    """Batches that say their number."""

    items: Items

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken

    def for_shard(self, share: DataShard) -> "Counted":
        return self

    def steps_per_epoch(self, epoch: int) -> int:
        return 5

    def describe(self, epoch: int, step: int) -> list[int]:
        return []

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        for step in range(start_step, 5):
            if step == self.broken:
                raise ValueError("broken")
            tokens = torch.tensor([[10 * epoch + step]])
            yield Batch(Rows(tokens), labels=tokens)


@pytest.mark.parametrize("accumulate, updates", [(1, QUEUE_BATCHES["cpu"]), (3, 2), (50, 2)])
def test_the_number_of_prefetched_updates_is_bounded(accumulate, updates):
    with Prefetcher(Counted(), DataPosition(0, 0), accumulate, CPU) as ahead:
        until(ahead._queue.full)
        assert ahead._queue.qsize() == updates


def test_updates_come_in_order_from_any_position():
    with Prefetcher(Counted(), DataPosition(1, 3), 2, CPU) as updates:
        found = [next(updates) for _ in range(4)]
    numbers = [[int(batch.rows.tokens) for batch in update.batches] for update in found]
    assert numbers == [[13, 14], [20, 21], [22, 23], [24]]
    assert [update.next for update in found] == [
        DataPosition(2, 0),
        DataPosition(2, 2),
        DataPosition(2, 4),
        DataPosition(3, 0),
    ]


def test_the_switch_interval_is_short_while_prefetching(monkeypatch: pytest.MonkeyPatch):
    before = sys.getswitchinterval()
    monkeypatch.setattr(process, "_switch_users", 0)  # a server of another test may use it
    monkeypatch.setattr(process, "_switch_interval", 0.0)
    sys.setswitchinterval(0.004)
    try:
        with Prefetcher(Counted(), DataPosition(0, 0), 1, CPU):
            assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL)
        assert sys.getswitchinterval() == pytest.approx(0.004)
    finally:
        sys.setswitchinterval(before)


def test_an_error_in_the_thread_is_raised_by_the_iterator():
    with Prefetcher(Counted(broken=2), DataPosition(0, 0), 1, CPU) as updates:
        next(updates), next(updates)
        with pytest.raises(ValueError, match="broken"):
            next(updates)
    assert not any(thread.name == "feed" for thread in threading.enumerate())
