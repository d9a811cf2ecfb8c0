"""BPE-dropout: the merges of the tokenizer, some of them left out."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from allyouneed.config import parse
from allyouneed.data.batches.encoding import TextEncoding
from allyouneed.data.batches.store import Store
from allyouneed.data.files.filters import Filters
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.files.readers import Report
from allyouneed.data.tokenizers.base import Tokenizer, TokenizerConfig, train
from allyouneed.data.tokenizers.bpe_dropout import BPEDropout
from allyouneed.errors import UserError
from allyouneed.training import Recipe

TEXTS = ["the lower newest widest lowest 机器学习很有趣, and the widest newer one"] * 4 + ["lowering and newering"] * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(TokenizerConfig(vocab=330), TEXTS)


def test_without_dropout_the_merges_are_those_of_the_tokenizer(tokenizer: Tokenizer) -> None:
    plain = BPEDropout(tokenizer._inner, 0.0)
    for text in [*TEXTS, "Unknown wörds, 新词 and 123 numbers"]:
        assert plain.encode(text, 1) == tokenizer.encode(text)


def test_segmentations_differ_and_decode_to_the_same_text(tokenizer: Tokenizer) -> None:
    dropout = tokenizer.bpe_dropout(0.3)
    found = [dropout.encode(TEXTS[0], number) for number in range(6)]
    assert len({tuple(ids) for ids in found}) > 3
    assert all(tokenizer.decode(ids) == TEXTS[0] for ids in found)
    assert found == [BPEDropout(tokenizer._inner, 0.3).encode(TEXTS[0], number) for number in range(6)]


def test_each_merge_is_left_out_with_the_given_probability(tokenizer: Tokenizer) -> None:
    dropout = BPEDropout(tokenizer._inner, 0.25)
    left, right = next(iter(dropout.ranks))
    draws = [dropout.segment(left + right, random.Random(number)) for number in range(4000)]
    whole = sum(len(pieces) == 1 for pieces in draws) / len(draws)
    assert abs(whole - 0.75) < 0.03


def test_an_epoch_reads_one_segmentation_of_each_pair(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("the lower widest\tnewest lower\n", "utf-8")
    entry = PairFiles(path=path, bpe_dropout=0.5, segmentations=4)
    pairs = list(entry.read(Report()))
    assert [pair.segmentation for pair in pairs] == [0, 1, 2, 3] and sum(pair.weight for pair in pairs) == 1
    encoding = TextEncoding({"source": tokenizer, "target": tokenizer}, 128)
    store = Store.open_or_build(tmp_path / "store", [entry], Filters(duplicates=True), encoding)
    assert len(store) == 4 and store.weights is not None and store.weights.tolist() == [0.25] * 4


def test_bpe_dropout_is_refused_where_it_does_not_apply(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="set 'bpe_dropout' as well"):
        PairFiles(path="a.tsv", segmentations=4)
    tree: Any = {
        "model": "transformer-tiny",
        "output": "run",
        "data": {"train": "a.tsv", "valid": {"path": "b.tsv", "bpe_dropout": 0.1}},
    }
    with pytest.raises(UserError, match="'bpe_dropout' is for train only"):
        parse(Recipe, tree)
    unigram = train(TokenizerConfig(kind="unigram", vocab=330), TEXTS)
    with pytest.raises(UserError, match="needs a tokenizer of kind bpe, and this one is unigram"):
        unigram.bpe_dropout(0.1)
