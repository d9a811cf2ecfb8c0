"""BitNet b1.58: the linear map against AutoBitLinear, the model against BitNetForCausalLM made of such maps.

Rounding is not continuous: sums in another order differ by some 1e-7, and where that puts an activation on the other
side of a half, it moves by a whole step. The map itself is compared on equal inputs, where nothing can move. Of 120
models like those below with other weights, 3 had one activation on the other side (outputs then 1e-3 apart), the rest
agreed to 1.3e-6; the weights drawn here have none, so the usual tolerance applies. Their rounding is done in single
precision whatever the model is in, so there is no reference in double; our own ways of decoding are compared there.
"""

import pytest
import torch
from torch import nn
from transformers import BitNetConfig, BitNetForCausalLM
from transformers.integrations.bitnet import AutoBitLinear, BitLinear, pack_weights

import decoders
import parity
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.linear.bitlinear import Bit, quantize_ternary, quantize_tokens
from allyouneed.nn.norms import RMSNorm

SMALL = dict(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=31,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
)
ONLINE = dict(quant_method="bitnet", linear_class="autobitlinear", quantization_mode="online")
CASES = {
    "groups of queries": {},
    "one key for all, tied, odd sizes": dict(
        num_attention_heads=3, num_key_value_heads=1, intermediate_size=29, tie_word_embeddings=True
    ),
    "another activation, another base": dict(
        hidden_act="silu", rms_norm_eps=1e-3, rope_parameters=dict(rope_type="default", rope_theta=500.0)
    ),
}


@pytest.fixture(autouse=True)
def _their_functions_uncompiled():
    with torch.compiler.set_stance("force_eager"):
        yield


# --- the map ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 3), (63, 100), (256, 65)])
@pytest.mark.parametrize("norm", [None, RMSNorm(eps=1e-6)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_map_and_its_gradients(inputs, outputs, norm, bias, record_difference):
    torch.manual_seed(inputs)
    theirs = AutoBitLinear(inputs, outputs, bias, online_quant=True, use_rms_norm=norm is not None)
    ours = Bit(norm=norm).build(inputs, outputs, bias)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
        theirs.weight.mul_(inputs**-0.5)
    weights = {name.replace("rms_norm", "norm"): tensor for name, tensor in theirs.state_dict().items()}
    ours.load_state_dict(weights)
    given = torch.randn(2, 11, inputs)
    given[0, 0] = 0  # nothing to measure
    given[0, 1, 0] = 1e4  # one that makes the rest small
    results = []
    for layer in (ours, theirs):
        x = given.clone().requires_grad_()
        y = layer(x)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        found = dict(layer.named_parameters())
        results.append([y, x.grad, *(p.grad for _, p in sorted(found.items(), key=lambda i: "norm" in i[0]))])
    differences = [parity.difference(own, their) for own, their in zip(*results, strict=True)]
    assert max(differences) < 1e-6
    record_difference("BitNet b1.58", "transformers AutoBitLinear", differences[0], max(differences[1:]))


@pytest.mark.parametrize("shape", [(5, 7), (100, 63)])
def test_quantized_codes_are_equal(shape):
    """Exactly: dequantised as they do it, ours are theirs bit for bit. Halves go to the even number."""
    torch.manual_seed(0)
    theirs = AutoBitLinear(shape[1], shape[0], bias=False, online_quant=True)
    x = torch.randn(9, shape[1])
    tokens, _ = quantize_tokens(x)
    scale = 127 / x.abs().max(-1, keepdim=True).values
    one = torch.eye(shape[1])  # their map of the unit vectors shows their weights: 127 · (1 / 127) is 1
    weights, step = quantize_ternary(theirs.weight, [shape[0]])
    assert torch.equal(weights / (1 / step)[:, None], theirs(one).T)
    nothing = AutoBitLinear(shape[1], shape[1], bias=False, online_quant=False)  # but their rounding of activations
    nothing.weight = nn.Parameter(torch.eye(shape[1]))
    assert torch.equal(tokens / scale, nothing(x))
    halves, _ = quantize_tokens(torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 127.0]]))
    assert halves.tolist() == [[0.0, 2.0, 2.0, 0.0, -2.0, 127.0]]


def test_merged_maps_have_separate_scales():
    torch.manual_seed(0)
    sizes = (8, 3, 3)
    together = Bit().build(10, sizes, False)
    with torch.no_grad():
        together.weight.mul_(torch.tensor([1.0] * 8 + [5.0] * 3 + [0.1] * 3)[:, None])
    x, found = torch.randn(4, 10), []
    for size, weight in zip(sizes, together.weight.split(sizes), strict=True):
        alone = AutoBitLinear(10, size, bias=False, online_quant=True)
        alone.weight = nn.Parameter(weight.detach().clone())
        found.append(alone(x))
    torch.testing.assert_close(together(x), torch.cat(found, -1), rtol=1e-6, atol=1e-6)


# --- the model --------------------------------------------------------------------------------------------------------


def rounding(theirs):
    """Their model with the maps that its released weights are meant for."""
    for name, module in list(theirs.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            one = AutoBitLinear(module.in_features, module.out_features, module.bias is not None, online_quant=True)
            theirs.set_submodule(name, one)
    return theirs


def theirs(name):
    return rounding(BitNetForCausalLM(BitNetConfig(**SMALL | CASES[name], quantization_config=ONLINE)))


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference("BitNet b1.58", "transformers BitNetForCausalLM", *decoders.agree(theirs(name), tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations(name, tmp_path):
    decoders.continues_alike(theirs(name), tmp_path)


def test_folders_without_a_quantization_config_are_dense(tmp_path, record_difference):
    """As BitNetForCausalLM is then made of ordinary linear maps; exported, they stay so."""
    dense = BitNetForCausalLM(BitNetConfig(**SMALL))
    record_difference("BitNet b1.58", "transformers BitNetForCausalLM", *decoders.agree(dense, tmp_path))
    config, weights = parity.saved(dense, tmp_path)
    written, back = FAMILIES["bitnet"].write(FAMILIES["bitnet"].convert(config, weights))
    assert "quantization_config" not in written and all(back[name].equal(weights[name]) for name in weights)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["autobitlinear", "bitlinear"])
def test_released_files_with_four_weights_in_a_byte(kind, tmp_path):
    """Compared with their map for such files; `bitlinear` stores the reciprocal of the step."""
    name = "groups of queries"
    config, judged = BitNetConfig(**SMALL | CASES[name]), theirs(name).eval()
    parity.randomise(judged)
    weights = {}
    for path, module in list(judged.named_modules()):
        if isinstance(module, AutoBitLinear):
            ternary, step = quantize_ternary(module.weight, [module.out_features])
            step = step[:1] * 1.7  # any number: it need not be the one of the latent weights
            weights[f"{path}.weight"] = pack_weights(ternary.clone())
            weights[f"{path}.weight_scale"] = step if kind == "autobitlinear" else 1 / step
            if kind == "autobitlinear":
                one = AutoBitLinear(module.in_features, module.out_features, bias=False)
                one.weight = nn.Parameter(ternary)
            else:
                one = BitLinear(module.in_features, module.out_features, bias=False, dtype=torch.float32)
                one.weight = weights[f"{path}.weight"]
            one.weight_scale = weights[f"{path}.weight_scale"]
            judged.set_submodule(path, one)
    weights = {**judged.state_dict(), **weights}
    said = dict(quant_method="bitnet", linear_class=kind, quantization_mode="offline")
    model = FAMILIES["bitnet"].convert(config.to_dict() | {"quantization_config": said}, weights)
    rows = Rows(torch.tensor([decoders.TEXTS[0]]))
    assert parity.difference(model.logits(Batch(rows)), judged(input_ids=rows.tokens).logits) < parity.TOLERANCE


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"use_rms_norm": True}, "quantization_config.use_rms_norm"),
        ({"quant_method": "awq"}, "quantization_config.quant_method"),
        ({"bits": 3}, "quantization_config.bits"),
    ],
)
def test_unsupported_settings_are_refused_by_name(said, told):
    config = BitNetConfig(**SMALL).to_dict() | {"quantization_config": {"quant_method": "bitnet"} | said}
    with pytest.raises(UserError, match=told):
        FAMILIES["bitnet"].tree(config)
