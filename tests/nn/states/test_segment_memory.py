"""Segment memory: states carried from batch to batch, exported and restored exactly."""

import json

import pytest
import torch

from allyouneed.config import parse, tree_of
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from allyouneed.nn.states.segment_memory import SegmentMemory
from allyouneed.nn.sublayer import Mixer
from any_part import build, causally, describe_part, plain

PARTS = [causally(plain(cls)) for cls in Mixer.registry.values() if cls.supports_self]
MIXERS = {describe_part(part): tree_of(part) for part in PARTS if part.causal}
for pattern in ("causal & window(4)", "causal & block-window(5, 2)", "causal & window(3) | causal & global(0)"):
    for cache in ("keys", "hidden"):
        attention = {"kind": "attention", "heads": 3, "pattern": pattern, "positions": "transformer-xl"}
        MIXERS[f"{pattern}, {cache}"] = attention | {"cache": cache}


def model_of(mixer):
    layer = {"repeat": 2, "mixer": mixer, "channel": {"kind": "ffn", "hidden": 14}}
    return build(parse(Model, {"kind": "decoder", "vocab": 11, "width": 12, "decoder": [layer]}))


def batches(count, begins=(0,), size=5):
    dice = torch.Generator().manual_seed(0)
    return [Batch(Rows(torch.randint(1, 11, (2, size), generator=dice)), begins=n in begins) for n in range(count)]


@pytest.mark.parametrize("name", MIXERS)
def test_a_restored_memory_continues_exactly(name):
    """For every mixer: after a restore the outputs equal those without interruption, bit for bit."""
    model = model_of(MIXERS[name])
    straight, first, second = SegmentMemory(model), SegmentMemory(model), SegmentMemory(model)
    # more tokens than a window or a tail holds; some mixers have few positions
    given = batches(10, size=4 if name.startswith(("synthesizer", "tensorized")) else 20)
    expected = [straight.run(batch, None)[0] for batch in given]
    for number, batch in enumerate(given):
        if number in (1, 3, 9):
            tensors, tree = first.export()
            second.restore({k: v.clone() for k, v in tensors.items()}, json.loads(json.dumps(tree)))
            first, second = second, SegmentMemory(model)
        assert torch.equal(first.run(batch, None)[0], expected[number])


def test_states_are_carried_until_new_texts_begin():
    model = model_of(MIXERS["causal & window(4), hidden"])
    given = batches(4, begins=(0, 2))
    reader = SegmentMemory(model)
    found = [reader.run(batch, None)[0] for batch in given]
    for pair in (0, 2):
        whole = model(Batch(Rows(torch.cat([batch.rows.tokens for batch in given[pair : pair + 2]], 1))))
        torch.testing.assert_close(torch.cat(found[pair : pair + 2], 1), whole)


def test_no_gradient_flows_into_the_memory():
    model = model_of(MIXERS["causal & window(4), keys"])
    one, two = batches(2)
    reader = SegmentMemory(model)
    reader.run(one, None)[0].sum().backward()
    with torch.no_grad():
        apart = SegmentMemory(model)
        apart.run(one, None)
    parameters = list(model.parameters())
    own, expected = (
        torch.autograd.grad(which.run(two, None)[0].square().sum(), parameters) for which in (reader, apart)
    )
    torch.testing.assert_close(own, expected)


def test_an_empty_memory_round_trips():
    model = model_of(MIXERS["causal & window(4), keys"])
    tensors, tree = SegmentMemory(model).export()
    assert (tensors, tree) == ({}, None)
    reader = SegmentMemory(model)
    reader.run(batches(1)[0], None)
    reader.restore(tensors, tree)
    assert reader.states is None
