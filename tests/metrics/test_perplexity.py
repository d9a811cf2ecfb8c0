"""One long text, read in three ways."""

import math

import pytest
import torch

from allyouneed.config import parse
from allyouneed.metrics.perplexity import pieces, receptive_field, recurrent, sliding
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from any_part import build

WINDOW, LAYERS, LENGTH = 4, 2, 41
REACH = 1 + LAYERS * (WINDOW - 1)


def model_of(pattern, positions="transformer-xl"):
    mixer = {"kind": "attention", "heads": 3, "pattern": pattern, "positions": positions}
    layer = {"repeat": LAYERS, "mixer": mixer, "channel": {"kind": "ffn", "hidden": 14}}
    return build(parse(Model, {"kind": "decoder", "vocab": 11, "width": 12, "decoder": [layer]}))


@pytest.fixture(scope="module")
def text():
    return torch.randint(0, 11, (LENGTH,), generator=torch.Generator().manual_seed(0))


def one_by_one(model, text, context):
    """The reference: every token separately, from the `context` tokens before it."""
    total = 0.0
    with torch.no_grad():
        for at in range(1, len(text)):
            logits = model.logits(Batch(Rows(text[None, max(0, at - context) : at])))
            total -= float(logits[0, -1].log_softmax(-1)[text[at]])
    return total


@pytest.mark.parametrize("context", [1, REACH, LENGTH - 1, LENGTH + 5])
def test_sliding_windows_predict_each_token_from_its_full_context(text, context):
    model = model_of("causal")
    found = sliding(model, text, context, rows=7)
    assert found.total == pytest.approx(one_by_one(model, text, context))
    assert found.tokens == LENGTH - 1
    whole = min(context, LENGTH - 1)
    assert found.computed == whole + (LENGTH - 1 - whole) * context


@pytest.mark.parametrize("segment", [1, 5, LENGTH, LENGTH + 5])
@pytest.mark.parametrize("positions", ["transformer-xl", "rotary", "alibi"])
def test_recurrent_equals_sliding_over_the_receptive_field(text, positions, segment):
    model = model_of(f"causal & window({WINDOW})", positions)
    assert receptive_field(model.config) == REACH
    found, expected = recurrent(model, text, segment), sliding(model, text, REACH)
    assert found.total == pytest.approx(expected.total)
    assert found.tokens == expected.tokens == found.computed
    less = sliding(model, text, REACH - 1)
    assert less.total != pytest.approx(expected.total, rel=1e-6)  # not one token fewer would do


def test_recurrent_equals_the_whole_text_at_once(text):
    model = model_of("causal")
    assert math.isinf(receptive_field(model.config))
    assert recurrent(model, text, 6).total == pytest.approx(pieces(model, text, LENGTH).total)


def test_pieces_are_independent(text):
    model = model_of("causal")
    expected = sum(one_by_one(model, text[begin : begin + 7], LENGTH) for begin in range(0, LENGTH - 1, 6))
    found = pieces(model, text, 6)
    assert found.total == pytest.approx(expected)
    assert (found.tokens, found.computed) == (LENGTH - 1, LENGTH - 1)
    assert found.perplexity == pytest.approx(math.exp(expected / (LENGTH - 1)))


def test_the_mode_of_the_model_is_restored(text):
    model = model_of("causal").train()
    pieces(model, text, 6), recurrent(model, text, 6), sliding(model, text, 6)
    assert model.training
