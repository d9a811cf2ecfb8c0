"""The shipped preset, narrowed, against Bahdanau, Cho, Bengio 2015, appendix A, written out word by word.

Where a model here has two linear maps in a row, the paper has their product: the oracle multiplies them first.
"""

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
    return build(shrink(parse(Model, preset_tree("rnnsearch"))))


def after(matrix, bias, widen):
    """One map after another, as one: W (V x + c) + b."""
    return matrix @ widen.weight, matrix @ widen.bias + bias


def read(rnn, which, embedded, widen):
    """A.2.1: one direction. The paper's update gate weighs the new state, torch's the old one: z = 1 − theirs."""
    w, u, b, c = (getattr(rnn, f"{name}_l0{which}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    w, b = after(w, b + c, widen)
    (w_r, w_z, w), (u_r, u_z, u), (b_r, b_z, b) = w.chunk(3), u.chunk(3), b.chunk(3)
    h, found = torch.zeros(u.shape[1], dtype=u.dtype), []
    for e in embedded:
        r = torch.sigmoid(w_r @ e + u_r @ h + b_r)
        z = torch.sigmoid(-(w_z @ e + u_z @ h + b_z))
        h = (1 - z) * h + z * torch.tanh(w @ e + u @ (r * h) + b)
        found.append(h)
    return found


def oracle(model, source, target):
    rnn = model.encoder.blocks[0].sublayers["mixer"].rnn
    widen = model.source_embed.widen
    words = [model.source_embed.tokens.weight[token] for token in source]
    forwards, backwards = read(rnn, "", words, widen), read(rnn, "_reverse", words[::-1], widen)[::-1]
    h = [torch.cat(both) for both in zip(forwards, backwards, strict=True)]

    part, head, widen = model.decoder.blocks[0].sublayers["cross"], model.head, model.embed.widen
    hidden, width = part.hidden, len(h[0])
    w, b = after(part.seen.weight, part.seen.bias, widen)
    (w_r, w_z, w), (b_r, b_z, b) = w.chunk(3), b.chunk(3)
    c_r, c_z, c_ = part.found.weight.chunk(3)
    u_r, u_z = part.gates.T.chunk(2)
    # the deep output: U_o, V_o, C_o
    readout = head.maxout.weight @ part.out.weight
    bias = head.maxout.weight @ part.out.bias + head.maxout.bias
    u_o, v_o, c_o = readout.split([hidden, width, width], 1)
    v_o, bias = after(v_o, bias, widen)

    s = torch.tanh(part.start.weight @ backwards[0] + part.start.bias)  # s_0 = tanh(W_s ←h_1)
    scores, weights = [], []
    for token in target:
        e = model.embed.tokens.weight[token]
        energies = [
            part.score @ torch.tanh(part.query.weight @ s + part.query.bias + part.key.weight @ word) for word in h
        ]
        alpha = torch.stack(energies).softmax(0)
        c = sum(a * word for a, word in zip(alpha, h, strict=True))
        t = u_o @ s + v_o @ e + c_o @ c + bias
        t = torch.stack([torch.maximum(t[2 * j], t[2 * j + 1]) for j in range(len(t) // 2)])
        scores.append(head.weight @ t + head.bias)
        weights.append(alpha)
        r = torch.sigmoid(w_r @ e + u_r @ s + c_r @ c + b_r)
        z = torch.sigmoid(-(w_z @ e + u_z @ s + c_z @ c + b_z))
        s = (1 - z) * s + z * torch.tanh(w @ e + part.own.T @ (r * s) + c_ @ c + b)
    return torch.stack(scores), torch.stack(weights)


def test_logits_alignments_and_gradients(model, record_difference):
    worst, steepest = 0.0, 0.0
    for source, target in PAIRS:
        batch = Batch(Rows.of([target]), Rows.of([source]))
        found, (expected, weights) = model.logits(batch)[0], oracle(model, source, target)
        worst = max(worst, (found - expected).abs().max().item())
        torch.testing.assert_close(reference_logits(model, (source, target)), expected.detach(), atol=1e-9, rtol=0)
        torch.testing.assert_close(model.attention(batch)[0][0, 0], weights, atol=1e-9, rtol=0)
        parameters = [*model.parameters()]
        one, other = (torch.autograd.grad(weighed(y), parameters, materialize_grads=True) for y in (found, expected))
        gaps = [(a - b).abs().max().item() / max(1.0, b.abs().max().item()) for a, b in zip(one, other, strict=True)]
        steepest = max(steepest, *gaps)
    assert worst < 1e-9 and steepest < 1e-9, (worst, steepest)
    record_difference("RNNsearch", "appendix A written out", worst, steepest)


def test_sizes_are_the_papers():
    """A.2.3 and B: 1000 hidden units, 620 of an embedding, 1000 of an alignment, maxout of 500."""
    model = parse(Model, preset_tree("rnnsearch"))
    with torch.device("meta"):
        built = model.build()
    assert built.embed.tokens.weight.shape == built.source_embed.tokens.weight.shape == (30000, 620)
    assert built.encoder.blocks[0].sublayers["mixer"].rnn.weight_hh_l0_reverse.shape == (3000, 1000)
    part = built.decoder.blocks[0].sublayers["cross"]
    assert part.own.shape == (1000, 1000) and part.key.weight.shape == (1000, 2000)
    assert built.head.weight.shape == (30000, 500)
