"""Segments one after another: gradients through states, and where they stop."""

import pytest
import torch

from allyouneed.config import parse, tree_of
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.segment_recurrence import run_segments
from allyouneed.nn.sublayer import Mixer
from any_part import build, causally, describe_part, plain

LENGTH = 23


def model_of(pattern, cache="keys", positions="transformer-xl", wiring="post-norm"):
    mixer = {"kind": "attention", "heads": 3, "pattern": pattern, "positions": positions, "cache": cache}
    layer = {"repeat": 2, "wiring": wiring, "mixer": mixer, "channel": {"kind": "ffn", "hidden": 14}}
    return build(parse(Model, {"kind": "decoder", "vocab": 11, "width": 12, "decoder": [layer]}))


def text(rows=2):
    return torch.randint(1, 11, (rows, LENGTH), generator=torch.Generator().manual_seed(0))


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("cache", ["keys", "hidden"])
@pytest.mark.parametrize("positions", ["transformer-xl", "rotary", "none"])
@pytest.mark.parametrize("pattern", ["causal", "causal & window(4)", "causal & block-window(5, 2)"])
def test_gradients_through_states_match_the_whole_pass(pattern, positions, cache):
    model, tokens = model_of(pattern, cache, positions), text()
    whole = model(Batch(Rows(tokens)))
    states, chunks = model.start(len(tokens)), []
    for chunk in tokens.split(5, 1):
        chunks.append(model.advance(Rows(chunk), states))
    found = torch.cat(chunks, 1)
    torch.testing.assert_close(found, whole)
    weights = torch.linspace(-1, 1, whole.numel(), dtype=torch.double).view_as(whole)
    for one, other in zip(
        gradients(model, (found * weights).sum()), gradients(model, (whole * weights).sum()), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("cache", ["keys", "hidden"])
def test_detached_states_are_constants(cache):
    """The gradients of a segment's loss are those where all it remembers are numbers."""
    model, tokens = model_of("causal & block-window(5, 2)", cache), text()
    states = model.start(2)
    with torch.no_grad():
        model.advance(Rows(tokens[:, :5]), states)
    expected = gradients(model, model.advance(Rows(tokens[:, 5:10]), states).square().sum())
    states = model.start(2)
    steps = run_segments(model, tokens, 5, states)
    next(steps)
    found = gradients(model, next(steps)[1].square().sum())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_loss_of_several_segments_is_the_sum_of_theirs():
    """Losses of several segments can be kept: later segments overwrite nothing that backward needs."""
    model, tokens = model_of("causal & block-window(5, 2)", "hidden"), text()
    apart = [torch.zeros_like(p) for p in model.parameters()]
    for _, hidden in run_segments(model, tokens, 5, model.start(2)):
        apart = [a + g for a, g in zip(apart, gradients(model, hidden.square().sum()), strict=True)]
    together = sum(h.square().sum() for _, h in run_segments(model, tokens, 5, model.start(2)))
    for one, other in zip(gradients(model, together), apart, strict=True):
        torch.testing.assert_close(one, other)


PLAIN = [causally(plain(cls)) for cls in Mixer.registry.values() if cls.supports_self]
MIXERS = {describe_part(part): part for part in PLAIN if part.causal}


@pytest.mark.parametrize("name", MIXERS)
def test_every_state_can_be_detached(name):
    """What was seen stays, and no gradient flows back into it."""
    layer = {"repeat": 2, "mixer": tree_of(MIXERS[name]), "channel": {"kind": "ffn", "hidden": 14}}
    model, tokens = build(parse(Model, {"kind": "decoder", "vocab": 11, "width": 12, "decoder": [layer]})), text()
    states = model.start(2)
    assert model.advance(Rows(tokens[:, :7]), states).requires_grad
    states.detach()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    found = model.advance(Rows(tokens[:, 7:]), states)
    assert not found.requires_grad
    torch.testing.assert_close(found, model(Batch(Rows(tokens)))[:, 7:])


def test_training_with_memory_uses_earlier_segments():
    """A text of period 7 in segments of 6: the next token can only be predicted from memory."""
    torch.manual_seed(0)
    mixer = {"kind": "attention", "heads": 2, "pattern": "causal & block-window(6, 2)", "positions": "transformer-xl"}
    layer = {"repeat": 2, "mixer": mixer | {"cache": "hidden"}, "channel": {"kind": "ffn", "hidden": 64}}
    model = parse(Model, {"kind": "decoder", "vocab": 5, "width": 32, "decoder": [layer]}).build()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.003)
    dice = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(40):
        tokens = torch.randint(0, 5, (16, 7), generator=dice).repeat(1, 6)
        for span, hidden in run_segments(model, tokens[:, :-1], 6, model.start(len(tokens))):
            labels = tokens[:, span.start + 1 : span.stop + 1]
            loss = model.head.loss(hidden, labels, 0.0)[0] / labels.numel()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        losses.append(loss.item())  # of the last segment
    assert losses[-1] < 0.2 < 1.2 < losses[0]
