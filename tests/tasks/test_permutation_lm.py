"""One token in six is a target, in random order and in runs of neighbours, as XLNet's authors draw them."""

import numpy as np
import pytest

from allyouneed.config import ConfigError
from allyouneed.data.batches.packing import generator
from allyouneed.data.files.texts import TextDocument
from allyouneed.nn.batch import IGNORE
from allyouneed.tasks.language.permutation_lm import PermutationLM, draw_runs
from memory_store import MemoryStore, vocabularies
from toy_texts import ENCODER, PERMUTED

LONG = "the cat sees tomorrow's wonderful moon, 猫看见明天的月亮。 " * 30


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 12, 100, 503])
@pytest.mark.parametrize("one_in", [2, 6])
def test_the_number_of_targets_without_repetition(count: int, one_in: int) -> None:
    told = max(1, count // one_in)
    for number in range(50):
        places = draw_runs(count, told, one_in, 5, generator(1, number))
        assert len(places) == told and (np.diff(places) > 0).all()
        assert places.min() >= 0 and places.max() < count


def test_targets_are_uniform() -> None:
    times = np.zeros(60)
    for number in range(6000):
        times[draw_runs(60, 10, 6, 5, generator(2, number))] += 1
    assert times.sum() == 60_000 and times[6:-6].min() > 500 and times.max() < 1500
    singles = np.concatenate([draw_runs(60, 10, 6, 1, generator(3, number)) for number in range(2000)])
    assert abs(np.bincount(singles) / 2000 - 1 / 6).max() < 0.04


def test_runs_are_at_most_the_given_length() -> None:
    found = set()
    for number in range(200):
        places = draw_runs(600, 100, 6, 3, generator(4, number))
        cuts = np.flatnonzero(np.diff(places) > 1)
        found |= set(np.diff(np.concatenate([[-1], cuts, [len(places) - 1]])).tolist())
    assert {1, 2, 3} <= found and max(found) <= 6, "two runs may meet, three may not"


def test_queries_follow_the_text_at_the_positions_of_their_targets() -> None:
    task, tokenizer = PermutationLM(), vocabularies().target
    texts = [LONG, "a moon"]
    store = MemoryStore(task.encoding(vocabularies(), [], None), [TextDocument(t, "a", n) for n, t in enumerate(texts)])
    items = task.items(store, vocabularies(), (32,), seed=1)
    (lengths,) = items.lengths(0)
    assert lengths.max() <= 32 and lengths.max() > 26
    seen = []
    for epoch in range(2):
        filled = items.collate(epoch, np.arange(len(items)))
        (side,) = filled.sides
        assert filled.labels is not None and len(side.tokens) == lengths.sum()
        begin, kept = 0, []
        for length in lengths.tolist():
            span = slice(begin, begin + length)
            tokens, labels, begin = side.tokens[span], filled.labels[span], begin + length
            order, positions = side.features["order"][span], side.features["positions"][span]
            size = int((order >= 0).sum())
            assert tokens[0] == tokenizer.bos and tokens[size - 1] == tokenizer.eos
            assert (positions[:size] == np.arange(size)).all() and (labels[:size] == IGNORE).all()
            assert (tokens[size:] == tokenizer.pad).all() and (labels[size:] == tokens[positions[size:]]).all()
            assert (-1 - order[size:] == order[positions[size:]]).all()
            assert sorted((-1 - order[size:]).tolist()) == list(range(1, length - size + 1))
            assert ((order[:size] > 0).sum()) == length - size == max(1, (size - 2) // 6)
            kept += tokens[1 : size - 1].tolist()
        assert kept == [number for text in texts for number in tokenizer.encode(text)]
        again = items.collate(epoch, np.arange(len(items))).sides[0]
        assert (again.features["order"] == side.features["order"]).all()
        seen.append(side.features["order"])
    assert (seen[0] != seen[1]).any(), "drawn anew in each epoch"


def test_models_without_queries_or_permuted_pattern_are_rejected() -> None:
    task = PermutationLM()
    assert task.head(PERMUTED, None) is None
    with pytest.raises(
        ConfigError, match=r"(?s)embed.asks: .*set embed.asks: true.*encoder\[0\].mixer.pattern: .*permuted"
    ):
        task.head(ENCODER, None)
