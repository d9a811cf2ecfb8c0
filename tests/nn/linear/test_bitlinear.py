"""Ternary maps: definition, training, and bitwise independence of the batch.

If an activation lies exactly between two integers, one rounding error in earlier layers decides, in any precision. Such
ties occur: outputs of a map without bias are integers times one step, and so are functions of single tokens or products
of such outputs (of 40 small BitNets eight had some, one of them showed it between prefill and steps). So only the map
itself is tested here; the invariants of whole models use biases or gains that avoid ties.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from allyouneed.config import parse
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.linear.bitlinear import Bit, BitLinear, quantize_ternary, quantize_tokens
from allyouneed.nn.models.base import Model
from allyouneed.nn.norms import RMSNorm
from allyouneed.training.optim.optimiser import groups
from any_part import case, tree


def layer(inputs, outputs, bias=True, norm=None, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return Bit(norm=norm).build(inputs, outputs, bias).to(dtype)


def test_matches_the_papers_equations():
    """Ma et al. 2024, eq. 1–3; Wang et al. 2023, eq. 4–5, one number at a time."""
    linear, x = layer(5, 3), torch.tensor([[0.3, -2.0, 0.0, 1.1, 0.7]])
    gamma = sum(abs(w) for row in linear.weight.tolist() for w in row) / 15
    peak = 2.0
    for out in range(3):
        total = 0
        for w, value in zip(linear.weight[out].tolist(), x[0].tolist(), strict=True):
            total += max(-1, min(1, round(w / gamma))) * round(value * 127 / peak)
        expected = total * gamma * peak / 127 + linear.bias[out].item()
        assert linear(x)[0, out].item() == pytest.approx(expected, rel=1e-6)


def test_weights_are_ternary_and_tokens_are_int8():
    linear = layer(63, 100)
    weights, step = quantize_ternary(linear.weight, linear.outputs)
    assert set(weights.unique().tolist()) == {-1, 0, 1} and step.unique().numel() == 1
    tokens, steps = quantize_tokens(torch.randn(7, 63) * torch.logspace(-3, 3, 7)[:, None])
    assert tokens.equal(tokens.round()) and tokens.abs().amax(-1).eq(127).all() and steps.shape == (7, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_bitwise_independent_of_the_batch(dtype):
    linear = layer(100, 63, dtype=dtype)
    batch = torch.randn(4, 33, 100, dtype=dtype)
    with torch.no_grad():
        whole = linear(batch)
        for row in range(4):
            for at in (0, 16, 32):
                assert linear(batch[row, at]).equal(whole[row, at])
        assert linear(batch[:, :7]).equal(whole[:, :7]) and linear(batch.flip(0, 1)).equal(whole.flip(0, 1))


def test_gradients_use_the_straight_through_estimator():
    """Those of the dense map with the rounded numbers: no gradient of rounding, bounds or steps."""
    linear, x = layer(7, 5, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        linear.weight[0, 0] = 40.0  # far out of bounds
    tokens, token_step = quantize_tokens(x.detach())
    weights, weight_step = quantize_ternary(linear.weight.detach(), [5])
    wanted = torch.randn(3, 5, dtype=torch.float64)
    linear(x).backward(wanted)
    torch.testing.assert_close(x.grad, wanted @ (weights * weight_step[:, None]))
    torch.testing.assert_close(linear.weight.grad, wanted.T @ (tokens * token_step))
    torch.testing.assert_close(linear.bias.grad, wanted.sum(0))


def test_half_precision_is_close():
    linear, x = layer(700, 40), torch.randn(5, 700)
    expected = linear(x)
    for dtype in (torch.bfloat16, torch.float16):
        found = layer(700, 40).to(dtype)(x.to(dtype))
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, atol=0.1, rtol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x).dtype == torch.bfloat16
    much = torch.full((1, 700), 3.0, dtype=torch.float16)  # every product 127: their sum is beyond float16
    one = layer(700, 1, bias=False).to(torch.float16)
    with torch.no_grad():
        one.weight.fill_(0.01)
    torch.testing.assert_close(one(much).item(), 21.0, atol=0.1, rtol=0)


@pytest.mark.parametrize("norm", [None, RMSNorm()])
@pytest.mark.parametrize("bias", [True, False])
def test_cost(norm, bias):
    built = layer(9, (4, 2), bias, norm)
    assert Bit(norm=norm).cost(9, 6, bias).parameters == sum(p.numel() for p in built.parameters())


def small(**keys):
    layers = {
        "repeat": 2,
        "wiring": "pre-norm",
        "mixer": {"kind": "attention", "heads": 4, "pattern": "causal", "positions": "rotary", "bias": False}
        | {"sub_norm": "rms"},
        "channel": {"kind": "glu", "hidden": 96, "activation": "relu-squared", "norm": True},
    }
    base = {"kind": "decoder", "vocab": 256, "width": 64, "norm": "rms", "linear": "bit", "decoder": [layers]}
    return parse(Model, base | {"init": {"kind": "normal"}, "embed": {"scale": "none"}} | keys)


def test_every_projection_of_a_model_is_ternary():
    model = small().build()
    maps = {name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, BitLinear)}
    assert maps == {"qkv", "out", "gate_up", "down"}
    assert not [name for name, module in model.named_modules() if type(module) is nn.Linear]
    assert model.decoder.blocks[0].sublayers["mixer"].qkv.outputs == (64, 64, 64)


def test_initialised_and_decayed_like_a_dense_model():
    torch.manual_seed(0)
    ours = small().build()
    torch.manual_seed(0)
    dense = small(linear="dense").build()
    assert all(p.equal(q) for p, q in zip(ours.parameters(), dense.parameters(), strict=True))
    found = groups(ours, 0.1)
    assert [[len(g["params"]), g["weight_decay"]] for g in found] == [
        [len(g["params"]), g["weight_decay"]] for g in groups(dense, 0.1)
    ]


@pytest.mark.slow
def test_a_small_model_trains():
    """Trains on the bytes of this project's own page to well below the unigram entropy, with every latent weight
    moving."""
    text = (Path(__file__).parents[3] / "README.md").read_bytes()
    tokens = torch.tensor(list(text[: 64 * 65])).view(64, 65)
    torch.manual_seed(0)
    model = small().build().train()
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimiser = torch.optim.AdamW(groups(model, 0.1), lr=1e-2, betas=(0.9, 0.98))
    losses = []
    for step in range(140):
        rows = tokens[step % 4 :: 4]
        logits = model.logits(Batch(Rows(rows[:, :-1])))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimiser.step()
        losses.append(loss.item())
    letters = tokens[:, 1:].flatten().bincount().float()
    entropy = torch.distributions.Categorical(letters).entropy().item()
    assert losses[0] > 5 and sum(losses[-4:]) / 4 < entropy - 0.5
    for name, parameter in model.named_parameters():
        assert not parameter.equal(first[name]), name


def test_linear_bit_makes_any_model_ternary():
    model = case("linear bit")
    found = [name for name, module in model.named_modules() if isinstance(module, BitLinear)]
    dense = parse(Model, tree()).build()
    assert found == [name for name, module in dense.named_modules() if isinstance(module, nn.Linear)]
