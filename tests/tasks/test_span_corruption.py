"""Span corruption as T5's authors define it."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allyouneed.data.batches.packing import generator
from allyouneed.data.files.texts import TextDocument
from allyouneed.errors import UserError
from allyouneed.tasks.language.span_corruption import SpanCorruption, corrupt, noise_sizes, noise_spans
from memory_store import MemoryStore, vocabularies


def restored(source: list[int], target: list[int], marks: list[int]) -> list[int]:
    """The text again: each mark of the source replaced by what follows it in the target."""
    told: dict[int, list[int]] = {}
    for token in target:
        if token in marks:
            told[token] = []
        else:
            told[list(told)[-1]].append(token)
    return [n for token in source for n in (told[token] if token in marks else [token])]


@given(st.integers(1, 200), st.floats(0.05, 0.45), st.floats(1, 10), st.integers(0, 10**6))
def test_corrupted_text_can_be_reconstructed(tokens: int, density: float, span: float, seed: int) -> None:
    noise, spans = noise_sizes(tokens, density, span)
    places = noise_spans(tokens, noise, spans, generator(seed))
    assert sum(right - left for left, right in places) == noise and len(places) == spans
    assert all(left < right for left, right in places)
    assert all(before[1] <= after[0] for before, after in pairwise(places))
    ids, marks = list(range(1000, 1000 + tokens)), list(range(spans))
    source, target = corrupt(ids, places, marks)
    assert restored(source, target, marks) == ids
    assert len(source) == tokens - noise + spans and len(target) == noise + spans
    assert [t for t in source if t in marks] == [t for t in target if t in marks] == marks


def test_the_sizes_are_those_of_the_authors_code() -> None:
    """random_spans_noise_mask for T5's own 568 tokens: 512 remain on the source side, 114 on the target side."""
    noise, spans = noise_sizes(568, 0.15, 3.0)
    assert (noise, spans) == (85, 28)
    assert 568 - noise + spans + 1 == 512 and noise + spans + 1 == 114


def test_spans_are_uniform_and_kept_tokens_come_first() -> None:
    times = np.zeros(30)
    for seed in range(3000):
        for left, right in noise_spans(30, 6, 2, generator(seed)):
            times[left:right] += 1
    assert times[0] == 0 and times[-1] == 3000, "kept and cut take turns, kept first: the last token is always cut"
    assert times[1:24].min() > 0


def test_sides_fit_their_rows_and_no_token_is_lost() -> None:
    task, tokenizer = SpanCorruption(sentinels=8), vocabularies().target
    texts = ["the cat sees tomorrow's moon, 猫看见明天的月亮。 " * 12, "a", "a moon"]
    store = MemoryStore(task.encoding(vocabularies(), [], None), [TextDocument(t, "a", n) for n, t in enumerate(texts)])
    items = task.items(store, vocabularies(), (40, 24), seed=1)
    source, target = items.lengths(0)
    assert source.max() <= 40 and target.max() <= 24 and source.max() > 30
    marks = [tokenizer.special(name) for name in task.specials()]
    whole: list[int] = []
    for number in range(len(items)):
        filled = items.collate(5, np.array([number]))
        heard, said = (side.tokens.tolist() for side in filled.sides)
        assert filled.labels is not None
        labels = filled.labels.tolist()
        assert heard[-1] == tokenizer.eos and said[0] == tokenizer.bos and labels == [*said[1:], tokenizer.eos]
        assert (len(heard), len(said)) == (source[number], target[number])
        whole += restored(heard[:-1], said[1:], marks)
    assert tokenizer.decode(whole) == "".join(texts)


def test_rows_too_short_for_any_span_are_refused() -> None:
    store = MemoryStore(SpanCorruption().encoding(vocabularies(), [], None), [TextDocument("a moon", "a", 1)])
    with pytest.raises(UserError, match="too short for span corruption"):
        SpanCorruption(sentinels=8).items(store, vocabularies(), (1, 1), 1)
