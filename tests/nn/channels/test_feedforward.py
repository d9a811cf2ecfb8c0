"""Channel mixers, held to their equations."""

import math
import typing

import pytest
import torch

from allyouneed.nn.batch import Rows
from allyouneed.nn.channels.feedforward import FFN, GLU
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.ops.activations import ACTIVATIONS, Activation
from allyouneed.runtime.cuda.bias_gradients import gelu_tanh

CONTEXT = Context(TokenLayout.of(Rows.of([[1, 2, 3]])))
COMMON = Common(width=7)
X = torch.randn(1, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

erf, tanh, exp = torch.erf, torch.tanh, torch.exp
EQUATIONS = {
    "identity": lambda x: x,
    "relu": lambda x: x.clamp(min=0),
    "leaky-relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "relu-squared": lambda x: x.clamp(min=0) ** 2,
    "elu": lambda x: torch.where(x > 0, x, exp(x) - 1),
    "gelu": lambda x: x / 2 * (1 + erf(x / math.sqrt(2))),
    "gelu-tanh": lambda x: x / 2 * (1 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick-gelu": lambda x: x / (1 + exp(-1.702 * x)),
    "silu": lambda x: x / (1 + exp(-x)),
    "mish": lambda x: x * tanh(torch.log(1 + exp(x))),
    "sigmoid": lambda x: 1 / (1 + exp(-x)),
    "tanh": lambda x: (exp(x) - exp(-x)) / (exp(x) + exp(-x)),
}


def test_activation_names_match_the_table():
    assert set(typing.get_args(Activation)) == set(ACTIVATIONS) == set(EQUATIONS)


@pytest.mark.parametrize("name", EQUATIONS)
def test_an_activation_is_its_equation(name):
    torch.testing.assert_close(ACTIVATIONS[name](X * 3), EQUATIONS[name](X * 3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype, near", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_short_gelu_has_its_values_and_derivative(dtype, near):
    x = torch.cat([torch.linspace(-12, 12, 999), torch.tensor([-3e4, 0.0, 3e4])]).to(dtype).requires_grad_()
    found, exact = gelu_tanh(x), EQUATIONS["gelu-tanh"](x.double())
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=near, atol=near)
    slope, wanted = (torch.autograd.grad(y.sum(), x)[0] for y in (found, exact))
    torch.testing.assert_close(slope.double(), wanted.double(), rtol=near, atol=near)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", EQUATIONS)
def test_ffn_is_the_papers_equation_2(name, bias):
    module = FFN(hidden=5, activation=name, bias=bias).build(COMMON).double()
    hidden = EQUATIONS[name](X @ module.up.weight.t() + (module.up.bias if bias else 0))
    expected = hidden @ module.down.weight.t() + (module.down.bias if bias else 0)
    torch.testing.assert_close(module(X, CONTEXT), expected, rtol=1e-12, atol=1e-12)


def test_ffn_may_normalise_its_hidden_layer():
    module = FFN(hidden=5, norm=True).build(COMMON).double()
    torch.nn.init.normal_(module.norm.weight)
    hidden = EQUATIONS["relu"](module.up(X))
    centred = hidden - hidden.mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.norm.weight
    torch.testing.assert_close(module(X, CONTEXT), module.down(normal), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", EQUATIONS)
def test_glu_is_shazeers_equations_with_the_gate_first(name, bias):
    module = GLU(hidden=5, activation=name, bias=bias).build(COMMON).double()
    (w, v), (b, c) = module.gate_up.weight.chunk(2), module.gate_up.bias.chunk(2) if bias else (0, 0)
    hidden = EQUATIONS[name](X @ w.t() + b) * (X @ v.t() + c)
    expected = hidden @ module.down.weight.t() + (module.down.bias if bias else 0)
    torch.testing.assert_close(module(X, CONTEXT), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("channel", [FFN, GLU])
def test_dropout_applies_to_the_hidden_layer_in_training_only(channel):
    module = channel(hidden=4000, dropout=0.5).build(COMMON).double()
    plain = channel(hidden=4000).build(COMMON).double()
    plain.load_state_dict(module.state_dict())
    torch.testing.assert_close(module.eval()(X, CONTEXT), plain(X, CONTEXT), rtol=0, atol=0)
    torch.manual_seed(0)
    kept = []
    module.down.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    plain.down.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    module.train()(X, CONTEXT), plain(X, CONTEXT)
    alive = kept[0] != 0
    assert 0.4 < alive[kept[1] != 0].double().mean() < 0.6
    torch.testing.assert_close(kept[0][alive], 2 * kept[1][alive], rtol=1e-12, atol=0)
