"""CRATE: Yu et al. 2023, eq. 11-12 and 17, and the shipped preset, narrowed, image by image and patch by patch as the
authors' model/crate.py has it."""

import pytest
import torch
from torch import nn

from allyouneed.config import ConfigError, parse, preset_tree
from allyouneed.nn.batch import Batch, Rows, Signal
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.mixers.crate import ISTA, MSSA
from allyouneed.nn.models.base import Model
from any_part import build, tree

IMAGE, PATCH, WIDTH, HEADS, CLASSES = 12, 4, 20, 4, 7


def small(name="crate-tiny"):
    tree = parse(Model, preset_tree(name)).model_dump(mode="json")
    tree |= {"width": WIDTH, "encoder": tree["encoder"][:6]}
    for layer in tree["encoder"]:
        if layer["mixer"]:
            layer["mixer"]["heads"] = HEADS
    positions = {"kind": "learned", "length": (IMAGE // PATCH) ** 2 + 1}
    tree["embed"] |= {"image": IMAGE, "patch": PATCH, "positions": positions}
    tree["head"] |= {"labels": CLASSES}
    return tree


def norm(module, x):
    return nn.functional.layer_norm(x, x.shape[-1:], module.weight, module.bias, 1e-5)


def mssa(module, z, heads, scale, out):
    """Z as columns, as the paper writes it: [U_1 … U_K] [U_kᵀZ softmax((U_kᵀZ)ᵀ(U_kᵀZ))]_k"""
    z = z.T
    found = []
    for u in module.subspaces.weight.chunk(heads):  # U_kᵀ (p, d)
        seen = u @ z  # (p, n)
        found.append(seen @ (seen.T @ seen * scale).softmax(0))  # a column of weights for each token
    stacked = torch.cat(found)
    return (module.subspaces.weight.T @ stacked).T if out is None else (out.weight @ stacked).T + out.bias


def ista(d, z, step=0.1, sparsity=0.1):
    z = z.T
    return (z + step * d.T @ (z - d @ z) - step * sparsity).relu().T


def oracle(model, pixels):
    embed, rows = model.embed, []
    for image in pixels:
        patches = []
        for top in range(0, IMAGE, PATCH):
            for left in range(0, IMAGE, PATCH):
                flat = image[:, top : top + PATCH, left : left + PATCH].flatten()
                vector = embed.project.weight @ norm(embed.patch_norms[0], flat) + embed.project.bias
                patches.append(norm(embed.patch_norms[1], vector))
        x = torch.cat([embed.class_token.weight, torch.stack(patches)]) + embed.positions.weight
        for compress, sparsify in zip(model.encoder.blocks[::2], model.encoder.blocks[1::2], strict=True):
            mixer = compress.sublayers["mixer"]
            scale = (WIDTH // HEADS) ** -0.5
            x = x + mssa(mixer, norm(compress.wiring.norms[0], x), HEADS, scale, mixer.out)
            x = ista(sparsify.sublayers["channel"].dictionary, norm(sparsify.wiring.norms[0], x))
        first = norm(model.encoder.end, x)[0]
        rows.append(model.head.classes.weight @ first + model.head.classes.bias)
    return torch.stack(rows)


def test_outputs_and_gradients(record_difference):
    model = build(small())
    pixels = torch.randn(3, 3, IMAGE, IMAGE, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    found, expected = model.logits(Batch(Signal(pixels))), oracle(model, pixels)
    weights = list(model.parameters())
    own = torch.autograd.grad(found.sin().sum(), weights)
    theirs = torch.autograd.grad(expected.sin().sum(), weights)
    outputs = (found - expected).abs().max().item()
    pairs = zip(own, theirs, strict=True)
    gradients = max((a - b).abs().max().item() / max(1.0, b.abs().max().item()) for a, b in pairs)
    record_difference("CRATE", "oracle from the equations and the authors' crate.py", outputs, gradients)
    assert all(gradient.abs().max() > 1e-7 for gradient in theirs)
    assert outputs < 1e-9 and gradients < 1e-9


@pytest.mark.parametrize("out", ["tied", "linear"])
def test_attention_in_subspaces(out):
    torch.manual_seed(0)
    layer = MSSA(heads=HEADS, out=out).build(Common(width=WIDTH)).double()
    x = torch.randn(1, 9, WIDTH, dtype=torch.double)
    found = layer(x, Context(TokenLayout(torch.arange(9)[None], start=0)))[0]
    expected = mssa(layer, x[0], HEADS, (WIDTH // HEADS) ** -0.5, layer.out)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert (out == "tied") == (layer.out is None)


def test_an_ista_step_lowers_its_objective():
    """‖z − Dz'‖²/2 + λ‖z'‖₁ from z' = z, for a step that is small against the dictionary."""
    torch.manual_seed(0)
    layer = ISTA(step=0.05, sparsity=0.3).build(Common(width=WIDTH)).double()
    nn.init.orthogonal_(layer.dictionary)
    z = torch.rand(1, 50, WIDTH, dtype=torch.double)
    code = layer(z, Context(TokenLayout(torch.arange(50)[None], start=0)))
    torch.testing.assert_close(code[0], ista(layer.dictionary, z[0], 0.05, 0.3), rtol=0, atol=1e-12)

    def objective(code):
        return (z - code @ layer.dictionary.T).square().sum() / 2 + 0.3 * code.abs().sum()

    assert objective(code) < objective(z) and (code == 0).sum() > (z == 0).sum()


def test_the_cache_is_half_of_attentions():
    sizes = {}
    for kind in ("mssa", "attention"):
        model = build(tree(mixer={"kind": kind, "heads": 3, "pattern": "causal"}))
        with torch.no_grad():
            states = model.start(Rows(torch.tensor([[1, 2]])))
            model.advance(Rows(torch.ones(1, 20, dtype=torch.long)), states)
        sizes[kind] = sum(layer["mixer"].bytes for layer in states.layers)
    assert 2 * sizes["mssa"] == sizes["attention"]


def test_the_papers_sizes():
    """Table 1: 6.09 and 22.80 million parameters."""
    for name, millions in (("crate-tiny", 6.09), ("crate-base", 22.80)):
        assert parse(Model, preset_tree(name)).cost().parameters / 1e6 == pytest.approx(millions, abs=0.005)


def test_heads_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"mixer.heads: width 12 is not divisible by 5 heads"):
        parse(Model, tree(encoder_mixer={"kind": "mssa", "heads": 5}))
