"""Wirings, each held to its formula written out once more, outputs and gradients."""

import pytest
import torch
from torch import nn

from allyouneed.config import parse
from allyouneed.nn.batch import Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.init.depth import Depth, deepnorm_factors
from allyouneed.nn.models.base import Model
from allyouneed.nn.wiring.residual import (
    DeepNorm,
    ParallelResidual,
    PostNorm,
    PreNorm,
    ResiDual,
    ResPostNorm,
    Sandwich,
    Wiring,
)
from any_part import build, tree
from wired import wired

WIDTH, BLOCKS = 7, 3
COMMON = Common(width=WIDTH)
CONTEXT = Context(TokenLayout.of(Rows.of([[1, 2, 3]])))
DEPTH = Depth(0, BLOCKS, "decoder")
X = torch.randn(1, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Run:
    """Three blocks of two sub-layers, run by the wiring or by a formula with the same parameters."""

    def __init__(self, wiring: Wiring, sublayers: int = 2, depth: Depth = DEPTH) -> None:
        torch.manual_seed(1)
        self.wiring = wiring
        self.blocks = [wiring.build(COMMON, sublayers, depth).double() for _ in range(BLOCKS)]
        self.end = wiring.end(COMMON)
        self.calls = [[nn.Linear(WIDTH, WIDTH).double() for _ in range(sublayers)] for _ in range(BLOCKS)]
        self.modules = [*self.blocks, *([] if self.end is None else [self.end.double()])]
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def parameters(self):
        return [parameter for module in self.modules for parameter in module.parameters()]

    def __call__(self, x):
        stream = self.wiring.begin(x)
        for block, calls in zip(self.blocks, self.calls, strict=True):
            stream = wired(block, calls)(stream, CONTEXT)
        return stream if self.end is None else self.end(stream, CONTEXT)

    def agrees_with(self, formula):
        x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
        found, expected = self(x), formula(y)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad(found.sin().sum(), [x, *self.parameters()])
        expected = torch.autograd.grad(expected.sin().sum(), [y, *self.parameters()])
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def ln(norm, x):
    return nn.functional.layer_norm(x, (WIDTH,), norm.weight, norm.bias, 1e-5)


def scale(block, number):
    return block.scales[number] if len(block.scales) else 1.0


@pytest.mark.parametrize("layer_scale", [None, 1e-2])
def test_post_norm_equals_its_formula(layer_scale):
    run = Run(PostNorm(layer_scale=layer_scale))

    def formula(x):
        for block, calls in zip(run.blocks, run.calls, strict=True):
            x = ln(block.norms[0], x + scale(block, 0) * calls[0](x))
            x = ln(block.norms[1], x + scale(block, 1) * calls[1](x))
        return x

    run.agrees_with(formula)
    assert run.end is None


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("layer_scale", [None, 1e-2])
def test_pre_norm_equals_its_formula(final, layer_scale):
    run = Run(PreNorm(final=final, layer_scale=layer_scale))

    def formula(x):
        for block, calls in zip(run.blocks, run.calls, strict=True):
            x = x + scale(block, 0) * calls[0](ln(block.norms[0], x))
            x = x + scale(block, 1) * calls[1](ln(block.norms[1], x))
        return ln(run.end, x) if final else x

    run.agrees_with(formula)


def test_res_post_norm_equals_its_formula():
    run = Run(ResPostNorm())

    def formula(x):
        for block, calls in zip(run.blocks, run.calls, strict=True):
            for norm, call in zip(block.norms, calls, strict=True):
                x = x + ln(norm, call(x))
        return ln(run.end, x)

    run.agrees_with(formula)


def test_sandwich_equals_its_formula():
    run = Run(Sandwich())

    def formula(x):
        for block, calls in zip(run.blocks, run.calls, strict=True):
            x = x + ln(block.norms[1], calls[0](ln(block.norms[0], x)))
            x = x + ln(block.norms[3], calls[1](ln(block.norms[2], x)))
        return ln(run.end, x)

    run.agrees_with(formula)


@pytest.mark.parametrize("sublayers", [1, 2, 3])
@pytest.mark.parametrize("norms", ["one", "each"])
def test_parallel_equals_its_formula(norms, sublayers):
    run = Run(ParallelResidual(norms=norms, layer_scale=0.1), sublayers)
    assert len(run.blocks[0].norms) == (1 if norms == "one" else sublayers)

    def formula(x):
        for block, calls in zip(run.blocks, run.calls, strict=True):
            new = x
            for number, call in enumerate(calls):
                new = new + block.scales[number] * call(ln(block.norms[0 if norms == "one" else number], x))
            x = new
        return ln(run.end, x)

    run.agrees_with(formula)


def test_resi_dual_is_two_streams():
    """Xie et al. 2023: x is normalised after every addition, d never; all that is added is added to both."""
    run = Run(ResiDual())

    def formula(embedded):
        x, d = embedded, embedded
        for block, calls in zip(run.blocks, run.calls, strict=True):
            for norm, call in zip(block.norms, calls, strict=True):
                y = call(x)
                d = d + y
                x = ln(norm, x + y)
        return x + ln(run.end.norm, d)

    run.agrees_with(formula)


DEPTHS = {  # "DeepNet", figure 2, with N encoder and M decoder layers: alpha, beta
    Depth(18, 0, "encoder"): (36**0.25, 144**-0.25),
    Depth(0, 5, "decoder"): (10**0.25, 40**-0.25),
    Depth(18, 5, "encoder"): (0.81 * (18**4 * 5) ** (1 / 16), 0.87 * (18**4 * 5) ** (-1 / 16)),
    Depth(18, 5, "decoder"): (15**0.25, 60**-0.25),
}


@pytest.mark.parametrize("depth", DEPTHS, ids=str)
@pytest.mark.parametrize("alpha", [None, 1.7])
def test_deepnorm_equals_its_formula(depth, alpha):
    run, factor = Run(DeepNorm(alpha=alpha), depth=depth), alpha or DEPTHS[depth][0]

    def formula(x):
        for block, calls in zip(run.blocks, run.calls, strict=True):
            for norm, call in zip(block.norms, calls, strict=True):
                x = ln(norm, factor * x + call(x))
        return x

    run.agrees_with(formula)
    assert deepnorm_factors(depth) == pytest.approx(DEPTHS[depth])


def test_wirings_know_the_depth_of_the_model():
    model = build(tree(wiring="deepnorm"))
    assert {block.wiring.depth for block in model.encoder.blocks} == {Depth(2, 2, "encoder")}
    assert {block.wiring.depth for block in model.decoder.blocks} == {Depth(2, 2, "decoder")}


@pytest.mark.parametrize("kind", Wiring.registry)
def test_dropout_applies_to_sub_layer_outputs(kind):
    """With p close to 1 nothing is added in training; in evaluation it is."""
    wiring = Wiring.registry[kind]()
    module = wiring.build(Common(width=WIDTH, dropout=0.99999), 2, DEPTH).double()
    said = [lambda x: x * 3 + 1, lambda x: x.flip(-1)]
    silent = [torch.zeros_like, torch.zeros_like]
    torch.manual_seed(0)
    found, expected = (tensors(wired(module, calls)(wiring.begin(X), CONTEXT)) for calls in (said, silent))
    torch.testing.assert_close(found, expected)
    module.eval()
    found, expected = (tensors(wired(module, calls)(wiring.begin(X), CONTEXT)) for calls in (said, silent))
    assert not torch.allclose(found[0], expected[0])


def tensors(stream):
    """The tensors of a stream, whatever it is made of."""
    if isinstance(stream, torch.Tensor):
        return [stream]
    return [part for part in (stream if isinstance(stream, tuple) else vars(stream).values()) if torch.is_tensor(part)]


@pytest.mark.parametrize("wiring", [PostNorm, PreNorm, ParallelResidual])
def test_layer_scale_initial_value_and_reset(wiring):
    module = wiring(layer_scale=0.25).build(COMMON, 2, DEPTH)
    assert [scale.tolist() for scale in module.scales] == [[0.25] * WIDTH] * 2
    nn.init.normal_(module.scales[0])
    module.reset_parameters()
    assert module.scales[0].tolist() == [0.25] * WIDTH


@pytest.mark.parametrize("keys", [{"layer_scale": 0.1}, {"layer_scale": 0.1, "kind": "parallel", "norms": "each"}])
def test_the_cost_counts_layer_scale(keys):
    config = parse(Model, tree(wiring={"kind": "pre-norm"} | keys))
    assert config.cost().parameters == sum(parameter.numel() for parameter in config.build().parameters())
