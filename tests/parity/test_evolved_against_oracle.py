"""The shipped preset, narrowed, against the cells of So, Liang, Le 2019, "The Evolved Transformer", figure 3.

They are written out place by place, as the authors' tensor2tensor file has them: one sentence, no batch, no state.
"""

import math

import pytest
import torch
from torch import nn

from allyouneed.config import parse, preset_tree
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from any_part import build, reference_logits

NARROW = {
    "vocab": {37000: 11},
    "width": {512: 8, 2048: 32, 256: 4, 1024: 16},
    "hidden": {2048: 32},
    "heads": {8: 2, 16: 4},
}


def narrowed(node):
    """The same tree with smaller numbers in the same proportions."""
    if isinstance(node, dict):
        return {key: NARROW[key][value] if key in NARROW else narrowed(value) for key, value in node.items()}
    return node


def norm(module, x):
    return nn.functional.layer_norm(x, x.shape[-1:], module.weight, module.bias, 1e-5)


def dense(module, x):
    return x @ module.weight.T + module.bias


def filled(x, width):
    return torch.cat([x, x.new_zeros(len(x), width - x.shape[1])], 1)


def convolution(x, kernel, bias, first):
    """kernel (outputs, inputs, size); position t covers t + first, t + first + 1, …; zeros beyond the ends."""
    rows = []
    for t in range(len(x)):
        row = bias
        for j in range(kernel.shape[2]):
            if 0 <= t + first + j < len(x):
                row = row + kernel[:, :, j] @ x[t + first + j]
        rows.append(row)
    return torch.stack(rows)


def full(module, x, size, first):
    return convolution(x, module.out.weight.unflatten(1, (-1, size)), module.out.bias, first)


def separable(module, x, first):
    """One filter per feature, then a dense layer: together one kernel."""
    kernel = module.out.weight[:, :, None] * module.taps[None]
    return convolution(x, kernel, module.out.bias, first)


def attention(module, x, heads, memory=None, causal=False):
    if memory is None:
        q, k, v = dense(module.qkv, x).chunk(3, -1)
    else:
        q, (k, v) = dense(module.q, x), dense(module.kv, memory).chunk(2, -1)
    size = q.shape[1] // heads
    rows = []
    for t in range(len(x)):
        seen = slice(0, t + 1) if causal else slice(None)
        found = []
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            weights = (k[seen, own] @ q[t, own] / math.sqrt(size)).softmax(0)
            found.append(weights @ v[seen, own])
        rows.append(torch.cat(found))
    return dense(module.out, torch.stack(rows))


def encoder_cell(gate, convolve, read, x):
    width = x.shape[1]
    # gated linear unit
    seen = norm(gate.wiring.norms[0], x)
    values, gates = dense(gate.sublayers["mixer"].out, seen).chunk(2, -1)
    x = x + values * gates.sigmoid()
    # a dense layer beside a convolution of 3, then a separable one of 9
    branches = convolve.sublayers["mixer"]
    seen = norm(convolve.wiring.norms[0], x)
    left = dense(branches.pieces["left"].out, seen).relu()
    right = full(branches.pieces["right"], seen, 3, -1).relu()
    assert left.shape[1] == 4 * width and right.shape[1] == width // 2
    joined = norm(branches.norm, left + filled(right, 4 * width))
    x = x + filled(separable(branches.pieces["then"], joined, -4), width)
    # self-attention and a feed-forward layer
    x = x + attention(read.sublayers["mixer"], norm(read.wiring.norms[0], x), heads=2)
    seen = norm(read.wiring.norms[1], x)
    return x + dense(read.sublayers["channel"].down, dense(read.sublayers["channel"].up, seen).relu())


def decoder_cell(look, convolve, write, x, memory):
    width = x.shape[1]
    # self-attention of twice as many heads beside attention to the encoder
    seen = norm(look.wiring.norms[0], x)
    left = attention(look.sublayers["mixer"], seen, heads=4, causal=True)
    x = x + left + attention(look.sublayers["cross"], seen, 2, memory)
    # two separable convolutions, of 11 and 7, side by side, then another of 7
    branches = convolve.sublayers["mixer"]
    seen = norm(convolve.wiring.norms[0], x)
    left = separable(branches.pieces["left"], seen, -10).relu()
    right = separable(branches.pieces["right"], seen, -6)
    assert left.shape[1] == 2 * width and right.shape[1] == width // 2
    joined = norm(branches.norm, left + filled(right, 2 * width))
    x = x + separable(branches.pieces["then"], joined, -6)
    # the usual three; swish, and a norm inside the last one
    x = x + attention(write.sublayers["mixer"], norm(write.wiring.norms[0], x), heads=2, causal=True)
    x = x + attention(write.sublayers["cross"], norm(write.wiring.norms[1], x), 2, memory)
    hidden = dense(write.sublayers["channel"].up, norm(write.wiring.norms[2], x))
    hidden = norm(write.sublayers["channel"].norm, hidden * hidden.sigmoid())
    return x + dense(write.sublayers["channel"].down, hidden)


def embedded(model, tokens):
    width = model.embed.tokens.weight.shape[1]
    rows = []
    for place, token in enumerate(tokens):
        angles = [place / 10000 ** (2 * (i // 2) / width) for i in range(width)]
        waves = torch.tensor([math.cos(a) if i % 2 else math.sin(a) for i, a in enumerate(angles)])
        rows.append(model.embed.tokens.weight[token] * math.sqrt(width) + waves.to(torch.float32))
    return torch.stack(rows)


def oracle(model, source, target):
    encoder, decoder = model.encoder, model.decoder
    memory = embedded(model, source)
    for cell in range(3):
        memory = encoder_cell(*encoder.blocks[3 * cell : 3 * cell + 3], memory)
    memory = norm(encoder.end, memory)
    x = embedded(model, target)
    for cell in range(4):
        x = decoder_cell(*decoder.blocks[3 * cell : 3 * cell + 3], x, memory)
    return norm(decoder.end, x) @ model.embed.tokens.weight.T


@pytest.fixture(scope="module")
def model():
    return build(narrowed(preset_tree("evolved-transformer")))


SOURCE, TARGET = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9]


def test_outputs_and_gradients(model, record_difference):
    weights = list(model.parameters())
    found = model.logits(Batch(Rows(torch.tensor([TARGET])), Rows(torch.tensor([SOURCE]))))[0]
    expected = oracle(model, SOURCE, TARGET)
    outputs = (found - expected).abs().max().item()
    own = torch.autograd.grad(found.sin().sum(), weights)
    theirs = torch.autograd.grad(expected.sin().sum(), weights)
    pairs = zip(own, theirs, strict=True)
    gradients = max((a - b).abs().max().item() / max(1.0, b.abs().max().item()) for a, b in pairs)
    record_difference("Evolved Transformer", "oracle from tensor2tensor's evolved_transformer.py", outputs, gradients)
    assert all(gradient.abs().max() > 1e-6 for gradient in theirs)
    assert outputs < 1e-6 and gradients < 1e-6


def test_decoding_matches_the_whole_pass(model):
    with torch.no_grad():
        states = model.start(Rows(torch.tensor([SOURCE])))
        steps = [model.head(model.advance(Rows(torch.tensor([[token]])), states)) for token in TARGET]
    torch.testing.assert_close(torch.cat(steps, 1)[0], reference_logits(model, (SOURCE, TARGET)), rtol=0, atol=1e-9)


def test_it_trains():
    torch.manual_seed(0)
    model = parse(Model, narrowed(preset_tree("evolved-transformer")) | {"dropout": 0.0}).build()
    batch = Batch(Rows.of([[1, 5, 6, 7], [1, 9]]), Rows.of([[4, 5], [8, 7, 6]]))
    labels = torch.tensor([[5, 6, 7, 2], [9, 2, -100, -100]])
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = nn.functional.cross_entropy(model.logits(batch).flatten(0, 1), labels.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_size():
    """Nine and twelve layers; 3 million parameters more than the base Transformer, as in the paper's tables."""
    config = parse(Model, preset_tree("evolved-transformer"))
    assert [len(config.encoder), len(config.decoder)] == [9, 12]
    base = parse(Model, preset_tree("transformer-base"))
    assert config.cost().parameters - base.cost().parameters == pytest.approx(3e6, rel=0.05)
