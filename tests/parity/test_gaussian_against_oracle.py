"""The Gaussian Transformer's encoder against the paper's equation (Guo et al. 2019), one pair of tokens at a time."""

import torch

from allyouneed.config import parse, preset_tree
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.models.base import Model
from attention_layers import TOLERANCE, agreement, randomise_module
from shrink import shrink


def by_the_paper(mixer, x):
    w, b = mixer.relative.precision, mixer.relative.shift
    q, k, v = (y.unflatten(-1, (mixer.heads, mixer.head_width)) for y in mixer.qkv(x).chunk(3, -1))
    rows = []
    for i in range(len(x)):
        heads = []
        for h in range(mixer.heads):
            dot = torch.stack([q[i, h] @ k[j, h] for j in range(len(x))]) / mixer.head_width**0.5
            prior = torch.stack([-(w[h] * (i - j) ** 2 + b[h]).abs() for j in range(len(x))])
            heads.append((dot + prior).softmax(0) @ v[:, h])
        rows.append(torch.cat(heads))
    return mixer.out(torch.stack(rows))


def test_the_prior_in_log_space(record_difference):
    model = randomise_module(shrink(parse(Model, preset_tree("gaussian-transformer"))).build())
    mixer = model.encoder.blocks[0].sublayers["mixer"]
    with torch.no_grad():  # w > 0 and b ≤ 0: two heads prefer their neighbours to themselves
        mixer.relative.precision.copy_(torch.tensor([0.05, 0.2, 1.0, 3.1]))
        mixer.relative.shift.copy_(torch.tensor([-0.2, 0.0, -1.0, 0.0]))
    x = torch.randn(11, model.config.width, generator=torch.Generator().manual_seed(0))
    found = mixer(x[None], Context(TokenLayout(torch.arange(11)[None], start=0)))[0]
    differences = agreement(found, by_the_paper(mixer, x), list(mixer.parameters()))
    record_difference("Gaussian Transformer", "equations written out", *differences)
    assert max(differences) < TOLERANCE


def test_flipped_signs_are_the_same_prior():
    model = randomise_module(shrink(parse(Model, preset_tree("gaussian-transformer"))).build())
    relative, places = model.encoder.blocks[0].sublayers["mixer"].relative, torch.arange(5)[None]
    q = torch.zeros(1, 4, 5, 8)
    before = relative.bias(q, places, places, 1.0)
    with torch.no_grad():
        relative.precision.neg_()
        relative.shift.neg_()
    torch.testing.assert_close(relative.bias(q, places, places, 1.0), before)
