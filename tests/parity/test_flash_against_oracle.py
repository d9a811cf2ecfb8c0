"""FLASH against Hua et al. 2022, written out token by token: the gated attention unit (eq. 3, 4 and code 1) and mixed
chunk attention (eq. 5-7 and code 2).

Where the paper is silent: RoPE pairs features i and i + s/2, T5's bias has 32 buckets up to a distance of 128, and a
token counts as a key of itself. `length` is the paper's n; without it, scores are divided by the number of keys.
"""

import math

import pytest
import torch

from allyouneed.config import parse, preset_tree
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.mixers.gau import GAU, MixedChunk
from allyouneed.nn.models.base import Model
from any_part import build
from parity import difference

WIDTH, KEYS, HIDDEN, CHUNK, VOCAB = 6, 4, 10, 5, 11


def dense(part, x):
    return x @ part.weight.T + part.bias


def rope(x, position):
    half = len(x) // 2
    angles = position * 10000.0 ** (-torch.arange(half, dtype=torch.double) / half)
    a, b = x[:half], x[half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()))


def bucket(distance, causal):
    """Raffel et al. 2020: half of the buckets for one distance each, the others logarithmic up to 128."""
    buckets, first = (32, 0) if causal else (16, 16 if distance < 0 else 0)
    distance = max(distance, 0) if causal else abs(distance)
    if distance < buckets // 2:
        return first + distance
    far = math.log(distance / (buckets // 2)) / math.log(128 / (buckets // 2)) * (buckets // 2)
    return first + min(buckets - 1, buckets // 2 + int(far))


def unit(module, x, causal, chunk=None, length=None, positions="both"):
    """x (time, width); `chunk` None: every pair, otherwise pairs within chunks and linear attention between them."""
    u, v, z = (part * part.sigmoid() for part in dense(module.up, x).split([HIDDEN, HIDDEN, KEYS], -1))
    place = rope if positions != "bias" else lambda one, position: one

    def made(number):
        scaled = z * module.gains[number] + module.offsets[number]
        return [place(scaled[t], t) for t in range(len(x))]

    q, k, found = made(0), made(1), []
    lin_q, lin_k = (made(2), made(3)) if chunk is not None else (q, k)
    for t in range(len(x)):
        here = [s for s in range(len(x)) if (chunk is None or s // chunk == t // chunk) and (s <= t or not causal)]
        total = torch.zeros(HIDDEN, dtype=torch.double)
        for s in here:
            score = q[t] @ k[s] / (length or len(here))
            if positions != "rotary":
                score = score + module.bias.table.weight[bucket(t - s, causal), 0]
            total = total + score.relu() ** 2 * v[s]
        if chunk is not None:
            far = [s for s in range(len(x)) if s // chunk < t // chunk or not causal]
            for s in far:
                total = total + (lin_q[t] @ lin_k[s]) / (length or len(far)) * v[s]
        found.append(u[t] * total)
    return dense(module.out, torch.stack(found))


CASES = {
    "quadratic": (GAU, {}, False),
    "quadratic, causal": (GAU, {"pattern": "causal"}, True),
    "quadratic, causal, n of the paper": (GAU, {"pattern": "causal", "length": 23, "positions": "rotary"}, True),
    "mixed chunks": (MixedChunk, {"chunk": CHUNK, "sees": "around"}, False),
    "mixed chunks, causal": (MixedChunk, {"chunk": CHUNK}, True),
    "mixed chunks, causal, n of the paper": (MixedChunk, {"chunk": CHUNK, "length": 23, "positions": "bias"}, True),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name, record_difference):
    kind, keys, causal = CASES[name]
    torch.manual_seed(0)
    module = kind(hidden=HIDDEN, key_width=KEYS, **keys).build(Common(width=WIDTH)).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    x = torch.randn(23, WIDTH, dtype=torch.double, requires_grad=True)
    found = module(x[None], Context(TokenLayout(torch.arange(23)[None], start=0)))[0]
    options = {key: keys[key] for key in ("chunk", "length", "positions") if key in keys}
    expected = unit(module, x, causal, **options)
    weights = [x, *module.parameters()]
    own, theirs = (torch.autograd.grad(y.sin().sum(), weights) for y in (found, expected))
    outputs = difference(found, expected)
    gradients = max(difference(one, other) for one, other in zip(own, theirs, strict=True))
    assert outputs < 1e-10 and gradients < 1e-9
    record_difference("FLASH", "the paper's equations", outputs, gradients)


def test_the_preset_narrowed(record_difference):
    given = preset_tree("flash") | {"vocab": VOCAB, "width": WIDTH}
    layer = given["decoder"][0] | {"repeat": 2}
    layer["mixer"] |= {"hidden": HIDDEN, "key_width": KEYS, "chunk": CHUNK}
    model = build(parse(Model, given | {"decoder": [layer]}))
    tokens = torch.randint(0, VOCAB, (17,), generator=torch.Generator().manual_seed(0))

    def norm(part, x):
        return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-5) * part.weight

    places = model.embed.positions(torch.arange(17)[None])[0].double()
    x = model.embed.tokens.weight[tokens] + places
    for block in model.decoder.blocks:
        x = x + unit(block.sublayers["mixer"], norm(block.wiring.norms[0], x), True, CHUNK)
    expected = norm(model.decoder.end, x) @ model.embed.tokens.weight.T
    found = model.logits(Batch(Rows(tokens[None])))[0]
    own, theirs = (torch.autograd.grad(y.sin().sum(), list(model.parameters())) for y in (found, expected))
    outputs = difference(found, expected)
    gradients = max(difference(one, other) for one, other in zip(own, theirs, strict=True))
    assert outputs < 1e-8 and gradients < 1e-7, (outputs, gradients)
    record_difference("FLASH", "the paper's equations", outputs, gradients)
