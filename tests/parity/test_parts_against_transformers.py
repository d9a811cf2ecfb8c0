"""Small parts against the same parts of transformers: activations, the gated feed-forward layer, Gemma's norm."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP

from allyouneed.interop.hf.config_reader import ACTIVATIONS as READ
from allyouneed.nn.batch import Rows
from allyouneed.nn.channels.feedforward import GLU
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.norms import RMSNorm
from allyouneed.nn.ops.activations import ACTIVATIONS

CONTEXT = Context(TokenLayout.of(Rows(torch.zeros(2, 9, dtype=torch.long))))

THEIR_NAMES = {
    "identity": "linear",
    "relu": "relu",
    "relu-squared": "relu2",
    "gelu": "gelu",
    "gelu-tanh": "gelu_new",
    "quick-gelu": "quick_gelu",
    "silu": "silu",
    "mish": "mish",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}


@pytest.mark.parametrize("name", THEIR_NAMES)
def test_activations(name):
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64, requires_grad=True)
    found, expected = ACTIVATIONS[name](x), ACT2FN[THEIR_NAMES[name]](x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    slopes = (torch.autograd.grad(y.sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("theirs", READ)
def test_activation_names(theirs):
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[READ[theirs]](x), ACT2FN[theirs](x), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["silu", "gelu-tanh"])
def test_the_gated_layer_of_llama_and_gemma(name, bias):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 36, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, hidden_act=THEIR_NAMES[name], mlp_bias=bias)
    theirs = LlamaMLP(config).double()
    ours = GLU(hidden=36, activation=name, bias=bias).build(Common(width=24)).double()
    for kind in ("weight", "bias") if bias else ("weight",):
        gate_up = [getattr(theirs.gate_proj, kind), getattr(theirs.up_proj, kind)]
        getattr(ours.gate_up, kind).data = torch.cat(gate_up).detach()
        getattr(ours.down, kind).data = getattr(theirs.down_proj, kind).detach()
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    torch.testing.assert_close(ours(x, CONTEXT), theirs(x), rtol=1e-10, atol=1e-10)


def test_gemmas_norm_offset():
    torch.manual_seed(0)
    theirs, ours = GemmaRMSNorm(24, eps=1e-6), RMSNorm(eps=1e-6, offset=1).build(24)
    assert ours.weight.tolist() == theirs.weight.tolist() == [0.0] * 24
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, 24)
    torch.testing.assert_close(ours(x, CONTEXT), theirs(x), rtol=1e-5, atol=1e-6)
