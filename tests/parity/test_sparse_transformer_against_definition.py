"""The Sparse Transformer, small, against a dense softmax whose mask is written out from Child et al. 2019, 4.3."""

import pytest
import torch

import decoders
import parity
from allyouneed.config import parse, preset_tree, tree_of
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from shrink import shrink
from written_out import Weights, attention, differences, ffn, layer_norm

STRIDE, SUMMARY = 8, 2  # what the shrunken preset has for l = 128 and c = 32
PATTERNS = {
    "fixed": "causal & (block(8) | fixed(8, 2))",
    "strided": "causal & (window(8) | strided(8))",
}


def fixed(i, j):
    """A(1): the own block; A(2): the last c places of every block."""
    return i // STRIDE == j // STRIDE or j % STRIDE >= STRIDE - SUMMARY


def strided(i, j):
    """A(1): from max(0, i − l) to i; A(2): every l-th place, counted from i."""
    return j >= max(0, i - STRIDE) or (i - j) % STRIDE == 0


def written_out(weights, tokens, config, may):
    """Sections 5.1 to 5.3: every head sees both sets of a pattern; a place is its row's vector plus its column's."""
    time, width, heads = len(tokens), config.width, config.decoder[0].mixer.heads
    columns = config.embed.positions.columns
    seen = torch.tensor([[j <= i and may(i, j) for j in range(time)] for i in range(time)])
    places = torch.arange(time)
    embed = weights.at("embed")
    x = embed["tokens.weight"][tokens]
    x = x + embed["positions.rows.weight"][places // columns] + embed["positions.columns.weight"][places % columns]
    for number in range(config.decoder[0].repeat):
        block = weights.at(f"decoder.blocks.{number}")
        y = layer_norm(x, block.at("wiring.norms.0"))
        x = x + attention(y, y, seen, heads, block.at("sublayers.mixer"))
        y = layer_norm(x, block.at("wiring.norms.1"))
        x = x + ffn(y, block.at("sublayers.channel"), lambda h: h * torch.sigmoid(1.702 * h))
    assert x.shape == (time, width)
    return layer_norm(x, weights.at("decoder.end")) @ weights["head.weight"].T


def small(pattern):
    tree = tree_of(shrink(parse(Model, preset_tree("sparse-transformer"))))
    assert tree["decoder"][0]["mixer"]["pattern"] == PATTERNS["fixed"]
    tree["decoder"][0]["mixer"]["pattern"] = pattern
    tree["embed"]["positions"] |= {"rows": 5, "columns": 8}
    return parse(Model, tree)


@pytest.mark.parametrize(("name", "may"), [("fixed", fixed), ("strided", strided)])
def test_logits_gradients_and_steps(name, may, record_difference):
    config = small(PATTERNS[name])
    model = config.build()
    parity.randomise(model)
    weights = Weights.of(model)
    dice = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, config.vocab, (length,), generator=dice) for length in (37, 16, 5)]
    rows = Rows.of([text.tolist() for text in texts])
    real = decoders.real(rows)
    expected = torch.cat([written_out(weights, text, config, may) for text in texts])
    outputs, gradients = differences(model, weights, model.logits(Batch(rows))[real], expected)
    steps = parity.difference(decoders.stepwise(model.eval(), rows)[real], expected.detach())
    record_difference("Sparse Transformer", "dense mask from the paper", max(outputs, steps), gradients)
    assert max(outputs, steps) < parity.TOLERANCE and gradients < parity.TOLERANCE
