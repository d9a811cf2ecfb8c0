"""Memory tokens carried from segment to segment: every way of reading a text gives the same numbers."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allyouneed.config import ConfigError, parse
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from allyouneed.nn.states.paged import BlockPool
from allyouneed.nn.states.segment_memory import SegmentMemory
from any_part import build

ATTENTION = {"kind": "attention", "heads": 3, "pattern": "causal | prompt"}
MIXERS = {
    "the paper's": ATTENTION | {"positions": "transformer-xl"},
    "in a window": ATTENTION | {"pattern": "causal & window(4)", "positions": "rotary"},
    "recurrent": {"kind": "retention", "heads": 3},
}


def tree(mixer, **keys):
    layer = {"repeat": 2, "wiring": "pre-norm", "mixer": mixer, "channel": {"kind": "ffn", "hidden": 14}}
    base = {"kind": "recurrent-memory", "vocab": 11, "width": 12, "memory": 2, "segment": 3, "decoder": [layer]}
    return base | {"embed": {"positions": {"kind": "learned", "length": 7}}} | keys


MODELS = {name: build(tree(mixer)) for name, mixer in MIXERS.items()}
every_mixer = pytest.mark.parametrize("name", MIXERS)
texts = st.lists(st.lists(st.integers(1, 10), min_size=1, max_size=14), min_size=1, max_size=4)


def alone(model, text):
    with torch.no_grad():
        return model.logits(Batch(Rows(torch.tensor([text]))))[0]


def step(model, states, chunks):
    with torch.no_grad():
        found = model.head(model.advance(Rows.of(chunks), states))
    return [row[: len(chunk)] for row, chunk in zip(found, chunks, strict=True)]


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@every_mixer
@settings(max_examples=5)
@given(texts, st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), st.sampled_from(["right", "left"]))
def test_chunks_tokens_padding_and_packing_equal_a_text_alone(name, texts, cuts, side):
    model = MODELS[name]
    expected = [alone(model, text) for text in texts]
    together = torch.tensor([[token for text in texts for token in text]])
    with torch.no_grad():
        padded = model.logits(Batch(Rows.of(texts, pad=3, side=side)))
        segments = torch.tensor([[n + 1 for n, text in enumerate(texts) for _ in text]])
        (packed,) = model.logits(Batch(Rows(together, segments=segments)))
    for row, found in zip(padded, expected, strict=True):
        close(row[: len(found)] if side == "right" else row[-len(found) :], found)
    close(packed, torch.cat(expected))
    states, seen, found = model.start(len(texts)), [0] * len(texts), [[] for _ in texts]
    turn = 0
    while seen != [len(text) for text in texts]:
        ends = [
            min(len(t), at + cuts[(turn + n) % len(cuts)]) for n, (t, at) in enumerate(zip(texts, seen, strict=True))
        ]
        chunks = [text[at:end] for text, at, end in zip(texts, seen, ends, strict=True)]
        turn, seen = turn + 1, ends
        if any(chunks):
            for row, logits in enumerate(step(model, states, chunks)):
                found[row].append(logits)
            assert states.lengths == seen
    for logits, whole in zip(found, expected, strict=True):
        close(torch.cat(logits), whole)


@every_mixer
@settings(max_examples=5)
@given(texts, texts, st.lists(st.integers(0, 13), min_size=4, max_size=4), st.integers(0, 3))
def test_rows_joined_reordered_and_trimmed_equal_starting_again(name, first, second, ends, pick):
    """Trimming goes back into earlier segments; rows stand at different places of theirs."""
    model = MODELS[name]
    states, others = model.start(len(first)), model.start(len(second))
    step(model, states, first)
    step(model, others, second)
    states.join(others)
    rows = [*first, *second]
    kept = [(pick + n) % len(rows) for n in range(len(rows))] + [pick % len(rows)]
    states.select(kept)
    rows = [rows[row] for row in kept]
    left = [min(len(row), max(1, ends[n % 4])) for n, row in enumerate(rows)]
    states.trim(left)
    rows = [row[:end] for row, end in zip(rows, left, strict=True)]
    assert states.lengths == left
    for token in (4, 7):
        found = step(model, states, [[token]] * len(rows))
        rows = [[*row, token] for row in rows]
        for row, logits in zip(rows, found, strict=True):
            close(logits, alone(model, row)[-1:])


def test_the_memory_carries_what_a_segment_has_read():
    model = MODELS["the paper's"]
    one, other = alone(model, [1, 2, 3, 4, 5, 6, 7, 8]), alone(model, [9, 2, 3, 4, 5, 6, 7, 8])
    assert (one[6:] - other[6:]).abs().max() > 1e-3  # two segments later


def test_the_state_stops_growing():
    model = MODELS["the paper's"]
    states, sizes = model.start(1), []
    for _ in range(40):
        step(model, states, [[1, 2, 3]])
        sizes.append(states.bytes)
    assert len(set(sizes[2:])) == 1
    with pytest.raises(ValueError, match="at most 64"):
        states.trim(20)


def test_a_carried_memory_is_saved_and_restored_exactly():
    """As a run with `task.memory: true` does in its checkpoints."""
    model = MODELS["the paper's"]
    dice = torch.Generator().manual_seed(0)
    batches = [Batch(Rows(torch.randint(1, 11, (2, 4), generator=dice)), begins=n == 0) for n in range(6)]
    straight, broken = SegmentMemory(model), SegmentMemory(model)
    for number, batch in enumerate(batches):
        if number in (2, 5):
            tensors, form = broken.export()
            broken = SegmentMemory(model)
            broken.restore(tensors, json.loads(json.dumps(form)))
        assert torch.equal(broken.run(batch, None)[0], straight.run(batch, None)[0])


def test_bptt_cuts_the_gradient_between_groups_of_segments():
    tokens = Rows(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9]]))

    def gradient(bptt):
        """The gradient of the last segment's loss at the first memory: through both segments before it, or none."""
        model = build(tree(MIXERS["the paper's"], bptt=bptt))
        (found,) = torch.autograd.grad(model(Batch(tokens))[:, 6:].square().sum(), model.memory, materialize_grads=True)
        return found.abs().max()

    assert gradient(None) == gradient(3) > 0
    assert gradient(1) == gradient(2) == 0


@pytest.mark.parametrize("pool", [None, BlockPool(blocks=400, size=2)])
def test_requests_of_the_engine_are_answered_as_alone(pool):
    engine = Engine(MODELS["the paper's"], 1, 2, 0)
    decodings = [Decoding(method="greedy", max_length=9), Decoding(beam=3, best=2, max_length=8)]
    busy, states = Scheduler(engine.runner, rows=6, budget=9, pool=pool), []
    for number in range(5):
        request = Request([1, *range(3, 3 + number)], 9, (number,))
        states.append((request, decodings[number % 2], busy.submit(request, decodings[number % 2])))
        busy.step()
    busy.run()
    for request, decoding, state in states:
        (expected,) = engine.decode([request], decoding)
        assert [one.tokens for one in state.answer] == [one.tokens for one in expected]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"embed": {"positions": {"kind": "learned", "length": 6}}}, r"2 × 2 memory tokens has 7"),
        ({"embed": {"inner": 8}, "head": {"transform": {}}}, "memory tokens have the model's width"),
        ({"memory": 0}, "memory: "),
    ],
)
def test_impossible_configs_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        parse(Model, tree(ATTENTION, **keys))
