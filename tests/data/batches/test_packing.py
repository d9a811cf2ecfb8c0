"""Packed rows hold every sentence once and whole, and a resumed run sees what an unbroken one would have seen."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allyouneed.data.batches.packing import Batches, PackedBatches, PaddedBatches, pack
from allyouneed.data.batches.store import Column, Store
from allyouneed.data.files.filters import Filters
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies, train
from allyouneed.errors import UserError
from allyouneed.nn.batch import IGNORE, Batch
from allyouneed.tasks.translation.translation import PairItems, pair_encoding

LIMIT = 12


@cache
def vocabularies() -> Vocabularies:
    """Two different tokenizers, so that a special token of the wrong side is noticed."""
    source = train(TokenizerConfig(vocab=259), ["a"])
    target = train(TokenizerConfig(vocab=270, specials=("<x>",)), ["b"])
    source.pad, source.bos, source.eos = 7, 8, 9
    return Vocabularies(source, target)


class MemoryStore(Store):
    """A store in memory: each token id of a sentence encodes its number, side and position."""

    def __init__(self, lengths: list[tuple[int, int]]) -> None:
        self.folder, self.spec = Path("memory"), pair_encoding(vocabularies(), LIMIT).spec
        sides = []
        for side in (0, 1):
            sizes = np.array([pair[side] for pair in lengths], dtype=np.int32)
            offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
            ids = [1000 * (n + 1) + 100 * side + place for n, size in enumerate(sizes) for place in range(size)]
            sides.append(Column(np.array(ids, dtype=np.uint32), offsets, sizes))
        self.columns = {"source": sides[0], "target": sides[1]}


def packed(store: Store, seed: int = 0) -> PackedBatches:
    return PackedBatches(PairItems(store, vocabularies()), (LIMIT + 1, LIMIT + 5), rows=3, seed=seed)


def padded(store: Store, seed: int | None = 0) -> PaddedBatches:
    return PaddedBatches(PairItems(store, vocabularies()), budget=40, seed=seed)


BOTH = pytest.mark.parametrize("make", [packed, padded])
lengths_of_pairs = st.lists(st.tuples(st.integers(0, LIMIT - 1), st.integers(0, LIMIT - 1)), min_size=1, max_size=60)


def sentences(batch: Batch) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Source, target input and labels of each sentence of a batch, by its lengths or segments."""
    assert batch.source is not None and batch.labels is not None
    for row in range(len(batch.target.tokens)):
        if batch.target.lengths is not None:
            assert batch.source.lengths is not None
            s, t = int(batch.source.lengths[row]), int(batch.target.lengths[row])
            parts = [(torch.arange(s), torch.arange(t))]
        else:
            assert batch.source.segments is not None and batch.target.segments is not None
            count = int(batch.target.segments[row].max())
            assert int(batch.source.segments[row].max()) == count
            parts = [
                (
                    (batch.source.segments[row] == n).nonzero().flatten(),
                    (batch.target.segments[row] == n).nonzero().flatten(),
                )
                for n in range(1, count + 1)
            ]
        for source, target in parts:
            yield (
                batch.source.tokens[row, source].tolist(),
                batch.target.tokens[row, target].tolist(),
                batch.labels[row, target].tolist(),
            )


@BOTH
@given(lengths=lengths_of_pairs, epoch=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_an_epoch_is_every_sentence_once_with_its_marks(
    make: Callable[[Store], Batches], lengths: list[tuple[int, int]], epoch: int
) -> None:
    store, both = MemoryStore(lengths), vocabularies()
    found = [parts for batch in make(store).batches(epoch) for parts in sentences(batch)]
    expected = [
        (
            [*store["source"][n].tolist(), both.source.eos],
            [both.target.bos, *store["target"][n].tolist()],
            [*store["target"][n].tolist(), both.target.eos],
        )
        for n in range(len(store))
    ]
    assert sorted(found) == sorted(expected)


@given(lengths=lengths_of_pairs)
@settings(max_examples=60, deadline=None)
def test_packed_rows_have_static_shapes_and_restarting_positions(lengths: list[tuple[int, int]]) -> None:
    for batch in packed(MemoryStore(lengths)).batches(0):
        assert batch.source is not None and batch.labels is not None
        assert batch.source.tokens.shape == (3, LIMIT + 1) and batch.target.tokens.shape == (3, LIMIT + 5)
        assert batch.labels.shape == batch.target.tokens.shape
        for side, pad in ((batch.source, 7), (batch.target, 0)):
            assert side.segments is not None and side.positions is not None and side.lengths is None
            assert {t.dtype for t in (side.tokens, side.segments, side.positions, batch.labels)} == {torch.int64}
            assert (side.tokens[side.segments == 0] == pad).all()
            for segments, positions in zip(side.segments.tolist(), side.positions.tolist(), strict=True):
                used = [n for n in segments if n]
                assert segments == used + [0] * (len(segments) - len(used)), "padding only at the end of a row"
                assert used == sorted(used) and set(used) == set(range(1, max(used, default=0) + 1))
                place = 0
                for before, (segment, position) in zip(
                    [0, *segments], zip(segments, positions, strict=True), strict=False
                ):
                    place = place + 1 if segment == before and segment else 0
                    assert position == place
        assert ((batch.labels == IGNORE) == (batch.target.segments == 0)).all()


@given(lengths=lengths_of_pairs)
@settings(max_examples=60, deadline=None)
def test_padded_batches_stay_within_their_budget(lengths: list[tuple[int, int]]) -> None:
    for batch in padded(MemoryStore(lengths)).batches(0):
        assert batch.source is not None and batch.labels is not None and batch.target.lengths is not None
        assert max(batch.source.tokens.numel(), batch.target.tokens.numel()) <= 40
        beyond = torch.arange(batch.labels.shape[1]) >= batch.target.lengths[:, None]
        assert ((batch.labels == IGNORE) == beyond).all() and (batch.target.tokens[beyond] == 0).all()


@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), max_size=200),
    rows=st.tuples(st.integers(20, 50), st.integers(20, 50)),
    pool=st.integers(1, 5),
    rng=st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_packing_respects_both_capacities_and_uses_each_sentence_once(
    lengths: list[tuple[int, int]], rows: tuple[int, int], pool: int, rng: object
) -> None:
    order = list(range(len(lengths)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    source, target = (np.array([pair[side] for pair in lengths], dtype=np.int64) for side in (0, 1))
    groups = pack((source, target), rows, np.array(order, dtype=np.int64), pool=pool)
    assert sorted(n for row in groups for n in row.tolist()) == list(range(len(lengths)))
    for row in groups:
        assert len(row) and source[row].sum() <= rows[0] and target[row].sum() <= rows[1]
        places = [order.index(n) for n in row.tolist()]
        assert places == sorted(places)


def test_realistic_sentences_fill_their_rows() -> None:
    rng = np.random.default_rng(0)
    source = np.clip(rng.lognormal(2.8, 0.5, 20_000), 2, 120).astype(np.int64)
    target = np.clip(source * rng.lognormal(0, 0.15, 20_000), 2, 120).astype(np.int64)
    groups = pack((source, target), (512, 512), rng.permutation(20_000))
    for lengths in (source, target):
        assert lengths.sum() > 0.95 * 512 * len(groups)  # the rest is padding


def test_a_sentence_longer_than_a_row_is_never_cut() -> None:
    with pytest.raises(ValueError, match="longer than a row"):
        pack((np.array([3]), np.array([11])), (10, 10), np.array([0]))


def same(one: Batch, other: Batch) -> bool:
    def tensors(batch: Batch) -> list[torch.Tensor | None]:
        assert batch.source is not None
        rows = (batch.source, batch.target)
        return [batch.labels, *(t for r in rows for t in (r.tokens, r.lengths, r.segments, r.positions))]

    pairs = zip(tensors(one), tensors(other), strict=True)
    return all((a is None) == (b is None) and (a is None or b is None or torch.equal(a, b)) for a, b in pairs)


@BOTH
@given(lengths=lengths_of_pairs, data=st.data())
@settings(max_examples=40, deadline=None)
def test_resuming_at_any_step_gives_the_rest_of_the_epoch(
    make: Callable[[Store], Batches], lengths: list[tuple[int, int]], data: st.DataObject
) -> None:
    store = MemoryStore(lengths)
    whole = list(make(store).batches(1))
    step = data.draw(st.integers(0, len(whole)))
    fresh = make(store)  # a new process knows nothing of the epoch before
    rest = list(fresh.batches(1, start_step=step))
    assert len(whole) == fresh.steps_per_epoch(1) and len(rest) == len(whole) - step
    assert all(same(a, b) for a, b in zip(rest, whole[step:], strict=True))


@BOTH
def test_each_epoch_and_seed_has_its_own_order(make: Callable[..., Batches]) -> None:
    store = MemoryStore([(n % 11, n % 7) for n in range(200)])
    orders = [
        tuple(n for step in range(b.steps_per_epoch(epoch)) for n in b.describe(epoch, step))
        for b in (make(store, seed=1), make(store, seed=2))
        for epoch in (0, 1, 2)
    ]
    assert len(set(orders)) == 6
    assert all(sorted(order) == list(range(200)) for order in orders)


def test_validation_comes_in_the_same_order_from_short_to_long() -> None:
    store = MemoryStore([(n % 11, n % 7) for n in range(200)])
    batches = padded(store, seed=None)
    steps = range(batches.steps_per_epoch(0))
    assert [batches.describe(0, n) for n in steps] == [batches.describe(5, n) for n in steps]
    longest = [max(int(store["target"].lengths[n]) for n in batches.describe(0, step)) for step in steps]
    assert all(a <= b for a, b in pairwise(longest))


@BOTH
def test_describe_names_the_sentences_of_a_batch(make: Callable[[Store], Batches]) -> None:
    batches = make(MemoryStore([(1 + n % 5, 1 + n % 6) for n in range(50)]))
    for step, batch in enumerate(batches.batches(2)):
        named = [source[0] // 1000 - 1 for source, _, _ in sentences(batch)]
        assert named == batches.describe(2, step)
    with pytest.raises(IndexError):
        batches.describe(2, batches.steps_per_epoch(2))


def test_batches_too_small_for_the_data_are_refused_with_what_to_do() -> None:
    items = PairItems(MemoryStore([(1, 63)]), vocabularies())
    with pytest.raises(UserError, match="cannot hold a sequence of 64"):
        PaddedBatches(items, budget=63).steps_per_epoch(0)
    with pytest.raises(UserError, match="at least one row"):
        PackedBatches(items, (64, 64), rows=0)


def test_a_store_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("a\tb\n")
    both = train(TokenizerConfig(vocab=259), ["a"])
    files = [PairFiles(path=tmp_path / "a.tsv")]
    mine = Vocabularies(both, both)
    store = Store.build(tmp_path / "s", files, Filters(), pair_encoding(mine, max_tokens=8))
    assert PackedBatches(PairItems(store, mine), (8, 8), rows=1).steps_per_epoch(0) == 1
    with pytest.raises(UserError, match="another tokenizer"):
        PairItems(store, vocabularies())
