"""Paged KV cache: the same numbers as a contiguous one, shared prefixes stored once, every block freed."""

from random import Random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from allyouneed.nn.batch import Rows
from allyouneed.nn.states.paged import BlockPool, PagedKVCache, PagedStates, PoolFullError
from any_part import CASES, VOCAB, case
from property_tests import explicit

GROWS = [n for n in CASES if n.startswith(("mixer", "cross")) and not n.startswith(("mixer rwkv", "mixer retention"))]
SOME = [n if number % 3 == 0 else pytest.param(n, marks=pytest.mark.slow) for number, n in enumerate(GROWS)]


def start(model, sources, pool):
    with torch.no_grad():
        states = model.start(Rows.of(sources))
    return states if pool is None else PagedStates(states, pool)


def step(model, states, chunks):
    with torch.no_grad():
        found = model.head(model.advance(Rows.of(chunks), states))
    return [found[row, : len(chunk)] for row, chunk in enumerate(chunks)]


@pytest.mark.parametrize("name", SOME)
@explicit(thorough=4)
@example(Random(0))  # three rows, blocks of two tokens
@given(st.randoms(use_true_random=False))
def test_the_same_numbers_as_a_contiguous_cache(name, dice):
    model, count = case(name), dice.choice([1, 3, 2])
    pool = BlockPool(400, size=dice.choice([1, 2, 3, 5]))
    sources = [[dice.randrange(1, VOCAB) for _ in range(dice.randrange(1, 6))] for _ in range(count)]
    both = [start(model, sources, None), start(model, sources, pool)]
    for turn in range(6):
        rows = len(both[0].lengths)
        chunks = [[dice.randrange(1, VOCAB) for _ in range(dice.randrange(1, 4))] for _ in range(rows)]
        for found, expected in zip(*(step(model, states, chunks) for states in both), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
        if turn == 1:
            for states in both:
                states.repeat_rows(2)
        elif turn == 2:
            group = [g * 2 + dice.randrange(2) for g in range(len(both[0].lengths) // 2) for _ in range(2)]
            for states in both:
                states.select(group)
        elif turn == 3:
            more = [[dice.randrange(1, VOCAB)] * 2] * 1
            new = [start(model, more, None), start(model, more, pool)]
            for states, others in zip(both, new, strict=True):
                step(model, others, [[1, 2]])
                others.repeat_rows(2)
                states.join(others)
    picked = both[1].copy_rows([2, 3])
    both[1].close()
    picked.close()
    assert pool.used == 0 and not any(pool.ref_counts)


def paged(count, pool):
    model = case("mixer attention heads=3 pattern=causal")
    states = start(model, [[3]] * count, pool)
    assert all(isinstance(layer["mixer"], PagedKVCache) for layer in states.layers)
    return model, states


def test_a_shared_prefix_is_stored_once_and_copied_on_write():
    pool = BlockPool(20, size=4)
    model, states = paged(1, pool)
    step(model, states, [[1, 2, 3, 4, 5, 6]])
    assert pool.used == 2
    states.repeat_rows(4)
    assert pool.used == 2, "four rows share one prefix"
    step(model, states, [[1], [2], [3], [4]])
    assert pool.used == 1 + 4, "the full block is shared, the last one is copied for each row"
    states.select([2, 2, 2, 2])
    assert pool.used == 2
    states.close()
    assert pool.used == 0


def test_a_full_pool_raises_and_changes_nothing():
    pool = BlockPool(3, size=2)
    model, states = paged(2, pool)
    step(model, states, [[1, 2], [3, 4]])
    with pytest.raises(PoolFullError, match="2 blocks requested, 1 of 3 are free"):
        step(model, states, [[5], [6]])
    assert states.lengths == [2, 2] and pool.used == 2
    first = states.copy_rows([0])
    states.close()
    (found,) = step(model, first, [[5]])
    reference = start(model, [[3]], None)
    step(model, reference, [[1, 2]])
    torch.testing.assert_close(found, step(model, reference, [[5]])[0], atol=1e-9, rtol=0)


def test_trimming_frees_blocks():
    pool = BlockPool(9, size=2)
    model, states = paged(1, pool)
    step(model, states, [[1, 2, 3, 4, 5]])
    states.trim(2)
    assert pool.used == 1
    states.close()
    assert len(pool.free) == 9
