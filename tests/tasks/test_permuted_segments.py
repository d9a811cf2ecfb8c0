"""XLNet's segment recurrence: a text in segments with targets in each, over the memory of earlier ones."""

import pytest
import torch

from allyouneed.config import ConfigError, parse, tree_of
from allyouneed.data.files.texts import TextDocument
from allyouneed.nn.batch import IGNORE, Batch, Rows
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.two_stream import append_query_stream
from allyouneed.nn.states.segment_memory import SegmentMemory
from allyouneed.tasks.language.permutation_lm import PermutationLM
from memory_store import MemoryStore, vocabularies

TEXTS = ["a moon", "the cat sees tomorrow's moon, " * 25, "猫看见月亮", "x"]
TOKENIZER = vocabularies().target


def segments(row=15, rows=3, seed=1):
    task = PermutationLM(one_in=4, run=2, memory=True)
    store = MemoryStore(
        task.encoding(vocabularies(), [], None), [TextDocument(t, "a.txt", n) for n, t in enumerate(TEXTS)]
    )
    return task.batches(task.items(store, vocabularies(), (row,), seed), (row,), rows, seed)


def model_of(pattern, cache):
    mixer = {"kind": "attention", "heads": 3, "pattern": pattern, "positions": "xlnet", "cache": cache}
    layer = {"repeat": 2, "mixer": mixer, "channel": {"kind": "ffn", "hidden": 14}}
    keys = {"kind": "encoder", "vocab": TOKENIZER.size, "width": 12, "embed": {"asks": True}, "encoder": [layer]}
    torch.manual_seed(0)
    return parse(Model, keys).build().double().eval()


def test_rows_are_framed_documents_that_continue():
    batches = list(segments().batches(0))
    assert [batch.begins for batch in batches] == [True] + [False] * (len(batches) - 1)
    tokens = torch.cat([batch.rows.tokens for batch in batches], 1)
    order = torch.cat([batch.rows.order for batch in batches], 1)
    whole = [int(token) for line, said in zip(tokens, order, strict=True) for token in line[said <= 3]]
    framed = [TOKENIZER.frame(TOKENIZER.encode(text))[0] for text in TEXTS]
    parts, rest = [], whole
    while rest:
        (part,) = [ids for ids in framed if ids == rest[: len(ids)]]
        parts.append(part)
        rest = rest[len(part) :]
    assert sorted(parts) == sorted(framed)


def test_queries_have_distinct_targets_and_padding_is_never_one():
    for batch in segments().batches(3):
        rows, asks, labels = batch.rows, batch.source, batch.labels
        size, count = rows.tokens.shape[1], asks.tokens.shape[1]
        assert (size, count) == (12, 3) and labels.shape == (3, 15) and (labels[:, :size] == IGNORE).all()
        for row in range(3):
            real = int((rows.order[row] <= count).sum())
            told = [n for n in range(count) if labels[row, size + n] != IGNORE]
            assert len(told) == (max(real // 4, 1) if real else 0) and (rows.order[row, real:] == count + 1).all()
            places = asks.positions[row, told].tolist()
            assert len(set(places)) == len(places) and all(place < real for place in places)
            assert labels[row, size:][told].tolist() == rows.tokens[row, places].tolist()
            assert rows.order[row, places].tolist() == list(range(1, len(told) + 1))
            assert asks.order[row, told].tolist() == [-1 - n for n in range(1, len(told) + 1)]


def test_draws_depend_on_seed_epoch_and_position_alone():
    first, later = list(segments().batches(1)), list(segments().batches(1, start_step=2))
    assert all(torch.equal(a.labels, b.labels) for a, b in zip(first[2:], later, strict=True))
    other = list(segments().batches(2))
    assert any(not torch.equal(a.labels, b.labels) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("cache", ["keys", "hidden"])
@pytest.mark.parametrize("pattern", ["permuted & window(9)", "permuted & block-window(12, 2)"])
def test_segments_with_memory_equal_the_whole_text(pattern, cache):
    """Query outputs too, and long after a ring buffer has wrapped around."""
    model = model_of(pattern, cache)
    batches = list(segments(rows=1, seed=2).batches(0))
    text = torch.cat([batch.rows.tokens for batch in batches], 1)
    assert text.shape[1] > 150
    reader, size = SegmentMemory(model), 12
    with torch.no_grad():
        found = [reader.run(batch, None)[0] for batch in batches]
        for number in (0, 1, 4, len(batches) - 1):
            batch = batches[number]
            before, end = number * size, (number + 1) * size
            order = torch.cat([10 * n + batches[n].rows.order for n in range(number + 1)], 1)
            places = [(before + batch.source.positions[0]).tolist()]
            expected = model(Batch(append_query_stream(Rows(text[:, :end], order=order), places)))
            told = found[number]
            torch.testing.assert_close(told[:, :size], expected[:, before:end])
            torch.testing.assert_close(told[:, size:], expected[:, end:])


def test_models_without_bounded_state_are_rejected():
    tree = tree_of(model_of("permuted & window(9)", "keys").config)
    task = PermutationLM(memory=True)
    task.head(tree, None)
    tree["encoder"][0]["mixer"]["pattern"] = "permuted"
    with pytest.raises(ConfigError, match=r"encoder\[0\]\.mixer\.pattern: the state would grow without bound"):
        task.head(tree, None)
    PermutationLM().head(tree, None)
