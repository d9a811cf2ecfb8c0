"""What BART reads is a corrupted text, and what it writes is the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import allyouneed as ayn
from allyouneed.config import ConfigError, parse
from allyouneed.errors import UserError
from allyouneed.tasks.language.denoising import infilled, permuted
from allyouneed.tasks.task import Task
from allyouneed.training.prepare import RunFolder, prepare
from allyouneed.training.reporting.progress import Reporter
from toy_texts import Listener, recipe

MASK = 99


@given(st.integers(1, 40), st.data())
def test_infilling_replaces_spans_by_one_mask_each(length: int, data: st.DataObject) -> None:
    removed = data.draw(st.integers(0, length))
    spans = data.draw(st.integers(min(1, removed), removed))
    ids = np.arange(length)
    found = infilled(ids, removed, spans, MASK, np.random.default_rng(data.draw(st.integers(0, 99)))).tolist()
    assert len(found) == length - removed + spans and found.count(MASK) == spans
    kept = [number for number in found if number != MASK]
    assert kept == sorted(kept) and set(kept) <= set(range(length))  # in order, and nothing is added
    if spans <= length - removed + 1:
        assert all(pair != (MASK, MASK) for pair in pairwise(found))


def test_the_lengths_of_spans_are_poissons() -> None:
    """Given their sum: the variance of a multinomial, and empty spans."""
    rng, sizes = np.random.default_rng(0), list[int]()
    for _ in range(2000):
        found = infilled(np.arange(40), 12, 4, MASK, rng).tolist()
        kept = [-1, *found, 40]
        for number, token in enumerate(kept):
            if token == MASK:
                sizes.append(kept[number + 1] - kept[number - 1] - 1)
    assert np.mean(sizes) == pytest.approx(3) and np.var(sizes) == pytest.approx(12 * 0.25 * 0.75, rel=0.05)
    assert 0 in sizes


def test_sentences_are_put_in_random_order() -> None:
    ids, ends = np.arange(9), np.isin(np.arange(9), [2, 3, 6])
    seen = {tuple(permuted(ids, ends, np.random.default_rng(seed)).tolist()) for seed in range(50)}
    assert len(seen) > 10 and all(sorted(one) == ids.tolist() for one in seen)
    assert {one[one.index(0) : one.index(0) + 3] for one in seen} == {(0, 1, 2)}


@pytest.mark.parametrize(
    "task",
    [{}, {"delete": 0.2, "mask": 0.1}, {"infill": 0.0, "permute": False, "mask": 0.3}, {"infill": 0.0, "delete": 0.4}],
)
def test_the_target_is_the_text_and_the_source_has_its_announced_length(
    task: dict[str, Any], texts: Path, tmp_path: Path
) -> None:
    made = recipe(tmp_path, texts, "denoising", task={"kind": "denoising"} | task)
    data = prepare(made, RunFolder(tmp_path / "run"), Reporter(Listener().console))
    items: Any = data.train.items
    tokenizer, members = data.vocabularies.target, np.arange(len(items))
    batches = [items.collate(epoch, members) for epoch in (0, 1, 1)]
    sources = [batch.sides[0].tokens for batch in batches]
    lengths = items.lengths(0)[0]
    assert len(sources[0]) == lengths.sum() == len(sources[1])
    assert (sources[1] == sources[2]).all() and (sources[0] != sources[1]).any()
    assert (batches[0].labels == batches[1].labels).all()
    begins = np.cumsum(lengths) - lengths
    for number in range(0, len(items), 17):
        text = items.pieces.tokens(items.store["text"], number)
        source = sources[0][begins[number] : begins[number] + lengths[number] - 1]
        left = Counter(source[source != tokenizer.mask].tolist())
        assert left <= Counter(text.tolist())
        masks = int((source == tokenizer.mask).sum())
        assert masks == items.spans[number] + round(len(text) * made.task.mask)  # type: ignore[attr-defined]
        removed = int(items.removed[number] + items.deleted[number]) + round(len(text) * made.task.mask)  # type: ignore[attr-defined]
        assert left.total() >= len(text) - removed


def test_impossible_noise_is_refused() -> None:
    for keys, said in (
        ({"infill": 0.5, "delete": 0.5}, "must leave some of the text"),
        ({"infill": 0, "permute": False}, "nothing is corrupted"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse(Task, {"kind": "denoising"} | keys, "task")  # type: ignore[type-abstract]


def test_a_denoiser_fills_gaps_and_is_where_a_summariser_starts(
    trained: Callable[[str], tuple[Path, str]], texts: Path, tmp_path: Path
) -> None:
    folder = trained("denoising")[0] / "model"
    model = ayn.load(folder)
    assert isinstance(model.fill("the cat <mask> the sea.", max_length=20), str)
    with pytest.raises(UserError, match="contains no <mask>"):
        model.fill("the cat")
    made = recipe(tmp_path, texts, "summarisation", start=str(folder))
    data = prepare(made, RunFolder(tmp_path / "run"), Reporter(Listener().console))
    assert data.vocabularies.target.hash == model.tokenizer.hash
