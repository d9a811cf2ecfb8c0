"""Mask-predict (Ghazvininejad et al. 2019) against its definition: the loss of section 2, the decoding of section 3,
one sentence at a time."""

import math

import pytest
import torch

from allyouneed.config import ConfigError, parse, preset_tree
from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.whole_targets.mask_predict import MaskPredictEngine
from allyouneed.nn.batch import IGNORE, Batch, Rows
from allyouneed.nn.models.base import Model
from allyouneed.tasks.translation.mask_predict import MaskPredict
from any_part import build, tree

PAD, BOS, EOS, MASK = 0, 1, 2, 10
SOURCES = [[3, 1, 4, 1, 5, 2], [9, 6, 2], [5, 3, 5, 8, 2], [7, 2]]


def small(**keys):
    """The shipped preset, narrowed."""
    given = preset_tree("mask-predict") | {"vocab": 11, "width": 12, "dropout": 0.0}
    for side in ("encoder", "decoder"):
        (layer,) = given[side]
        mixers = {name: layer[name] | {"heads": 3} for name in ("mixer", "cross") if name in layer}
        given[side] = [layer | mixers | {"repeat": 1, "channel": layer["channel"] | {"hidden": 13}}]
    return given | {"head": given["head"] | {"lengths": 9}} | keys


def length_scores(model, source):
    end = model.encode(Rows(torch.tensor([source]))).hidden[0, -1]
    return (model.head.length.weight @ end + model.head.length.bias).log_softmax(0)


def token_scores(model, source, target):
    return model.head(model.decode(Rows(torch.tensor([target])), model.encode(Rows(torch.tensor([source])))))[
        0
    ].log_softmax(-1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_and_its_gradients(smoothing, record_difference):
    """Packed rows against sentences on their own."""
    model, task = build(small()), MaskPredict(smoothing=smoothing)
    inputs, labels = [[MASK, 4, MASK], [7, MASK, 8, 9]], [[5, IGNORE, 3], [IGNORE, 6, IGNORE, IGNORE]]
    batch = Batch(
        Rows(torch.tensor([[*inputs[0], *inputs[1]]]), segments=torch.tensor([[1] * 3 + [2] * 4])),
        Rows(torch.tensor([[*SOURCES[0], *SOURCES[1], 0]]), segments=torch.tensor([[1] * 6 + [2] * 3 + [0]])),
        torch.tensor([[*labels[0], *labels[1]]]),
    )
    found = task.loss(model, batch)
    total = plain = torch.zeros((), dtype=torch.double)
    for source, target, wanted in zip(SOURCES, inputs, labels, strict=False):
        scores = token_scores(model, source, target)
        for t, label in enumerate(wanted):
            if label != IGNORE:
                plain = plain - scores[t, label]
                total = total - (1 - smoothing) * scores[t, label] - smoothing * scores[t].mean()
        total = total - length_scores(model, source)[len(target) - 1]
    outputs = max((found.total - total).abs().item(), (found.plain - plain).abs().item())
    weights = list(model.parameters())
    pairs = zip(*(torch.autograd.grad(one, weights) for one in (found.total, total)), strict=True)
    gradients = max((a - b).abs().max().item() / max(1, b.abs().max().item()) for a, b in pairs)
    assert found.tokens == 3 and outputs < 1e-6 and gradients < 1e-6
    record_difference("Mask-Predict", "oracle from sections 2-3", outputs, gradients)


def mask_predict(model, source, lengths, rounds):
    """Section 3.2 and 3.3 as they are written."""
    found = []
    ranked = sorted(range(1, 10), key=lambda n: -length_scores(model, source)[n - 1].item())
    for count in ranked[:lengths]:
        tokens, chances = [MASK] * count, [0.0] * count
        for t in range(rounds):
            worst = list(range(count))
            if t:
                n = max(1, math.floor(count * (rounds - t) / rounds))
                worst = sorted(range(count), key=lambda i: chances[i])[:n]
            read = [MASK if i in worst else token for i, token in enumerate(tokens)]
            scores = token_scores(model, source, read)
            for i in worst:
                allowed = [word for word in range(11) if word not in (PAD, BOS, EOS, MASK)]
                tokens[i] = max(allowed, key=lambda word: scores[i, word].item())
                chances[i] = scores[i, tokens[i]].item()
        found.append((sum(chances) / count, tokens))
    return sorted(found, reverse=True)


@pytest.mark.parametrize(("lengths", "rounds"), [(1, 1), (3, 4), (4, 10)])
@torch.no_grad()
def test_decoding(lengths, rounds):
    model = build(small())
    engine = MaskPredictEngine(model, BOS, EOS, PAD, [PAD, BOS])
    engine.mask = MASK
    found = engine.generate(SOURCES, Decoding(beam=lengths, best=lengths, iterations=rounds))
    for source, own in zip(SOURCES, found, strict=True):
        expected = mask_predict(model, source, lengths, rounds)
        assert [one.tokens for one in own] == [tokens for _, tokens in expected]
        assert [one.score for one in own] == pytest.approx([score for score, _ in expected], rel=1e-5)
    (empty,) = engine.generate([[]])
    assert empty[0].tokens == []


def test_what_it_cannot_do_is_refused():
    engine = MaskPredictEngine(build(small()), BOS, EOS, PAD)
    with pytest.raises(UserError, match="method=sample: not supported by mask-predict"):
        engine.generate([[3, 2]], Decoding(method="sample"))
    with pytest.raises(UserError, match="mask-predict writes whole targets"):
        engine.scheduler()


def test_the_decoder_must_see_the_whole_target():
    """And with another head it must not."""
    causal = [
        {"mixer": {"kind": "attention", "heads": 3, "pattern": "causal"}, "cross": {"kind": "attention", "heads": 3}}
    ]
    with pytest.raises(ConfigError, match="decoder: no layer attends to later tokens, which this head needs"):
        parse(Model, small(decoder=causal))
    with pytest.raises(ConfigError, match="a decoder must not attend to later tokens"):
        parse(Model, tree(mixer={"kind": "attention", "heads": 3}))
