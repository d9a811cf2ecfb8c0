"""Norms, held to their equations."""

import pytest
import torch

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.norms import BatchNorm, LayerNorm, Norm, RMSNorm, ScaleNorm

CONTEXT = Context(TokenLayout.of(Rows.of([[1, 2, 3]])))
X = torch.randn(1, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 1
exactly = {"rtol": 1e-12, "atol": 1e-12}


def filled(norm):
    generator = torch.Generator().manual_seed(1)
    for parameter in norm.double().parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    return norm


@pytest.mark.parametrize("weight, offset", [(True, 0), (True, 1), (False, 0)])
def test_rms_norm_is_zhang_and_sennrichs_equation_4(weight, offset):
    norm = filled(RMSNorm(eps=1e-3, weight=weight, offset=offset).build(7))
    expected = X / (X.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (norm.weight + offset if weight else 1)
    torch.testing.assert_close(norm(X, CONTEXT), expected, **exactly)


def test_an_offset_without_weight_is_refused():
    with pytest.raises(ConfigError, match="norm: offset: 1 requires weight: true"):
        parse(Common, {"width": 7, "norm": {"kind": "rms", "weight": False, "offset": 1}})


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_is_the_papers_with_and_without_weight_and_bias(weight, bias):
    centred = X - X.mean(-1, keepdim=True)
    norm = filled(LayerNorm(eps=1e-3, weight=weight, bias=bias).build(7))
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (norm.weight if weight else 1)
    torch.testing.assert_close(norm(X, CONTEXT), expected + (norm.bias if bias else 0), **exactly)


def test_scale_norm_is_nguyen_and_salazars_equation_5():
    norm = ScaleNorm().build(7).double()
    expected = 7**0.5 * X / X.square().sum(-1, keepdim=True).sqrt()
    torch.testing.assert_close(norm(X, CONTEXT), expected, rtol=1e-7, atol=1e-7)  # g began in single precision
    norm = filled(norm)
    torch.testing.assert_close(norm(X, CONTEXT), norm.weight * expected / 7**0.5, **exactly)
    nothing = torch.zeros(1, 3, 7, dtype=torch.float64, requires_grad=True)
    norm(nothing, CONTEXT).sum().backward()
    assert norm(nothing, CONTEXT).eq(0).all() and nothing.grad.isfinite().all()


def test_scale_norm_of_half_precision_does_not_overflow():
    long = torch.full((1, 3, 7), 300.0, dtype=torch.float16)
    found = ScaleNorm().build(7).half()(long, CONTEXT)
    torch.testing.assert_close(found, torch.ones_like(long))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("kind", Norm.registry)
def test_every_norm_starts_as_pure_normalisation_and_resets(kind, offset):
    config = RMSNorm(offset=offset) if kind == "rms" else Norm.registry[kind]()
    norm = config.build(7)
    torch.manual_seed(0)
    x = torch.randn(40, 50, 7)
    context = Context(TokenLayout.of(Rows(torch.ones(40, 50, dtype=torch.long))))
    first = norm(x, context)
    assert first.std().item() == pytest.approx(1, abs=0.1)
    filled(norm).float().reset_parameters()
    torch.testing.assert_close(norm(x, context), first)


@pytest.mark.parametrize("kind", [kind for kind, norm in Norm.registry.items() if norm.tokenwise])
def test_a_norm_of_one_token_also_works_inside_heads(kind):
    norm = filled(Norm.registry[kind]().build(7))
    heads = torch.stack([X, X * 2 - 1], 1)  # (batch, heads, time, head_width)
    found = norm(heads, CONTEXT)
    torch.testing.assert_close(found[:, 1], norm(X * 2 - 1, CONTEXT), **exactly)


# --- batch norm -------------------------------------------------------------------------------------------------------


def padded():
    """Three rows of 5, 2 and 4 tokens, as a padded batch, a packed one, and the tokens without any rows."""
    tokens = torch.randn(11, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 2 + 3
    wide = torch.full((3, 5, 7), 1e3, dtype=torch.float64)
    places = torch.zeros(3, 5, dtype=torch.long)
    for row, part in enumerate(tokens.split([5, 2, 4])):
        wide[row, : len(part)], places[row, : len(part)] = part, 1
    context = Context(TokenLayout.of(Rows(places, lengths=torch.tensor([5, 2, 4]))))
    segments = torch.tensor([[1, 1, 1, 1, 1, 0, 2, 2, 0, 3, 3, 3, 3]])
    line = torch.full((1, 13, 7), 1e3, dtype=torch.float64)
    line[segments > 0] = tokens
    packed = Context(TokenLayout.of(Rows(segments, segments=segments)))
    return tokens, (wide, context, places > 0), (line, packed, segments > 0)


def test_batch_norm_ignores_padding_and_matches_torch():
    tokens, *forms = padded()
    reference = torch.nn.BatchNorm1d(7, eps=1e-3, momentum=0.3).double()
    expected = reference(tokens)
    upstream = torch.randn(11, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    tokens = tokens.requires_grad_()
    (wanted,) = torch.autograd.grad((reference(tokens) * upstream).sum(), tokens)
    for x, context, real in forms:
        norm = BatchNorm(eps=1e-3, momentum=0.3).build(7).double()
        torch.testing.assert_close(norm(x, context)[real], expected, **exactly)
        x = x.requires_grad_()
        (found,) = torch.autograd.grad((norm(x, context)[real] * upstream).sum(), x)
        torch.testing.assert_close(found[real], wanted, **exactly)
        assert found[~real].eq(0).all()
        torch.testing.assert_close(norm.running_mean, reference.running_mean, **exactly)
        torch.testing.assert_close(norm.running_var, reference.running_var, **exactly)
        evaluated = norm.eval()(x, context)[real]
        torch.testing.assert_close(evaluated, reference.eval()(tokens), **exactly)
        reference.train()


def test_batch_norm_in_evaluation_is_tokenwise():
    _, (x, context, _), _ = padded()
    norm = filled(BatchNorm().build(7))
    norm(x, context)
    norm.eval()
    torch.testing.assert_close(norm(x[:1], context)[0], norm(x, context)[0], rtol=0, atol=0)


def test_batch_norm_of_a_single_token_is_finite():
    norm = BatchNorm().build(7).double()
    norm(X[:, :1], Context(TokenLayout.of(Rows.of([[1]]))))
    assert norm.running_var.isfinite().all()


def test_batch_norm_inside_heads_is_refused_in_training():
    norm = BatchNorm().build(7).double()
    with pytest.raises(ValueError, match="cannot normalise heads"):
        norm(X[:, None], CONTEXT)
