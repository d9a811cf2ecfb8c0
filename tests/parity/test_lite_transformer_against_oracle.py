"""Lightweight and dynamic convolutions (Wu et al. 2019, sections 3 and 4) and the shipped Lite Transformer (Wu et al.
2020), place by place, as the authors' fairseq files have them: one sentence, no batch, no state."""

import math

import pytest
import torch
from torch import nn

from allyouneed.config import ConfigError, parse, preset_tree
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.mixers.lightweight import DynamicConvolution, LightweightConvolution
from allyouneed.nn.mixers.lsra import LSRA
from allyouneed.nn.models.base import Model
from any_part import build, reference_logits, tree

WIDTH, HEADS = 12, 3


def norm(module, x):
    return nn.functional.layer_norm(x, x.shape[-1:], module.weight, module.bias, 1e-5)


def dense(module, x):
    return x @ module.weight.T + (0 if module.bias is None else module.bias)


def convolution(module, x, size, heads, past, gated=True):
    """Σ_j softmax(filter)_j x_{i+j}, one filter per head; zeros beyond the ends."""
    x = dense(module.inside, x)
    if gated:
        values, gates = x.chunk(2, -1)
        x = values * gates.sigmoid()
    first = -(size - 1) if past else -((size - 1) // 2)
    rows = []
    for i in range(len(x)):
        row = []
        for c in range(x.shape[1]):
            head = c * heads // x.shape[1]
            if hasattr(module, "taps"):
                logits = module.taps[head]
            else:
                logits = (module.filters.weight @ x[i])[head * size : (head + 1) * size]
            weights, total = logits.softmax(0), 0.0
            for j in range(size):
                if 0 <= i + first + j < len(x):
                    total = total + weights[j] * x[i + first + j, c]
            row.append(total)
        rows.append(torch.stack(row))
    return dense(module.out, torch.stack(rows))


def attention(module, x, heads, memory=None, causal=False):
    if memory is None:
        q, k, v = dense(module.qkv, x).chunk(3, -1)
    else:
        q, (k, v) = dense(module.q, x), dense(module.kv, memory).chunk(2, -1)
    size, rows = q.shape[1] // heads, []
    for t in range(len(x)):
        seen = slice(0, t + 1) if causal else slice(None)
        parts = []
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            parts.append((k[seen, own] @ q[t, own] / math.sqrt(size)).softmax(0) @ v[seen, own])
        rows.append(torch.cat(parts))
    return dense(module.out, torch.stack(rows))


def differences(found, expected, weights):
    own = torch.autograd.grad(found.sin().sum(), weights)
    theirs = torch.autograd.grad(expected.sin().sum(), weights)
    assert all(gradient.any() for gradient in theirs)
    worst = max((a - b).abs().max().item() / max(1.0, b.abs().max().item()) for a, b in zip(own, theirs, strict=True))
    return (found - expected).abs().max().item(), worst


@pytest.mark.parametrize("kind", [LightweightConvolution, DynamicConvolution])
@pytest.mark.parametrize("size", [1, 4, 7, 31])
@pytest.mark.parametrize("sees", ["around", "past"])
@pytest.mark.parametrize("gated", [True, False])
def test_a_convolution(kind, size, sees, gated, record_difference):
    torch.manual_seed(0)
    layer = kind(size=size, heads=HEADS, sees=sees, gated=gated).build(Common(width=WIDTH)).double().eval()
    if size > 1 and kind is LightweightConvolution:
        nn.init.normal_(layer.taps)
    x = torch.randn(1, 13, WIDTH, dtype=torch.double)
    found = layer(x, Context(TokenLayout(torch.arange(13)[None], start=0)))[0]
    expected = convolution(layer, x[0], size, HEADS, sees == "past", gated)
    # a filter of one place weighs it with 1 and learns nothing
    weights = [p for name, p in layer.named_parameters() if size > 1 or not name.startswith(("taps", "filters"))]
    outputs, gradients = differences(found, expected, weights)
    name = "Lightweight convolution" if kind is LightweightConvolution else "Dynamic convolution"
    record_difference(name, "oracle from Wu et al. 2019, sections 3-4", outputs, gradients)
    assert outputs < 1e-12 and gradients < 1e-11


def test_unequal_halves(record_difference):
    """MultiBranch of the authors' code: the features are split by `embed_dims`, results are concatenated."""
    torch.manual_seed(0)
    layer = LSRA(heads=2, size=3, far_width=8, pattern="causal").build(Common(width=WIDTH)).double().eval()
    x = torch.randn(1, 13, WIDTH, dtype=torch.double)
    found = layer(x, Context(TokenLayout(torch.arange(13)[None], start=0)))[0]
    far, near = x[0].split([8, WIDTH - 8], -1)
    parts = attention(layer.far, far, 2, causal=True), convolution(layer.near, near, 3, 2, past=True)
    outputs, gradients = differences(found, torch.cat(parts, -1), list(layer.parameters()))
    record_difference("Lite Transformer", "oracle from the authors' code", outputs, gradients)
    assert outputs < 1e-12 and gradients < 1e-11
    with pytest.raises(ConfigError, match=r"far_width: splits width 12 into 7 and 5; both must be"):
        parse(Model, REFUSED)


REFUSED = {
    "kind": "encoder",
    "vocab": 5,
    "width": WIDTH,
    "encoder": [
        {"mixer": {"kind": "lsra", "heads": 2, "size": 3, "far_width": 7}, "channel": {"kind": "ffn", "hidden": 4}}
    ],
}


def test_dropped_weights_are_scaled_up():
    torch.manual_seed(0)
    layer = DynamicConvolution(size=5, heads=HEADS, dropout=0.3).build(Common(width=WIDTH)).train()
    nn.init.zeros_(layer.filters.weight)
    nn.init.zeros_(layer.inside.weight)
    nn.init.ones_(layer.inside.bias)
    nn.init.eye_(layer.out.weight)
    nn.init.zeros_(layer.out.bias)
    seen = layer(torch.randn(20, 100, WIDTH), Context(TokenLayout(torch.arange(100)[None], start=0)))
    one = torch.ones(()).sigmoid()  # every place says this
    assert seen[:, 2:-2].mean().item() == pytest.approx(float(one), rel=0.02) and seen.unique().numel() > 5


# --- the whole model --------------------------------------------------------------------------------------------------

NARROW = {"vocab": {32768: 11}, "width": {496: 16}, "hidden": {496: 16}, "heads": {4: 2, 8: 4}}
SOURCE, TARGET = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9]
SIZES = [3, 7, 15, 31, 31, 31]


def narrowed(node):
    if isinstance(node, dict):
        return {key: NARROW[key][value] if key in NARROW else narrowed(value) for key, value in node.items()}
    return node


def embedded(model, tokens):
    """fairseq's sinusoids: sines before cosines, the first place is number 2."""
    width = model.embed.tokens.weight.shape[1]
    rows = []
    for place, token in enumerate(tokens):
        angles = [(place + 2) * math.exp(-math.log(10000) * i / (width // 2 - 1)) for i in range(width // 2)]
        waves = torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
        rows.append(model.embed.tokens.weight[token] * math.sqrt(width) + waves.to(torch.float32))
    return torch.stack(rows)


def lsra(module, x, size, causal):
    left, right = x.chunk(2, -1)
    near = convolution(module.near, right, size, 2, causal)
    return torch.cat([attention(module.far, left, 2, causal=causal), near], -1)


def feed(block, x, number):
    channel = block.sublayers["channel"]
    return norm(block.wiring.norms[number], x + dense(channel.down, dense(channel.up, x).relu()))


def oracle(model, source, target):
    memory = embedded(model, source)
    for block, size in zip(model.encoder.blocks, SIZES, strict=True):
        memory = norm(block.wiring.norms[0], memory + lsra(block.sublayers["mixer"], memory, size, False))
        memory = feed(block, memory, 1)
    x = embedded(model, target)
    for block, size in zip(model.decoder.blocks, SIZES, strict=True):
        x = norm(block.wiring.norms[0], x + lsra(block.sublayers["mixer"], x, size, True))
        x = norm(block.wiring.norms[1], x + attention(block.sublayers["cross"], x, 4, memory))
        x = feed(block, x, 2)
    return x @ model.embed.tokens.weight.T


@pytest.fixture(scope="module")
def model():
    return build(narrowed(preset_tree("lite-transformer")))


def test_outputs_and_gradients(model, record_difference):
    found = model.logits(Batch(Rows(torch.tensor([TARGET])), Rows(torch.tensor([SOURCE]))))[0]
    expected = oracle(model, SOURCE, TARGET)
    outputs, gradients = differences(found, expected, list(model.parameters()))
    record_difference("Lite Transformer", "oracle from the authors' multibranch files", outputs, gradients)
    assert outputs < 1e-6 and gradients < 1e-6


def test_decoding_matches_the_whole_pass(model):
    with torch.no_grad():
        states = model.start(Rows(torch.tensor([SOURCE])))
        steps = [model.head(model.advance(Rows(torch.tensor([[token]])), states)) for token in TARGET]
    torch.testing.assert_close(torch.cat(steps, 1)[0], reference_logits(model, (SOURCE, TARGET)), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "mixer, message",
    [
        ({"kind": "lsra", "heads": 4, "size": 3}, "mixer.heads: half of width 12 is not divisible by 4 heads"),
        ({"kind": "dynamic-convolution", "heads": 5, "size": 3}, "mixer.heads: width 12 is not divisible by 5 heads"),
    ],
)
def test_mismatches_are_refused(mixer, message):
    with pytest.raises(ConfigError, match=message):
        parse(Model, tree(encoder_mixer=mixer))
