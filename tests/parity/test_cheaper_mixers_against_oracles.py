"""Performer, Linformer, Synthesizer and Infini-attention against their papers' equations, token by token, head by head.

No library that the tests may import has any of them; tests/nn says what the public ports do otherwise. Oracles share
the weights, and nothing else. Differences are those of a whole layer in double precision.
"""

import math

import pytest
import torch

from allyouneed.config import parse
from allyouneed.nn.batch import Rows
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.models.base import Model
from allyouneed.nn.sublayer import Mixer
from parity import difference

WIDTH, HEADS, D = 12, 3, 4
REFERENCE = "equations"
COMMON = parse(
    Model, {"kind": "encoder", "vocab": 5, "width": WIDTH, "encoder": [{"channel": {"kind": "ffn", "hidden": 4}}]}
)


def built(**keys):
    torch.manual_seed(0)
    module = Mixer.choose({"heads": HEADS} | keys).build(COMMON).double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return module


def dense(module, x):
    return x @ module.weight.T + module.bias


def heads(x):
    """(time, width) to one (time, head_width) for each head."""
    return x.split(D, -1)


def compared(module, oracle, time, record, system):
    """A row of `time` tokens and a shorter one, padded: outputs, and gradients of everything that learns."""
    lengths = [time, max(1, time - 5)]
    x = torch.randn(2, time, WIDTH, dtype=torch.double, requires_grad=True)
    probe = torch.randn(2, time, WIDTH, dtype=torch.double)
    layout = TokenLayout.of(Rows(torch.zeros(2, time, dtype=torch.long), lengths=torch.tensor(lengths)))
    found = module(x, Context(layout))
    pairs = [(found[row, :length], oracle(module, x[row, :length])) for row, length in enumerate(lengths)]
    learns = [x, *module.parameters()]
    gradients = []
    for side in (0, 1):
        total = sum((pair[side] * probe[row, : len(pair[side])]).sum() for row, pair in enumerate(pairs))
        gradients.append(torch.autograd.grad(total, learns))
    outputs = max(difference(*pair) for pair in pairs)
    slopes = max(difference(*pair) for pair in zip(*gradients, strict=True))
    record(system, REFERENCE, outputs, slopes)
    assert outputs < 1e-9 and slopes < 1e-9


# --- Performer --------------------------------------------------------------------------------------------------------


def positive(x, features):
    """Eq. 7, with h of eq. 6 and one ω a feature: φ(x) = exp(−‖x‖²/2)/√m (exp(ω_1·x), …, exp(ω_m·x)), x / d^(1/4)."""
    x = x / D**0.25
    return torch.stack([torch.exp(w @ x) for w in features]) * torch.exp(-(x @ x) / 2) / math.sqrt(len(features))


def rectified(x, features):
    return torch.stack([torch.clamp(w @ (x / D**0.25), min=0) for w in features]) + 1e-3


def performer(kernel, past):
    def oracle(module, x):
        features, phi = module.features.double(), positive if kernel == "softmax" else rectified
        q, k, v = (heads(part) for part in dense(module.qkv, x).chunk(3, -1))
        rows = []
        for i in range(len(x)):
            seen = range(i + 1 if past else len(x))
            found = []
            for h in range(HEADS):
                own = phi(q[h][i], features)
                weights = torch.stack([own @ phi(k[h][j], features) for j in seen])
                found.append(weights @ v[h][list(seen)] / weights.sum())
            rows.append(torch.cat(found))
        return dense(module.out, torch.stack(rows))

    return oracle


@pytest.mark.parametrize("kernel", ["softmax", "relu"])
@pytest.mark.parametrize("sees", ["past", "around"])
@pytest.mark.parametrize("time", [1, 13])
def test_performer(kernel, sees, time, record_difference):
    module = built(kind="performer", features=7, kernel=kernel, sees=sees)
    compared(module, performer(kernel, sees == "past"), time, record_difference, "Performer")


def test_performer_of_the_public_code(record_difference):
    """performer-pytorch, `softmax_kernel` and `linear_attention`: eps after the maximum of ω·x is taken out."""

    def kernel(x, features, axes):
        dash = x @ features.T * D**-0.25
        diagonal = x.square().sum(-1, keepdim=True) / 2 * D**-0.5
        return len(features) ** -0.5 * (torch.exp(dash - diagonal - dash.amax(axes, keepdim=True).detach()) + 1e-4)

    def oracle(module, x):
        features, found = module.features.double(), []
        for q, k, v in zip(*(heads(part) for part in dense(module.qkv, x).chunk(3, -1)), strict=True):
            q, k = kernel(q, features, -1), kernel(k, features, (-1, -2))
            found.append(q @ (k.T @ v) / (q @ k.sum(0))[:, None])
        return dense(module.out, torch.cat(found, -1))

    module = built(kind="performer", features=7, sees="around", eps=1e-4)
    compared(module, oracle, 13, record_difference, "Performer")


# --- Linformer --------------------------------------------------------------------------------------------------------


def linformer(sharing):
    def oracle(module, x):
        """Eq. 7; with E of shape (k, n), a shorter sentence is one that is followed by zeros."""
        table = module.projections.table
        q, k, v = (heads(part) for part in dense(module.qkv, x).chunk(3, -1))
        found = []
        for h in range(HEADS):
            first, last = table[0], table[-1]
            e, f = (first[h], last[h]) if sharing == "none" else (first[0], last[0])
            keys = torch.stack([sum(row[j] * k[h][j] for j in range(len(x))) for row in e])
            values = torch.stack([sum(row[j] * v[h][j] for j in range(len(x))) for row in f])
            found.append(torch.stack([(keys @ one / math.sqrt(D)).softmax(0) @ values for one in q[h]]))
        return dense(module.out, torch.cat(found, -1))

    return oracle


@pytest.mark.parametrize("sharing", ["none", "headwise", "key-value", "layerwise"])
@pytest.mark.parametrize("time", [1, 13, 16])
def test_linformer(sharing, time, record_difference):
    module = built(kind="linformer", length=16, rank=5, sharing=sharing)
    assert module.projections.table.shape[:2] == {"none": (2, HEADS), "headwise": (2, 1)}.get(sharing, (1, 1))
    compared(module, linformer(sharing), time, record_difference, "Linformer")


# --- Synthesizer ------------------------------------------------------------------------------------------------------


def synthesizer(synthesis, dot, past):
    def oracle(module, x):
        """Eq. 2-6, one score after another."""
        made = module.scores.synthesis
        v = heads(dense(module.v, x))
        hidden = None if module.hidden is None else heads(dense(module.hidden, x).clamp(min=0))
        q, k = (heads(dense(part, x)) for part in (module.q, module.k)) if dot else (None, None)
        out = [[] for _ in range(HEADS)]
        for h in range(HEADS):
            for i in range(len(x)):
                scores = []
                for j in range(i + 1 if past else len(x)):
                    if synthesis == "dense":
                        score = hidden[h][i] @ made.maps[0][h, :, j] + made.shifts[0][h, 0, j]
                    elif synthesis == "factorised-dense":
                        a = hidden[h][i] @ made.maps[0][h] + made.shifts[0][h, 0]
                        b = hidden[h][i] @ made.maps[1][h] + made.shifts[1][h, 0]
                        score = torch.outer(a, b).flatten()[j]  # a repeated b times, b tiled a times
                    elif synthesis == "random":
                        score = made.table[h, i, j]
                    else:
                        score = (made.left[h] @ made.right[h].T)[i, j]
                    if dot:
                        alpha = module.scores.mixture.exp() / module.scores.mixture.exp().sum()
                        score = alpha[0] * score + alpha[1] * (q[h][i] @ k[h][j]) / math.sqrt(D)
                    scores.append(score)
                out[h].append(torch.stack(scores).softmax(0) @ v[h][: len(scores)])
        return dense(module.out, torch.cat([torch.stack(rows) for rows in out], -1))

    return oracle


@pytest.mark.parametrize("synthesis", ["dense", "random", "factorised-dense", "factorised-random"])
@pytest.mark.parametrize("dot", [False, True])
@pytest.mark.parametrize("pattern", ["full", "causal"])
def test_synthesizer(synthesis, dot, pattern, record_difference):
    module = built(kind="synthesizer", length=14, synthesis=synthesis, dot=dot, pattern=pattern, rank=3)
    compared(module, synthesizer(synthesis, dot, pattern == "causal"), 11, record_difference, "Synthesizer")


# --- Infini-attention -------------------------------------------------------------------------------------------------


def turned(x, place, base=10000.0):
    """Rotary by halves, of one head's vector at one place."""
    half = len(x) // 2
    angles = torch.tensor([place * base ** (-i / half) for i in range(half)], dtype=torch.double)
    a, b = x[:half], x[half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])


def infini(segment, update, rotary, first="gated"):
    def sigma(x):
        return torch.where(x > 0, x + 1, torch.exp(torch.clamp(x, max=0)))

    def oracle(module, x):
        """Eq. 1-6 and 2.1, one token after another; places are those of the whole text."""
        q, k, v = (heads(part) for part in dense(module.qkv, x).chunk(3, -1))
        found = []
        for h in range(HEADS):
            memory, z, rows = x.new_zeros(D, D), x.new_zeros(D), []
            gate = 1 / (1 + torch.exp(-module.gate[h]))
            for start in range(0, len(x), segment):
                places = range(start, min(len(x), start + segment))
                for i in places:
                    turn = turned if rotary else lambda one, place: one
                    scores = [turn(q[h][i], i) @ turn(k[h][j], j) / math.sqrt(D) for j in range(start, i + 1)]
                    near = torch.stack(scores).softmax(0) @ v[h][start : i + 1]
                    far = sigma(q[h][i]) @ memory / (sigma(q[h][i]) @ z) if start else torch.zeros_like(near)
                    rows.append(near if first == "local" and not start else gate * far + (1 - gate) * near)
                before, old = memory, z
                for j in places:
                    key, value = sigma(k[h][j]), v[h][j]
                    if update == "delta" and start:
                        value = value - key @ before / (key @ old)
                    memory, z = memory + torch.outer(key, value), z + key
            found.append(torch.stack(rows))
        return dense(module.out, torch.cat(found, -1))

    return oracle


@pytest.mark.parametrize("update", ["linear", "delta"])
@pytest.mark.parametrize("positions", ["none", "rotary"])
@pytest.mark.parametrize(("time", "segment"), [(1, 4), (12, 4), (23, 5), (9, 30)])
def test_infini(update, positions, time, segment, record_difference):
    module = built(kind="infini", segment=segment, update=update, positions=positions)
    compared(module, infini(segment, update, positions == "rotary"), time, record_difference, "Infini-attention")


def test_infini_without_a_gate_on_the_empty_memory(record_difference):
    """infini-transformer-pytorch: without past memories, attention returns what is local."""
    module = built(kind="infini", segment=5, first="local")
    compared(module, infini(5, "delta", False, "local"), 23, record_difference, "Infini-attention")
