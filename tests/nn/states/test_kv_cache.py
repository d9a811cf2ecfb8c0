"""A KV cache whose rows join, leave and move has the values of one that is copied every time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from allyouneed.nn.states.kv_cache import KVCache

Rows = list[tuple[Tensor, Tensor]]  # keys and values (heads, time, head_width) of each row


def fill(cache: KVCache, rows: Rows, capacity: int) -> None:
    """As the CPU interpreter writes it: short rows end with zeros."""
    cache.end = max(keys.shape[1] for keys, _ in rows)
    widths = [part.shape[2] for part in rows[0]]
    cache.keys, cache.values = (torch.zeros(len(rows), 2, max(cache.end, capacity), width) for width in widths)
    for row, (keys, values) in enumerate(rows):
        cache.keys[row, :, : keys.shape[1]], cache.values[row, :, : keys.shape[1]] = keys, values


def random_rows(count: int, generator: torch.Generator, width: int = 3) -> Rows:
    """Keys of width 3, values of `width`."""
    times = torch.randint(1, 6, (count,), generator=generator).tolist()
    sizes = [((2, time, 3), (2, time, width)) for time in times]
    draw = partial(torch.randn, generator=generator)
    return [(draw(keys), draw(values)) for keys, values in sizes]


def check(cache: KVCache, rows: Rows) -> None:
    assert cache.keys is not None and cache.values is not None and len(cache.keys) == len(rows)
    for row, expected in enumerate(rows):
        for stored, part in zip((cache.keys[row], cache.values[row]), expected, strict=True):
            assert torch.equal(stored[:, : part.shape[1]], part)
            assert not stored[:, part.shape[1] :].any()  # of others that were here before


@given(st.data(), st.integers(0, 1000))
def test_rows_join_leave_and_move(data: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    width = data.draw(st.sampled_from([3, 5]))
    cache, rows = KVCache(), random_rows(data.draw(st.integers(1, 4)), generator, width)
    fill(cache, rows, data.draw(st.integers(0, 8)))
    copies: list[tuple[KVCache, Rows]] = []
    for _ in range(data.draw(st.integers(1, 8))):
        match data.draw(st.sampled_from(["join", "join", "select", "select", "copy"])):
            case "join":
                new = random_rows(data.draw(st.integers(1, 4)), generator, width)
                other = KVCache()
                fill(other, new, data.draw(st.integers(0, 8)))
                cache.join(other)
                rows = rows + new
            case "select":
                order = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=2 * len(rows)))
                cache.select(torch.tensor(order))
                rows = [rows[row] for row in order]
            case "copy":
                copies.append((cache.copy(), rows))
        check(cache, rows)
    for copy, known in copies:
        check(copy, known)


def test_joining_a_row_does_not_copy_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    cache = KVCache()
    fill(cache, random_rows(4, generator), 8)
    places = set()
    for _ in range(4):
        other = KVCache()
        fill(other, random_rows(1, generator), 8)
        cache.join(other)
        assert cache.keys is not None
        places.add(cache.keys.data_ptr())
    assert len(places) == 1
