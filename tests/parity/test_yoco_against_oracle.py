"""The shipped YOCO preset, narrowed, against Sun et al. 2024, "You Only Cache Once", eq. 1-5, written out with loops.

One sentence, no batch, no state. Where the paper is silent the authors' code decides: RMS norms, embeddings times
√width, rotary angles that include both ends, and γ = exp(log σ(x W_γ) / 16).
"""

import pytest
import torch

from allyouneed.config import parse, preset_tree
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from any_part import build
from parity import difference

WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, VOCAB = 16, 4, 2, 4, 14, 11


def rms(x, weight=None):
    y = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return y if weight is None else y * weight


def dense(module, x):
    return x @ module.weight.T


def turned(x, place):
    """x e^{iθ·place}, features 2i and 2i+1 being the parts of a complex number."""
    planes = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    theta = 10000.0 ** -torch.linspace(0, 1, len(planes), dtype=torch.double)
    return planes * torch.exp(1j * theta * place)


def gated_retention(module, x):
    """Eq. 4 and 5."""
    q, k, v = (dense(part, x).view(len(x), HEADS, HEAD) for part in (module.q, module.k, module.v))
    gamma, gate, places = dense(module.decays, x).sigmoid() ** (1 / 16), dense(module.gate, x), []
    s = [torch.zeros(HEAD // 2, HEAD, dtype=torch.complex128) for _ in range(HEADS)]
    for n in range(len(x)):
        rows = []
        for h in range(HEADS):
            s[h] = gamma[n, h] * s[h] + turned(k[n, h], n).conj()[:, None] * v[n, h] * HEAD**-0.5
            rows.append((turned(q[n, h], n)[:, None] * s[h]).real.sum(0))
        places.append(torch.cat([rms(row) for row in rows]))
    return dense(module.out, gate * gate.sigmoid() * torch.stack(places))


def cross(module, x, keys, values):
    """Eq. 3: softmax over the shared keys up to one's own place; HEADS / KV_HEADS queries to a key."""
    q, places = dense(module.q, x).view(len(x), HEADS, HEAD), []
    for n in range(len(x)):
        found = []
        for h in range(HEADS):
            of = h // (HEADS // KV_HEADS)
            meet = [(turned(q[n, h], n) * turned(keys[m, of], m).conj()).real.sum() for m in range(n + 1)]
            weights = torch.softmax(torch.stack(meet) * HEAD**-0.5, 0)
            found.append(sum(weights[m] * values[m, of] for m in range(n + 1)))
        places.append(torch.cat(found))
    return dense(module.out, torch.stack(places))


def swiglu(module, x):
    gate, up = dense(module.gate_up, x).chunk(2, -1)
    return dense(module.down, gate * gate.sigmoid() * up)


def oracle(model, tokens):
    x = model.embed.tokens.weight[tokens] * WIDTH**0.5
    keys = values = None
    for stack, slot in ((model.first, "mixer"), (model.second, "cross")):
        if slot == "cross":  # eq. 2: once, of what the first stack gives
            y = rms(x, model.keys.norm.weight)
            keys, values = (dense(part, y).view(len(x), KV_HEADS, HEAD) for part in (model.keys.k, model.keys.v))
        for block in stack.blocks:
            norms, mixer, y = block.wiring.norms, block.sublayers[slot], rms(x, block.wiring.norms[0].weight)
            x = x + (gated_retention(mixer, y) if slot == "mixer" else cross(mixer, y, keys, values))
            x = x + swiglu(block.sublayers["channel"], rms(x, norms[1].weight))
    return rms(x, model.second.end.weight) @ model.head.weight.T


def narrowed():
    given = preset_tree("yoco-3b") | {"vocab": VOCAB, "width": WIDTH}
    for side, slot in (("first", "mixer"), ("second", "cross")):
        layer = given[side][0] | {"repeat": 2}
        layer[slot] |= {"heads": HEADS} | ({"kv_heads": KV_HEADS} if slot == "cross" else {})
        layer["channel"] |= {"hidden": HIDDEN}
        given[side] = [layer]
    return given


@pytest.mark.parametrize("time", [2, 9, 33])
def test_logits_and_gradients_are_those_of_the_equations(time, record_difference):
    model = build(parse(Model, narrowed()))
    tokens = torch.randint(0, VOCAB, (time,), generator=torch.Generator().manual_seed(time))
    ours, expected = model.logits(Batch(Rows(tokens[None])))[0], oracle(model, tokens)
    parameters = list(model.parameters())
    own, theirs = (torch.autograd.grad(logits.log_softmax(-1)[:, 3].sum(), parameters) for logits in (ours, expected))
    outputs = difference(ours, expected)
    gradients = max(difference(one, other) for one, other in zip(own, theirs, strict=True))
    record_difference("YOCO", "the paper's equations", outputs, gradients)
    assert outputs < 1e-9 and gradients < 1e-8
