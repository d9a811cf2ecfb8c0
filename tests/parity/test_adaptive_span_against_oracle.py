"""Adaptive span against Sukhbaatar et al. 2019, 2.1-2.2, written out as the authors' code computes it: softmax of
q·(k + p), times the soft mask, divided by the sum; and their penalty."""

import pytest
import torch

from allyouneed.config import parse, preset_tree, tree_of
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.models.base import Model
from attention_layers import TOLERANCE, agreement, build_mixer, randomise_module
from shrink import shrink

SPAN, RAMP, WIDTH, HEADS = 9, 3, 12, 3


def by_the_paper(mixer, x):
    spans = mixer.relative.fraction * SPAN
    table, size = mixer.relative.vectors, WIDTH // HEADS
    q, k, v = (y.unflatten(-1, (HEADS, size)) for y in mixer.qkv(x).chunk(3, -1))
    rows = []
    for t in range(len(x)):
        heads = []
        for h in range(HEADS):
            keys = list(range(max(0, t - SPAN + 1), t + 1))
            extra = [0 if table is None else table.weight[t - r] for r in keys]
            scores = torch.stack([q[t, h] @ (k[r, h] + p) for r, p in zip(keys, extra, strict=True)])
            mask = torch.stack([((RAMP + spans[h] - (t - r)) / RAMP).clamp(0, 1) for r in keys])
            weights = (scores / size**0.5).softmax(0) * mask
            heads.append((weights / weights.sum()) @ v[keys, h])
        rows.append(torch.cat(heads))
    return mixer.out(torch.stack(rows))


@pytest.mark.parametrize("vectors", [False, True])
def test_the_soft_mask(vectors, record_difference):
    positions = {"kind": "adaptive-span", "span": SPAN, "ramp": RAMP, "vectors": vectors}
    keys = {"kind": "attention", "heads": HEADS, "pattern": "causal", "positions": positions}
    mixer = randomise_module(build_mixer(WIDTH, keys))
    with torch.no_grad():  # spans of 0.9, 4.5 and 9 tokens
        mixer.relative.fraction.copy_(torch.tensor([0.1, 0.5, 1.0]))
    x = torch.randn(17, WIDTH, generator=torch.Generator().manual_seed(0))
    layout = TokenLayout(torch.arange(17)[None], start=0)
    found, expected = mixer(x[None], Context(layout))[0], by_the_paper(mixer, x)
    differences = agreement(found, expected, list(mixer.parameters()))
    record_difference("Adaptive Span", "equations written out", *differences)
    assert max(differences) < TOLERANCE


def test_the_penalty_is_added_to_the_loss_while_training():
    """λ · span · mean z of each layer, as in the authors' get_loss."""
    model = shrink(parse(Model, preset_tree("adaptive-span"))).build()
    for block, value in zip(model.decoder.blocks, (0.25, 0.5), strict=True):
        torch.nn.init.constant_(block.sublayers["mixer"].relative.fraction, value)
    part, batch, losses = model.config.decoder[0].mixer.positions, Batch(Rows(torch.tensor([[1, 2, 3]]))), []
    model.eval()(batch, losses)
    assert losses == []
    model.train()(batch, losses)
    expected = part.penalty * part.span * 0.75
    torch.testing.assert_close(sum(losses), torch.tensor(expected))
    model.zero_grad()
    sum(losses).backward()
    assert all((block.sublayers["mixer"].relative.fraction.grad > 0).all() for block in model.decoder.blocks)


@pytest.mark.parametrize("inner", ["none", "rotary", "alibi"])
def test_a_trained_cache_is_as_long_as_the_longest_span(inner):
    """One layer with spans of 0 and 4 tokens beside one of 20 and 12: decoding gives the numbers of the whole text from
    rings of 4 + ramp and 20 + ramp tokens."""
    spans = {"kind": "adaptive-span", "span": 200, "ramp": 3, "positions": inner}
    mixer = {"kind": "attention", "heads": 2, "pattern": "causal", "positions": spans}
    layer = {"repeat": 2, "wiring": "pre-norm", "mixer": mixer, "channel": {"kind": "ffn", "hidden": 16}}
    model = randomise_module(parse(Model, {"kind": "decoder", "vocab": 9, "width": 8, "decoder": [layer]}).build())
    with torch.no_grad():
        for block, some in zip(model.decoder.blocks, ((0.0, 4.0), (20.0, 12.0)), strict=True):
            block.sublayers["mixer"].relative.fraction.copy_(torch.tensor(some) / 200)
    tokens = torch.randint(0, 9, (2, 150), generator=torch.Generator().manual_seed(0))
    states = model.start(2)
    assert [layer["mixer"].ring for layer in states.layers] == [4 + 3 + 64, 20 + 3 + 64]
    with torch.no_grad():
        whole = model(Batch(Rows(tokens)))
        found = torch.cat([model.advance(Rows(piece), states) for piece in tokens.split([100, *[1] * 50], 1)], 1)
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)
    widths = [layer["mixer"].keys.shape[2] for layer in states.layers]
    assert widths == [72, 88] and model.train().start(1).layers[0]["mixer"].ring == 200 + 64


def test_spans_stay_between_none_and_all():
    """An update may leave the range; the next forward pass returns into it, so that the gradient does not vanish."""
    mixer = build_mixer(8, {"kind": "attention", "heads": 2, "positions": {"kind": "adaptive-span", "span": 4}})
    torch.nn.init.constant_(mixer.relative.fraction, -0.3)
    x, layout = torch.randn(1, 5, 8), TokenLayout(torch.arange(5)[None], start=0)
    assert mixer.relative.visible() == 4 and mixer.relative.spans().max() == 0
    mixer.train()(x, Context(layout)).square().sum().backward()
    assert (mixer.relative.fraction == 0).all() and mixer.relative.fraction.grad.abs().min() > 0


def test_nested_in_itself_is_refused():
    inner = parse_positions({"kind": "adaptive-span", "span": 4})
    outer = parse_positions({"kind": "adaptive-span", "span": 4, "positions": tree_of(inner)})
    (problem,) = outer.problems(None, Common(width=8))
    assert problem == ("positions", "is adaptive-span already; use other positions")


def parse_positions(tree):
    from allyouneed.nn.positions.relative import Relative

    return Relative.choose(tree)
