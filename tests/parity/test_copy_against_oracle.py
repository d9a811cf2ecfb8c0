"""Pointer-generator (See et al. 2017) against its equations 8 and 9, one target token at a time."""

import pytest
import torch

from allyouneed.config import ConfigError, parse, preset_tree
from allyouneed.nn.batch import IGNORE, Batch, Rows
from allyouneed.nn.models.base import Model
from any_part import build, tree

PAIRS = [([3, 1, 4, 1, 5], [2, 7, 1, 8]), ([9, 2, 6, 5, 3, 5, 8], [2, 8]), ([1, 1], [8, 2, 8, 1, 8, 2])]


def small():
    """The shipped preset, narrowed."""
    given = preset_tree("pointer-generator") | {"vocab": 11, "width": 12, "dropout": 0.0}
    for side in ("encoder", "decoder"):
        (layer,) = given[side]
        mixers = {name: layer[name] | {"heads": 3} for name in ("mixer", "cross") if name in layer}
        given[side] = [layer | mixers | {"repeat": 1, "channel": layer["channel"] | {"hidden": 13}}]
    return given


def oracle(model, source, target):
    """P(w) of each target token (time, vocab). Encoder and decoder states are the model's: other tests compare them."""
    head, vocab = model.head, model.config.vocab
    memory = model.encode(Rows(torch.tensor([source])))
    states = model.decode(Rows(torch.tensor([target])), memory)[0, :, : model.config.width]
    rows, layout = Rows(torch.tensor([target])), model.embed.layout(Rows(torch.tensor([target])))
    inputs = model.embed(rows, layout)[0]
    found = []
    for s, x in zip(states, inputs, strict=True):
        scores = torch.stack([(head.query.weight @ s) @ h for h in memory.hidden[0]]) / len(s) ** 0.5
        attention = scores.exp() / scores.exp().sum()
        read = sum(a * h for a, h in zip(attention, memory.hidden[0], strict=True))
        generates = torch.sigmoid(head.gate.weight[0] @ torch.cat([read, s, x]) + head.gate.bias[0])
        words = generates * (model.embed.tokens.weight @ s).softmax(0)
        copies = [sum(a for a, token in zip(attention, source, strict=True) if token == word) for word in range(vocab)]
        found.append(words + (1 - generates) * torch.stack([torch.as_tensor(c, dtype=s.dtype) for c in copies]))
    return torch.stack(found)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_probabilities_loss_and_gradients(smoothing, record_difference):
    model = build(small())
    batch = Batch(Rows.of([t for _, t in PAIRS]), Rows.of([s for s, _ in PAIRS], side="left"))
    hidden = model(batch)
    found = model.head(hidden).exp()
    expected = [oracle(model, s, t) for s, t in PAIRS]
    outputs = max((found[i, : len(e)] - e).abs().max().item() for i, e in enumerate(expected))
    torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:2], dtype=torch.double))

    labels = torch.full(hidden.shape[:2], IGNORE)
    wanted = [[5, 1, 10, 0], [3, 8], [1, 1, 4, 2, 1, 0]]  # of the source and not
    for row, own in enumerate(wanted):
        labels[row, : len(own)] = torch.tensor(own)
    total, plain = model.head.loss(hidden, labels, smoothing)
    logs = [e.log() for e in expected]
    theirs = -sum(log[t, own[t]] for log, own in zip(logs, wanted, strict=True) for t in range(len(own)))
    spread = -sum(log.mean(-1).sum() for log in logs)
    torch.testing.assert_close(plain, theirs)
    torch.testing.assert_close(total, (1 - smoothing) * theirs + smoothing * spread)

    weights = list(model.parameters())
    pairs = zip(
        torch.autograd.grad(total, weights),
        torch.autograd.grad((1 - smoothing) * theirs + smoothing * spread, weights),
        strict=True,
    )
    gradients = max((a - b).abs().max().item() / max(1.0, b.abs().max().item()) for a, b in pairs)
    assert outputs < 1e-9 and gradients < 1e-9
    record_difference("Pointer-generator", "oracle from equations 8-9", outputs, gradients)


def test_a_certain_gate_and_absent_tokens_keep_the_gradient_finite():
    """p_gen of 0 in single precision, and a label that is not in the source."""
    model = build(small()).float()
    with torch.no_grad():
        model.head.gate.weight.zero_()
        model.head.gate.bias.fill_(-200.0)
    hidden = model(Batch(Rows(torch.tensor([[2, 3]])), Rows(torch.tensor([[4, 5]]))))
    total, _ = model.head.loss(hidden, torch.tensor([[4, 9]]), 0.1)
    gradients = torch.autograd.grad(total, list(model.parameters()))
    assert total.isfinite() and all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize(
    "keys",
    [
        tree(vocab={"source": 11, "target": 11}, head={"kind": "vocabulary", "copy": True}),
        {"kind": "decoder", "vocab": 9, "width": 12, "head": {"copy": True}}
        | {"decoder": [{"mixer": {"kind": "attention", "heads": 3, "pattern": "causal"}}]},
    ],
)
def test_without_a_source_in_the_same_vocabulary_it_is_refused(keys):
    with pytest.raises(ConfigError, match=r"head\.copy: needs an encoder-decoder that reads text with the vocabulary"):
        parse(Model, keys)
