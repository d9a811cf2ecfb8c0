"""MetaFormer: the pooling of transformers' PoolFormer, and the four presets, narrowed, against Yu et al. 2022, eq. 1-4,
written out patch by patch."""

import pytest
import torch
from transformers.models.poolformer.modeling_poolformer import PoolFormerPooling

from allyouneed.config import parse, preset_tree
from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch, Signal
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.mixers.metaformer import Pooling
from allyouneed.nn.models.base import Model
from any_part import build
from parity import difference

SIDE, PATCH, WIDTH, HIDDEN, LABELS = 3, 2, 6, 8, 4
NAMES = ("pool", "identity", "mlp", "attention")


def alone(module, x):
    return module(x, Context(TokenLayout(torch.arange(x.shape[1])[None], start=0)))


@pytest.mark.parametrize("size", [1, 3, 5])
def test_pooling_is_that_of_poolformer(size, record_difference):
    x = torch.randn(2, 20, WIDTH, generator=torch.Generator().manual_seed(0), requires_grad=True)
    found = alone(Pooling(size=size, grid=(4, 5)).build(Common(width=WIDTH)), x)
    theirs = PoolFormerPooling(size)(x.mT.unflatten(2, (4, 5))).flatten(2).mT
    own, other = (torch.autograd.grad(y.sin().sum(), x)[0] for y in (found, theirs))
    outputs, gradients = (found - theirs).abs().max().item(), (own - other).abs().max().item()
    assert outputs < 1e-6 and gradients < 1e-6
    record_difference("MetaFormer", "transformers PoolFormerPooling", outputs, gradients)


def narrowed(name):
    given = preset_tree(f"metaformer-{name}") | {"width": WIDTH}
    given["embed"] |= {"image": SIDE * PATCH, "patch": PATCH, "positions": {"kind": "learned", "length": SIDE**2}}
    layer = given["encoder"][0] | {"repeat": 2}
    layer["channel"] |= {"hidden": HIDDEN}
    changes = {"pool": {"grid": [SIDE, SIDE]}, "mlp": {"length": SIDE**2}, "attention": {"heads": 2}}
    if name in changes:
        layer["mixer"] |= changes[name]
    return given | {"encoder": [layer], "head": given["head"] | {"labels": LABELS}}


def dense(part, x):
    return x @ part.weight.T + part.bias


def norm(part, x):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], part.weight, part.bias)


def mixed(name, module, x):
    """x (patches, width)"""
    if name == "identity":
        return x
    if name == "mlp":
        return torch.stack([sum(row[s] * x[s] for s in range(len(x))) for row in module.map]) + module.shift[:, None]
    if name == "attention":
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(0, 1) for part in dense(module.qkv, x).chunk(3, -1))
        weights = (q @ k.mT / (WIDTH // 2) ** 0.5).softmax(-1)
        return dense(module.out, (weights @ v).transpose(0, 1).flatten(1))
    found = []
    for at in range(len(x)):
        row, column = divmod(at, SIDE)
        near = [
            x[r * SIDE + c]
            for r in range(row - 1, row + 2)
            for c in range(column - 1, column + 2)
            if 0 <= r < SIDE and 0 <= c < SIDE
        ]
        found.append(sum(near) / len(near) - x[at])
    return torch.stack(found)


def oracle(name, model, image):
    """Eq. 1-3: X + s ⊙ mixer(norm X), then + s ⊙ W₂ gelu(W₁ norm X); the mean of all patches to classes."""
    cut = [
        image[:, r : r + PATCH, c : c + PATCH].flatten()
        for r in range(0, SIDE * PATCH, PATCH)
        for c in range(0, SIDE * PATCH, PATCH)
    ]
    x = dense(model.embed.project, torch.stack(cut)) + model.embed.positions.weight
    for block in model.encoder.blocks:
        norms, scales, channel = block.wiring.norms, block.wiring.scales, block.sublayers["channel"]
        x = x + scales[0] * mixed(name, block.sublayers["mixer"], norm(norms[0], x))
        inner = torch.nn.functional.gelu(dense(channel.up, norm(norms[1], x)))
        x = x + scales[1] * dense(channel.down, inner)
    return dense(model.head.classes, norm(model.encoder.end, x).mean(0))


@pytest.mark.parametrize("name", NAMES)
def test_presets_are_the_equations(name, record_difference):
    model = build(parse(Model, narrowed(name)))
    image = torch.randn(3, SIDE * PATCH, SIDE * PATCH, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    found, expected = model.logits(Batch(Signal(image[None])))[0], oracle(name, model, image)
    weights = list(model.parameters())
    own, theirs = (torch.autograd.grad(y.sin().sum(), weights) for y in (found, expected))
    outputs = difference(found, expected)
    gradients = max(difference(a, b) if b.any() else a.abs().max().item() for a, b in zip(own, theirs, strict=True))
    assert outputs < 1e-10 and gradients < 1e-9, (outputs, gradients)
    record_difference("MetaFormer", "the paper's equations", outputs, gradients)


def test_another_number_of_tokens_than_the_grid_is_refused():
    with pytest.raises(UserError, match="grid of 4×5 got 19 tokens"):
        alone(Pooling(grid=(4, 5)).build(Common(width=WIDTH)), torch.zeros(1, 19, WIDTH))
