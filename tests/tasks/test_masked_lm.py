"""Masking as BERT's authors define it: 15 % are chosen; 80 % of them masked, 10 % replaced, 10 % unchanged."""

import numpy as np
import pytest

from allyouneed.data.batches.packing import generator
from allyouneed.data.files.texts import TextDocument
from allyouneed.data.tokenizers.base import MASK
from allyouneed.nn.batch import IGNORE
from allyouneed.tasks.language.masked_lm import MaskedLM, apply_mask, choose_masked
from memory_store import MemoryStore, vocabularies

LONG = "the cat sees tomorrow's wonderful moon, 猫看见明天的月亮。 " * 30


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 100, 503])
def test_the_share_is_exact(count: int) -> None:
    chosen = choose_masked(count, None, 0.15, generator(1, 2, 3))
    assert chosen.sum() == max(1, int(0.15 * count + 0.5))


def test_every_token_is_chosen_as_often_as_any_other() -> None:
    times = sum(choose_masked(20, None, 0.15, generator(1, n)).astype(int) for n in range(4000))
    assert times.sum() == 4000 * 3 and abs(times / 4000 - 0.15).max() < 0.025


def test_chosen_tokens_are_masked_replaced_or_kept_80_10_10() -> None:
    ids, replacements = np.full(100_000, 5), np.arange(10, 20)
    chosen = choose_masked(len(ids), None, 0.15, generator(1))
    found = apply_mask(ids, chosen, 3, replacements, generator(2))
    assert (found[~chosen] == 5).all()
    picked = found[chosen]
    assert abs((picked == 3).mean() - 0.8) < 0.01
    assert abs(np.isin(picked, replacements).mean() - 0.1) < 0.01
    assert abs((picked == 5).mean() - 0.1) < 0.01
    drawn = picked[np.isin(picked, replacements)]
    assert set(drawn.tolist()) == set(replacements.tolist()) and np.bincount(drawn)[10:].min() > 0.7 * len(drawn) / 10


def test_whole_words_are_chosen_within_the_share() -> None:
    starts = np.array([1, 0, 0, 1, 1, 0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1])
    words = np.cumsum(starts)
    for number in range(300):
        chosen = choose_masked(len(starts), starts, 0.15, generator(9, number))
        assert 1 <= chosen.sum() <= 3
        for word in set(words[chosen].tolist()):
            assert chosen[words == word].all()
    assert choose_masked(4, np.array([1, 0, 0, 0]), 0.15, generator(1)).all(), "one, where every word is too long"
    assert choose_masked(3, np.array([0, 0, 1]), 0.5, generator(1)).sum() <= 2, "a piece may begin inside a word"


def test_word_boundaries() -> None:
    tokenizer = vocabularies().target
    text = "She sees unwonderfulness (12) 猫看见龘 zz"
    pieces = tokenizer.tokens(tokenizer.encode(text))
    starts = tokenizer.word_starts(text)
    assert len(pieces) == len(starts)
    words: list[str] = []
    for piece, start in zip(pieces, starts, strict=True):
        words = [*words, piece] if start else [*words[:-1], words[-1] + piece]
    assert words[:3] == ["She", " sees", " unwonderfulness"]
    assert {"1", "2"} <= set(words) and words[-1] == " zz"
    east = [word for word in words if word[0] in "猫看见<"]
    assert len(east) >= 2 and east[-1] == "<E9><BE><98>", "a character of several tokens is one word"


@pytest.mark.parametrize("whole_word", [False, True])
def test_pieces_have_special_tokens_and_labels_are_the_original_tokens(whole_word: bool) -> None:
    task, tokenizer = MaskedLM(whole_word=whole_word), vocabularies().target
    texts = [LONG, "a moon"]
    store = MemoryStore(task.encoding(vocabularies(), [], None), [TextDocument(t, "a", n) for n, t in enumerate(texts)])
    items = task.items(store, vocabularies(), (32,), seed=1)
    mask = tokenizer.special(MASK)
    kept: list[list[int]] = []
    hidden = []
    for epoch in range(2):
        filled = items.collate(epoch, np.arange(len(items)))
        again = items.collate(epoch, np.arange(len(items))[::-1])
        assert filled.labels is not None and again.labels is not None
        begin = 0
        for number, length in enumerate(items.lengths(epoch)[0].tolist()):
            tokens = filled.sides[0].tokens[begin : begin + length]
            labels = filled.labels[begin : begin + length]
            assert tokens[0] == tokenizer.bos and tokens[-1] == tokenizer.eos and length <= 32
            assert labels[0] == labels[-1] == IGNORE
            assert not (tokens[labels == IGNORE] == mask).any()
            original = np.where(labels == IGNORE, tokens, labels)[1:-1].tolist()
            if epoch == 0:
                kept.append(original)
            assert original == kept[number]
            begin += length
        hidden.append(filled.sides[0].tokens == mask)
        assert sorted(again.sides[0].tokens.tolist()) == sorted(filled.sides[0].tokens.tolist()), "order is no matter"
    assert (hidden[0] != hidden[1]).any(), "other tokens in another epoch"
    assert tokenizer.decode([n for piece in kept for n in piece]) == "".join(texts)
