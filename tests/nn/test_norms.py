"""Norms, held to their equations."""

import torch

from allyouneed.nn.batch import Rows
from allyouneed.nn.context import Context, Facts
from allyouneed.nn.norms import LayerNorm, RMSNorm

CONTEXT = Context(Facts.of(Rows.of([[1, 2, 3]])))
X = torch.randn(1, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 1


def filled(norm):
    generator = torch.Generator().manual_seed(1)
    for parameter in norm.double().parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    return norm


def test_rms_norm_is_zhang_and_sennrichs_equation_4():
    norm = filled(RMSNorm(eps=1e-3).build(7))
    expected = X / (X.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(norm(X, CONTEXT), expected, rtol=1e-12, atol=1e-12)


def test_layer_norm_is_the_papers_with_and_without_bias():
    centred = X - X.mean(-1, keepdim=True)
    for bias in (True, False):
        norm = filled(LayerNorm(eps=1e-3, bias=bias).build(7))
        expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
        expected = expected + norm.bias if bias else expected
        torch.testing.assert_close(norm(X, CONTEXT), expected, rtol=1e-12, atol=1e-12)
