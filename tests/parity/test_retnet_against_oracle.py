"""The shipped RetNet preset, narrowed, against Sun et al. 2023, "Retentive Network", eq. 1-8, written out with loops.

One sentence, no batch, no state. Where the paper is silent the authors' code decides: the angles of Θ include both ends
of 1 … 1/10000, GroupNorm is RMS without weights, and what scores are divided by is no part of the gradient.
"""

import pytest
import torch
from torch import nn

from allyouneed.config import parse, preset_tree
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.mixers.retention import GatedRetention, Retention
from allyouneed.nn.models.base import Model
from any_part import build
from parity import difference

WIDTH, HEADS, VALUES, HIDDEN, VOCAB = 12, 3, 5, 14, 11


def rms(x, weight=None):
    y = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return y if weight is None else y * weight


def dense(module, x):
    return x @ module.weight.T


def turned(x, place):
    """x e^{iθ·place}, features 2i and 2i+1 being the parts of a complex number."""
    planes = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    theta = 10000.0 ** -torch.linspace(0, 1, len(planes), dtype=torch.double)
    return planes * torch.exp(1j * theta * place)


def heads_of(module, x):
    """q, k, v of each head and place; keys divided by √width."""
    time, heads = len(x), module.heads
    q, k, v = (dense(part, x).view(time, heads, -1) for part in (module.q, module.k, module.v))
    return q, k * module.keys**-0.5, v


def closed(module, x, heads):
    """Eq. 8: norm of each head, swish gate, output."""
    gate = dense(module.gate, x)
    return dense(module.out, gate * gate.sigmoid() * rms(torch.stack(heads, 1)).flatten(1))


def parallel(module, x, absolute=False):
    """Eq. 5 and "retention score normalization": all three divisions, row by row."""
    (q, k, v), time = heads_of(module, x), len(x)
    found = []
    for head in range(module.heads):
        gamma, rows = 1 - 2.0 ** (-5 - head), []
        for n in range(time):
            fading = torch.tensor([gamma ** (n - m) for m in range(n + 1)], dtype=torch.double)
            fading = fading / fading.sum().sqrt()
            meet = [(turned(q[n, head], n) * turned(k[m, head], m).conj()).real.sum() for m in range(n + 1)]
            scores = torch.stack(meet) * fading
            total = scores.abs().sum() if absolute else scores.sum().abs()  # the authors' code: clamp(min=1, max=5e4)
            scores = scores / total.detach().clamp(min=1, max=5e4 if absolute else None)
            rows.append(sum(scores[m] * v[m, head] for m in range(n + 1)))
        found.append(torch.stack(rows))
    return closed(module, x, found)


def recurrent(module, x, decays=None):
    """Eq. 6 without the divisions, which the norm takes back but for its eps."""
    (q, k, v), time = heads_of(module, x), len(x)
    found = []
    for head in range(module.heads):
        s, rows = torch.zeros(module.keys // 2, v.shape[-1], dtype=torch.complex128), []
        for n in range(time):
            gamma = 1 - 2.0 ** (-5 - head) if decays is None else decays[n, head]
            s = gamma * s + turned(k[n, head], n).conj()[:, None] * v[n, head]
            rows.append((turned(q[n, head], n)[:, None] * s).real.sum(0))
        found.append(torch.stack(rows))
    return closed(module, x, found)


def oracle(model, tokens):
    x = model.embed.tokens.weight[tokens]
    for block in model.decoder.blocks:
        mixer, channel = block.sublayers["mixer"], block.sublayers["channel"]
        norms = block.wiring.norms
        x = x + parallel(mixer, rms(x, norms[0].weight))
        gate, up = dense(channel.gate_up, rms(x, norms[1].weight)).chunk(2, -1)
        x = x + dense(channel.down, gate * gate.sigmoid() * up)
    return rms(x, model.decoder.end.weight) @ model.embed.tokens.weight.T


def narrowed():
    given = preset_tree("retnet-1.3b") | {"vocab": VOCAB, "width": WIDTH}
    layer = given["decoder"][0] | {"repeat": 2}
    layer["mixer"] |= {"heads": HEADS, "value_width": VALUES}
    layer["channel"] |= {"hidden": HIDDEN}
    return given | {"decoder": [layer]}


@pytest.mark.parametrize("time", [1, 9, 33])
def test_logits_and_gradients_are_those_of_the_equations(time, record_difference):
    model = build(parse(Model, narrowed()))
    tokens = torch.randint(0, VOCAB, (time,), generator=torch.Generator().manual_seed(time))
    ours, expected = model.logits(Batch(Rows(tokens[None])))[0], oracle(model, tokens)
    parameters = list(model.parameters())
    own, theirs = (torch.autograd.grad(logits.log_softmax(-1)[:, 3].sum(), parameters) for logits in (ours, expected))
    outputs = difference(ours, expected)
    gradients = max(difference(one, other) for one, other in zip(own, theirs, strict=True))
    record_difference("RetNet", "the paper's equations", outputs, gradients)
    assert outputs < 1e-9 and gradients < 1e-8


def one(config, time, seed=0):
    torch.manual_seed(seed)
    module = config.build(Common(width=WIDTH)).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module, torch.randn(time, WIDTH, dtype=torch.double, requires_grad=True)


def ours(module, x):
    return module(x[None], Context(TokenLayout(torch.arange(len(x))[None], start=0)))[0]


def test_recurrent_and_parallel_forms_agree_up_to_eps():
    module, x = one(Retention(heads=HEADS, head_norm={"kind": "rms", "eps": 0.0, "weight": False}), 63)
    expected = recurrent(module, x)  # its norm has an eps of 1e-6
    torch.testing.assert_close(ours(module, x), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("time", [1, 9, 33])
def test_the_normaliser_of_the_authors_parallel_form(time, record_difference):
    module, x = one(Retention(heads=HEADS, value_width=VALUES, normaliser="absolute"), time)
    found, expected = ours(module, x), parallel(module, x, absolute=True)
    weights = list(module.parameters())
    pairs = zip(*(torch.autograd.grad(y.sin().sum(), weights) for y in (found, expected)), strict=True)
    outputs, gradients = difference(found, expected), max(difference(a, b) for a, b in pairs)
    record_difference("RetNet", "oracle from torchscale's parallel_forward", outputs, gradients)
    assert outputs < 1e-9 and gradients < 1e-9


@pytest.mark.parametrize("time", [5, 63])
def test_gated_retention_is_the_recurrence_of_yoco(time):
    """Sun et al. 2024, eq. 4 and 5: γ = σ(X W_γ)^{1/16}."""
    module, x = one(GatedRetention(heads=HEADS), time)
    expected = recurrent(module, x, dense(module.decays, x).sigmoid() ** (1 / 16))
    found = ours(module, x)
    weights = [x, *module.parameters()]
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    own = torch.autograd.grad(found.sin().sum(), weights)
    torch.testing.assert_close(own, torch.autograd.grad(expected.sin().sum(), weights), atol=1e-9, rtol=1e-9)
