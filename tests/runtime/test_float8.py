"""8-bit matrix products in training: the rounding, the three products of a linear map, and which maps use them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from allyouneed import torch_private
from allyouneed.config import parse
from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.linear.dense import is_dense
from allyouneed.nn.models.base import Model
from allyouneed.nn.ops import float8
from allyouneed.nn.ops.float8 import E4M3, E5M2, float8_linear, quantize
from allyouneed.runtime.cuda.fused_backward import fuse_backward
from allyouneed.runtime.float8 import CAPABILITY, Float8Linear, check_device, use_float8
from allyouneed.tasks.language.causal_lm import CausalLM

TREE = {
    "kind": "decoder", "vocab": 40, "width": 32,
    "decoder": [
        {"wiring": "pre-norm", "mixer": {"kind": "attention", "heads": 4, "pattern": "causal"},
         "channel": {"kind": "ffn", "hidden": 48}},
        {"wiring": "pre-norm", "mixer": {"kind": "attention", "heads": 4, "pattern": "causal"},
         "channel": {"kind": "moe", "experts": 2, "expert": {"kind": "ffn", "hidden": 32}}},
        {"wiring": "pre-norm", "mixer": {"kind": "attention", "heads": 4, "pattern": "causal"},
         "channel": {"kind": "ffn", "hidden": 40}},
    ],
}  # fmt: skip


def rounded(x: Tensor, kind: torch.dtype) -> Tensor:
    """The nearest multiples in this format, by its definition: mantissa and exponent, ties to even."""
    mantissa, lowest, largest = {E4M3: (3, -6, 448.0), E5M2: (2, -14, 57344.0)}[kind]
    step = x.abs().max() / largest
    scaled = x / step
    exponent = scaled.abs().clamp(min=2.0**lowest).log2().floor()
    unit = 2.0 ** (exponent - mantissa)
    return (scaled / unit).round() * unit * step


@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_quantize_rounds_to_the_format(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 33) * torch.logspace(-6, 2, 33)
    codes, step = quantize(x, kind)
    torch.testing.assert_close(codes.double() * step.double(), rounded(x.double(), kind), rtol=1e-6, atol=0)
    assert codes.double().abs().max() == torch.finfo(kind).max
    assert quantize(torch.zeros(3, 16), kind)[0].float().eq(0).all()
    assert quantize(torch.tensor([[1.0, float("inf")]]), kind)[0].float().isnan().any()  # which the guard then finds


@pytest.mark.parametrize("rows", [(16,), (3, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_the_rounded_factors(rows: tuple[int, ...], bias: bool) -> None:
    """In double precision, with the gradients; 21 rows are filled up with zeros, which change nothing."""
    torch.manual_seed(1)
    x, gradient = torch.randn(*rows, 32, requires_grad=True), torch.randn(*rows, 48) * 1e-7
    weight, b = torch.randn(48, 32, requires_grad=True), torch.randn(48, requires_grad=True) if bias else None
    y = float8_linear(x, weight, b, torch.float32)
    y.backward(gradient)
    flat, changes = (t.detach().double().flatten(0, -2) for t in (x, gradient))
    x8, w8, g8 = rounded(flat, E4M3), rounded(weight.detach().double(), E4M3), rounded(changes, E5M2)
    expected = x8 @ w8.t() + (0 if b is None else b.detach().double())
    torch.testing.assert_close(y.detach().double().flatten(0, -2), expected, rtol=1e-5, atol=1e-5)
    for found, wanted in ((x.grad, (g8 @ w8).view_as(x)), (weight.grad, g8.t() @ x8)):
        assert found is not None
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-12)
    if b is not None and b.grad is not None:
        torch.testing.assert_close(b.grad.double(), changes.sum(0), rtol=1e-5, atol=1e-12)
    exact = flat @ weight.detach().double().t() + (0 if b is None else b.detach().double())
    assert 0 < (expected - exact).norm() / exact.norm() < 0.05  # rounded, but not much


def build() -> Any:
    torch.manual_seed(2)
    return parse(Model, TREE).build().train()  # type: ignore[type-abstract]


def test_maps_that_suit_are_swapped() -> None:
    model = build()
    names = use_float8(model)
    swapped = {name: part for name, part in model.named_modules() if isinstance(part, Float8Linear)}
    assert set(names) == set(swapped) and all(map(is_dense, swapped.values()))
    attention = [f"decoder.blocks.{layer}.sublayers.mixer.{name}" for layer in range(3) for name in ("qkv", "out")]
    assert set(names) == {*attention, *(f"decoder.blocks.0.sublayers.channel.{name}" for name in ("up", "down"))}
    assert use_float8(model) == names  # once more changes nothing


def gradients(model: Any) -> list[Tensor]:
    tokens = torch.arange(60).view(4, 15) * 7 % 40
    batch = Batch(Rows(tokens), labels=tokens.roll(-1, 1))
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        CausalLM().loss(model, batch).total.div(60).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    both = [torch.cat([g.flatten() for g in each]) for each in (found, wanted)]
    return float((both[0] - both[1]).norm() / both[1].norm())


def test_a_model_trains_in_8_bits_and_evaluates_in_16() -> None:
    plain = build()
    wanted, tokens = gradients(plain), Batch(Rows(torch.arange(12)[None]))
    with torch.autocast("cpu", torch.bfloat16):
        scores = plain.eval().logits(tokens)
    model = build()
    use_float8(model)
    found = gradients(model)
    assert 1e-3 < distance(found, wanted) < 0.15
    fused = build()
    use_float8(fused)
    fuse_backward(fused)
    assert distance(gradients(fused), found) < 0.02  # the same maps inside of fused sub-layers; biases are added later
    compiled = build()
    use_float8(compiled)
    compiled.decoder.blocks[0].compile(backend="aot_eager", dynamic=False)
    assert distance(gradients(compiled), found) < 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        assert model.eval().logits(tokens).equal(scores)


def test_operands_have_the_layouts_that_a_gpu_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch checks shapes, strides and types for a GPU on tensors without values."""
    calls: list[tuple[torch.dtype, torch.dtype, torch.dtype]] = []

    def spied(x: Tensor, y: Tensor, *rest: Any, **options: Any) -> Tensor:
        found = torch_private.scaled_matmul(x, y, *rest, **options)
        with FakeTensorMode():
            both = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in (x, y)]
            steps, bias, dtype = torch.empty(2, device="cuda"), rest[2], rest[3]
            fake_bias = None if bias is None else torch.empty(len(bias), device="cuda")
            fake = torch_private.scaled_matmul(*both, *steps, fake_bias, dtype, **options)
        assert (fake.shape, fake.dtype) == (found.shape, found.dtype)
        calls.append((x.dtype, y.dtype, dtype))
        return found

    monkeypatch.setattr(float8, "scaled_matmul", spied)
    x, weight, bias = torch.randn(2, 9, 32).bfloat16(), torch.randn(48, 32), torch.randn(48)
    y = float8_linear(x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), torch.bfloat16)
    y.sum().backward()
    assert calls == [(E4M3, E4M3, torch.bfloat16), (E5M2, E4M3, torch.bfloat16), (E5M2, E4M3, torch.float32)]
    assert [t.grad is not None and t.grad.dtype for t in (x, weight, bias)] == [t.dtype for t in (x, weight, bias)]


def test_a_gpu_without_8_bit_units_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A40")
    with pytest.raises(UserError, match=r"capability 8\.9 or newer; NVIDIA A40 has 8\.6; use precision: bf16"):
        check_device(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: CAPABILITY)
    check_device(torch.device("cuda", 0))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(UserError, match="NVIDIA"):
        check_device(torch.device("cuda", 0))
