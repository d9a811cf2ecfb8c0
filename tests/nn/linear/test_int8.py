"""Int8 maps match integer arithmetic on every path, with per-token activation ranges."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import any_part as anypart
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.linear import int8 as quantized
from allyouneed.nn.linear.int8 import Int8Linear, Int8Weight, int8_linear_reference
from allyouneed.nn.models.precision import to_int8
from allyouneed.nn.models.weights import meta_model, named_tensors
from any_part import CASES

BATCH = Batch(Rows.of([[1, 2, 3], [4, 5, 6, 7, 8]]), Rows.of([[1, 2, 3, 4], [5, 6]]))


def tokens(*shape: int) -> Tensor:
    """Random ones of many ranges, none of whose numbers lies near the middle between two steps."""
    q = torch.randint(0, 256, shape).float()
    jitter = torch.rand(shape) * 0.6 - 0.3
    q[..., 0], q[..., 1] = 0, 255
    jitter[..., :2] = 0
    zero = torch.randint(0, 256, (*shape[:-1], 1))
    zero[..., 0, :] = 0  # nothing below zero, as after a ReLU
    return (q - zero + jitter) * (torch.rand(*shape[:-1], 1) * 0.1 + 0.001)


def oracle(x: Tensor, linear: Int8Linear) -> Tensor:
    """Token by token, the sums in 64-bit integers, everything else in double precision."""
    rows = []
    for token in x.double().reshape(-1, x.shape[-1]):
        low, high = min(0.0, float(token.min())), max(0.0, float(token.max()))
        step = (high - low) / 255
        zero = round(-low / step) if step else 0
        step = max(step, quantized.MIN_STEP)
        whole = (token / step + zero).round().clamp(0, 255).long() - zero
        sums = linear.codes.long() @ whole
        found = sums.double() * linear.step.double() * step
        rows.append(found if linear.bias is None else found + linear.bias.double())
    return torch.stack(rows).view(*x.shape[:-1], -1)


def made(inputs: int, outputs: int, bias: bool = True) -> tuple[nn.Linear, Int8Linear]:
    torch.manual_seed(inputs + outputs)
    dense = nn.Linear(inputs, outputs, bias)
    return dense, Int8Linear(Int8Weight.of(dense.weight), dense.bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (2, 1), (5,), (3, 4), (33,)])
@pytest.mark.parametrize(("inputs", "outputs"), [(7, 3), (64, 100), (131, 65)])
def test_matmuls_match_integer_arithmetic(inputs: int, outputs: int, shape: tuple[int, ...], bias: bool) -> None:
    _, linear = made(inputs, outputs, bias)
    x = tokens(*shape, inputs)
    expected = oracle(x, linear)
    with torch.inference_mode():
        for found in (linear(x), int8_linear_reference(x, linear.codes, linear.step, linear.bias)):
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 4])
def test_sums_do_not_overflow(rows: int) -> None:
    """The largest numbers there are, all of one sign: 255 · 127 · inputs."""
    linear = Int8Linear(Int8Weight(torch.full((16, 300), 127, dtype=torch.int8), torch.ones(16)), None)
    x = torch.full((rows, 300), 255.0)
    assert torch.equal(linear(x), torch.full((rows, 16), 255.0 * 127 * 300))
    assert torch.equal(linear(-x), torch.full((rows, 16), -255.0 * 127 * 300))


def test_weight_rounding_error_is_at_most_half_a_step() -> None:
    dense, linear = made(50, 40)
    assert ((linear.weight - dense.weight).abs() <= linear.step[:, None] * 0.5001).all()
    assert linear.codes.abs().amax(1).eq(127).all()


@pytest.mark.parametrize("rows", [1, 3])
def test_zeros_give_the_bias(rows: int) -> None:
    _, linear = made(20, 9)
    torch.testing.assert_close(linear(torch.zeros(rows, 20)), linear.bias.expand(rows, -1))
    assert linear(torch.zeros(0, 20)).shape == (0, 9)


def test_activations_are_quantized_per_token() -> None:
    _, linear = made(64, 32)
    quiet, loud = tokens(1, 64), 1000 * tokens(1, 64)
    alone, together = linear(quiet), linear(torch.cat([loud, quiet, loud]))
    torch.testing.assert_close(together[1:2], alone, rtol=1e-5, atol=1e-6)


def test_without_fbgemm_results_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    _, linear = made(64, 32)
    x = tokens(5, 64)
    packed = linear(x)
    monkeypatch.setattr(quantized, "has_fbgemm", lambda: False)
    torch.testing.assert_close(linear(x), packed, rtol=1e-5, atol=1e-5)


def test_casting_the_model_does_not_round_steps() -> None:
    _, linear = made(64, 32)
    x, step = torch.randn(5, 64), linear.step.clone()
    expected = linear(x.bfloat16().float())
    found = linear.to(torch.bfloat16)(x.bfloat16())
    assert found.dtype is torch.bfloat16 and torch.equal(linear.step, step)
    torch.testing.assert_close(found, expected.bfloat16())


@pytest.mark.parametrize("name", anypart.KIND_CASES)
def test_meta_models_are_quantized_like_real_ones(name: str) -> None:
    """A folder holds what a meta model of its config expects."""
    model = to_int8(anypart.build(CASES[name]).float())
    twin = to_int8(meta_model(model.config))  # type: ignore[arg-type]
    assert {n: t.shape for n, t in named_tensors(model).items()} == {n: t.shape for n, t in named_tensors(twin).items()}
    with torch.inference_mode():
        assert model.logits(BATCH).isfinite().all()  # type: ignore[operator]


def test_a_tied_embedding_and_head_share_codes() -> None:
    model = anypart.build(anypart.tree() | {"vocab": 300}).float()
    plain = sum(tensor.nbytes for tensor in named_tensors(model).values())
    small = to_int8(copy.deepcopy(model))
    assert small.head.product.codes is small.embed.tokens.codes  # type: ignore[union-attr]
    assert (
        sum(tensor.nbytes for tensor in named_tensors(small).values()) < 0.5 * plain
    )  # steps and norms are in single precision
    with torch.inference_mode():
        before, after = model.logits(BATCH), small.logits(BATCH)  # type: ignore[operator]
    assert 0 < float((before - after).abs().max()) < 0.1 * float(before.abs().max())


def test_the_loss_matches_the_logits() -> None:
    model = to_int8(anypart.build(anypart.tree()).float())
    with torch.inference_mode():
        x = torch.randn(2, 3, 12)
        labels = torch.tensor([[1, 2, -100], [3, -100, 4]])
        total, plain = model.head.loss(x, labels, 0.1)  # type: ignore[union-attr, operator]
        scores = model.head(x).log_softmax(-1)  # type: ignore[operator]
        kept = labels >= 0
        expected = -scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0][kept].sum()
        torch.testing.assert_close(plain, expected)
        torch.testing.assert_close(total, 0.9 * expected - 0.1 * scores.mean(-1)[kept].sum())
