"""The shipped preset, narrowed, against Gehring et al. 2017, 3.1–3.4, written out place by place."""

import math

import pytest
import torch

from allyouneed.config import parse, preset_tree
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from any_part import build, reference_logits
from shrink import shrink
from trials import weighed

PAIRS = [([3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8]), ([2], [7, 1, 8]), ([8, 2, 8, 4], [5])]


@pytest.fixture(scope="module")
def model():
    found = build(shrink(parse(Model, preset_tree("convs2s"))))
    with torch.no_grad():  # nothing is normalised here: large weights would let a query see one word and no other
        for parameter in found.parameters():
            parameter.mul_(0.4)
    return found


def embedded(embed, tokens):
    """3.1: a vector of the word and one of its place."""
    return [embed.tokens.weight[token] + embed.positions.weight[place] for place, token in enumerate(tokens)]


def mapped(block, x):
    out = block.sublayers["mixer"].out
    return [out.weight @ row + out.bias for row in x]


def glu(module, x, first):
    """3.2: a kernel of 3 places makes 2d features, v([A B]) = A ⊗ σ(B); zeros stand beyond the ends."""
    kernel = module.out.weight.unflatten(1, (-1, 3))
    rows = []
    for t in range(len(x)):
        y = module.out.bias
        for j in range(3):
            if 0 <= t + first + j < len(x):
                y = y + kernel[:, :, j] @ x[t + first + j]
        a, b = y.chunk(2)
        rows.append(a * torch.sigmoid(b))
    return rows


def oracle(model, source, target):
    e = embedded(model.source_embed, source)
    first, *blocks, last = model.encoder.blocks
    x = mapped(first, e)
    for block in blocks:
        h = glu(block.sublayers["mixer"], x, -1)
        x = [(own + before) * math.sqrt(0.5) for own, before in zip(h, x, strict=True)]
    z = mapped(last, x)

    g = embedded(model.embed, target)
    first, *blocks, last = model.decoder.blocks
    x, m = mapped(first, g), len(source)
    for block in blocks:
        h, query = glu(block.sublayers["mixer"], x, -2), block.sublayers["cross"].query
        rows = []
        for i in range(len(x)):
            d = query.weight @ h[i] + query.bias + g[i]  # eq. 1
            a = torch.stack([d @ word for word in z]).softmax(0)
            c = sum(a[j] * (z[j] + e[j]) for j in range(m))  # eq. 2
            rows.append((x[i] + h[i] + m * math.sqrt(1 / m) * c) * math.sqrt(0.5))
        x = rows
    x = torch.stack(mapped(last, x))
    return x @ model.head.weight.T + model.head.bias


def test_logits_and_gradients(model, record_difference):
    worst, steepest = 0.0, 0.0
    for source, target in PAIRS:
        found = model.logits(Batch(Rows.of([target]), Rows.of([source])))[0]
        expected = oracle(model, source, target)
        torch.testing.assert_close(reference_logits(model, (source, target)), expected.detach(), atol=1e-9, rtol=1e-9)
        worst = max(worst, (found - expected).abs().max().item() / max(1.0, expected.abs().max().item()))
        parameters = [*model.parameters()]
        one, other = (torch.autograd.grad(weighed(y), parameters, materialize_grads=True) for y in (found, expected))
        gaps = [(a - b).abs().max().item() / max(1.0, b.abs().max().item()) for a, b in zip(one, other, strict=True)]
        steepest = max(steepest, *gaps)
    assert worst < 1e-9 and steepest < 1e-9, (worst, steepest)
    record_difference("ConvS2S", "sections 3.1–3.4 written out", worst, steepest)


def test_sizes_are_the_papers():
    """5.1, WMT'16 English-Romanian; both sides have attention in every block."""
    config = parse(Model, preset_tree("convs2s"))
    with torch.device("meta"):
        built = config.build()
    assert len(built.encoder.blocks) == len(built.decoder.blocks) == 22
    crosses = [block for block in built.decoder.blocks if "cross" in block.sublayers]
    assert len(crosses) == 20
    assert {tuple(block.sublayers["mixer"].out.weight.shape) for block in crosses} == {(1024, 3 * 512)}
