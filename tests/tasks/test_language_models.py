"""Causal and prefix language models: no token is lost, each is predicted once, and only what should be."""

import numpy as np
import pytest

from allyouneed.data.batches.packing import PackedBatches
from allyouneed.data.files.pairs import Pair
from allyouneed.data.files.texts import TextDocument
from allyouneed.nn.batch import IGNORE
from allyouneed.tasks.language.causal_lm import CausalLM
from allyouneed.tasks.language.prefix_lm import PrefixLM
from memory_store import MemoryStore, vocabularies

TEXTS = ["a moon", "the cat sees tomorrow's moon, " * 9, "猫看见月亮", "x"]
DOCUMENTS = [TextDocument(text, "a.txt", n) for n, text in enumerate(TEXTS)]
BOS, EOS = vocabularies().target.bos, vocabularies().target.eos


@pytest.mark.parametrize("room", [4, 7, 16, 1000])
def test_documents_are_cut_without_losing_a_token_and_each_is_predicted_once(room: int) -> None:
    task = CausalLM()
    store = MemoryStore(task.encoding(vocabularies(), [], None), DOCUMENTS)
    items = task.items(store, vocabularies(), (room,), seed=1)
    assert max(items.lengths(0)[0]) <= room
    read: dict[int, list[int]] = {}
    said: dict[int, list[int]] = {}
    for number in range(len(items)):
        filled = items.collate(0, np.array([number]))
        assert filled.labels is not None
        tokens, labels = filled.sides[0].tokens.tolist(), filled.labels.tolist()
        assert len(tokens) == len(labels) == items.lengths(0)[0][number]
        assert tokens[1:] == labels[:-1], "what is predicted is read next"
        document = int(items.pieces.documents[number])  # type: ignore[attr-defined]
        read.setdefault(document, []).extend(tokens)
        said.setdefault(document, []).extend(labels)
    for number, text in enumerate(TEXTS):
        ids = vocabularies().target.encode(text)
        assert read[number] == [BOS, *ids] and said[number] == [*ids, EOS]


def test_documents_in_one_row_are_kept_apart() -> None:
    task = CausalLM()
    store = MemoryStore(task.encoding(vocabularies(), [], None), DOCUMENTS)
    (batch,) = PackedBatches(task.items(store, vocabularies(), (16,), 1), (32,), rows=4).batches(0)
    rows = batch.rows
    assert rows.segments is not None and rows.positions is not None and batch.labels is not None
    for tokens, segments, positions in zip(rows.tokens, rows.segments, rows.positions, strict=True):
        for number in range(1, int(segments.max()) + 1):
            assert positions[segments == number].tolist() == list(range(int((segments == number).sum())))
        assert (positions[tokens == BOS] == 0).all()
    assert ((batch.labels == IGNORE) == (rows.segments == 0)).all()


def test_a_pair_is_prompt_and_labelled_answer() -> None:
    task, tokenizer = PrefixLM(), vocabularies().target
    store = MemoryStore(task.encoding(vocabularies(), [], 100), [Pair("the cat", "猫", "a.tsv", 1)])
    filled = task.items(store, vocabularies(), (100,), 1).collate(0, np.array([0]))
    prompt, answer = tokenizer.encode("the cat"), tokenizer.encode("猫")
    assert filled.labels is not None
    assert filled.sides[0].tokens.tolist() == [BOS, *prompt, EOS, *answer]
    assert filled.labels.tolist() == [IGNORE] * (len(prompt) + 1) + [*answer, EOS]
    assert filled.sides[0].features["prompt"].tolist() == [True] * (len(prompt) + 2) + [False] * len(answer)


def test_pairs_that_do_not_fit_together_are_left_out() -> None:
    task, tokenizer = PrefixLM(), vocabularies().target
    whole = len(tokenizer.encode("the cat")) + len(tokenizer.encode("猫")) + 2
    pair = [Pair("the cat", "猫", "a.tsv", 1)]
    assert len(MemoryStore(task.encoding(vocabularies(), [], whole), pair)) == 1
    assert len(MemoryStore(task.encoding(vocabularies(), [], whole - 1), pair)) == 0


def test_documents_are_split_anew_each_epoch() -> None:
    task = PrefixLM(reads="text")  # type: ignore[call-arg]
    store = MemoryStore(task.encoding(vocabularies(), [], None), DOCUMENTS)
    items = task.items(store, vocabularies(), (16,), seed=3)
    plain = CausalLM().items(store, vocabularies(), (16,), seed=3)
    cuts = set()
    everything = np.arange(len(items))
    for epoch in range(6):
        filled, whole = items.collate(epoch, everything), plain.collate(epoch, everything)
        again = items.collate(epoch, everything)
        assert filled.labels is not None and whole.labels is not None and again.labels is not None
        assert (filled.sides[0].tokens == whole.sides[0].tokens).all() and (filled.labels == again.labels).all()
        given = filled.sides[0].features["prompt"]
        said = filled.labels != IGNORE
        assert (filled.labels[said] == whole.labels[said]).all()
        begin = 0
        for length in items.lengths(epoch)[0].tolist():
            part = given[begin : begin + length]
            assert part[0] and part.tolist() == sorted(part.tolist(), reverse=True), "a prompt is a beginning"
            assert said[begin : begin + length].tolist() == [*(~part[1:]).tolist(), True], "it is all that is not said"
            cuts.add(int(part.sum()))
            begin += length
    assert len(cuts) > 5
