"""Fused backward passes give the gradients that autograd gives."""

import pytest
import torch

from allyouneed.config import parse
from allyouneed.nn.batch import Rows
from allyouneed.nn.channels.feedforward import FFN
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.init.depth import Depth
from allyouneed.nn.linear.bitlinear import Bit
from allyouneed.nn.mixers.attention.attention import Attention
from allyouneed.nn.models.block import Layer
from allyouneed.nn.ops.activations import ACTIVATIONS
from allyouneed.nn.ops.attention.short_rows import ShortRows
from allyouneed.runtime.cuda import bias_gradients, fused_backward
from allyouneed.runtime.cuda.bias_gradients import ACTIVATIONS as FUSED
from allyouneed.runtime.cuda.bias_gradients import activation_backward, merge_heads
from allyouneed.runtime.cuda.fused_backward import (
    DeferredBias,
    DeferredOutput,
    ForkedPreNorm,
    Fused,
    FusedPostNorm,
    can_fuse_ffn,
    can_fuse_qkv,
    fuse_backward,
)

COMMON = Common(width=12)
CONTEXT = Context(TokenLayout.of(Rows.of([[1, 2, 3, 4, 5], [6, 7, 8]])))


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bias_gradients, "ROWS", 4)


@pytest.mark.parametrize("kind", FUSED)
def test_fused_activations_equal_the_plain_ones_and_their_derivatives(kind):
    x = torch.linspace(-9, 9, 1000, dtype=torch.double, requires_grad=True)
    exact = ACTIVATIONS[kind](x)
    torch.testing.assert_close(FUSED[kind].value(x), exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        FUSED[kind].derivative(x), torch.autograd.grad(exact.sum(), x)[0], rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_partial_sums_add_up_to_the_sum_of_the_gradient(dtype):
    x, gradient = torch.randn(2, 2, 7, 5, dtype=torch.double).to(dtype)
    found, sums = activation_backward(gradient, x, "silu")
    assert found.dtype == dtype and sums.dtype == torch.promote_types(dtype, torch.float32) and sums.shape == (4, 5)
    exact = gradient.double() * FUSED["silu"].derivative(x.double())
    near = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(found.double(), exact, rtol=near, atol=near)
    torch.testing.assert_close(sums.sum(0).double(), exact.sum((0, 1)), rtol=min(near, 1e-5), atol=min(near, 1e-5))


def test_heads_of_unequal_counts_are_merged():
    parts = [torch.randn(2, heads, 3, 4) for heads in (4, 2, 2)]
    found, sums = merge_heads(parts)
    assert torch.equal(found, torch.cat([part.transpose(1, 2).reshape(2, 3, -1) for part in parts], -1))
    torch.testing.assert_close(sums.sum(0), found.sum((0, 1)))


GIVEN = {
    "activation_backward": (torch.ones(3, 5), torch.ones(3, 5), "relu"),
    "merge_heads": ([torch.ones(2, 2, 3, 4)] * 3,),
    "layer_norm_backward": (*torch.ones(3, 2, 9, 5), torch.ones(5), torch.ones(2, 9, 1), torch.ones(2, 9, 1)),
    "add_norm": (*torch.ones(2, 2, 9, 5), torch.ones(5), torch.ones(1).long(), 0.1, torch.ones(5), torch.ones(5), 1e-5),
    "add_norm_backward": (
        *torch.ones(3, 2, 9, 5),
        torch.ones(2, 9, 5).bool(),
        1.5,
        torch.ones(5),
        torch.ones(2, 9, 1),
        torch.ones(2, 9, 1),
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_fake_kernels_give_the_real_shapes(name):
    torch.library.opcheck(getattr(bias_gradients, name), GIVEN[name], test_utils=("test_schema", "test_faketensor"))


def gradients(module: torch.nn.Module, x: torch.Tensor, compiled: bool, context=CONTEXT) -> list[torch.Tensor]:
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    y = run(x, context)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
    return [y, *torch.autograd.grad((y * weights).sum(), [x, *module.parameters()])]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "part",
    [
        FFN(hidden=20, activation="gelu-tanh"),
        FFN(hidden=20, activation="relu"),
        FFN(hidden=20, activation="relu", norm=True),
        Attention(heads=4),
        Attention(heads=4, kv_heads=2),
    ],
    ids=str,
)
def test_a_fused_part_has_the_gradients_of_the_plain_one(part, compiled):
    torch.manual_seed(1)
    module = part.build(COMMON).double()
    module.prepare(CONTEXT, 2)
    x = torch.randn(2, 5, 12, dtype=torch.double, requires_grad=True)
    wanted = gradients(module, x, False)
    fuse_backward(module)
    assert isinstance(module, Fused)
    for found, exact in zip(gradients(module, x, compiled), wanted, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("pattern", ["causal", "full"])
def test_short_packed_rows_are_attended_to_side_by_side(pattern, kv_heads, compiled, monkeypatch):
    torch.manual_seed(1)
    part = parse(Attention, {"kind": "attention", "heads": 4, "kv_heads": kv_heads, "pattern": pattern})
    module = part.build(COMMON).double()
    segments = torch.tensor([[1, 1, 1, 2, 2], [1, 2, 2, 3, 3]])
    context = Context(TokenLayout.of(Rows(torch.ones_like(segments), segments=segments)))
    x = torch.randn(2, 5, 12, dtype=torch.double, requires_grad=True)
    module.prepare(context, 2)
    wanted = gradients(module, x, False, context)
    fuse_backward(module)
    plan = ShortRows(context.queries, context.queries, pattern == "causal", pytest.fail)
    monkeypatch.setattr(module, "attention_fn", lambda *given: plan)
    monkeypatch.setattr(fused_backward, "fits_tile", lambda width, dtype: True)
    monkeypatch.setattr(module, "split_qkv", pytest.fail)
    for found, exact in zip(gradients(module, x, compiled, context), wanted, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)
    assert module.short_rows(x, context) is plan
    monkeypatch.setattr(fused_backward, "is_observed", lambda: True)
    assert module.short_rows(x, context) is None  # a probe sees queries, keys and values


def fused(module: torch.nn.Module) -> list[str]:
    """Fuse it; the names of the modules that were swapped."""
    fuse_backward(module)
    return [name for name, part in module.named_modules() if isinstance(part, Fused)]


def defers(module: torch.nn.Module) -> list[bool]:
    return [isinstance(part, DeferredBias | DeferredOutput) for part in module.sublayers.values()]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("wiring", ["pre-norm", "post-norm"])
def test_a_fused_block_has_the_gradients_of_the_plain_one(wiring, compiled):
    torch.manual_seed(1)
    ffn = {"kind": "ffn", "hidden": 20, "activation": "gelu"}
    layer = parse(Layer, {"wiring": {"kind": wiring}, "mixer": {"kind": "attention", "heads": 3}, "channel": ffn})
    module = layer.build(COMMON, Depth(0, 1, "decoder")).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    module.prepare(CONTEXT, 2)
    x = torch.randn(2, 5, 12, dtype=torch.double, requires_grad=True)
    wanted = gradients(module, x, False)
    assert len(fused(module)) == 3  # attention, the channel, the wiring
    swapped = ForkedPreNorm if wiring == "pre-norm" else FusedPostNorm
    assert isinstance(module.wiring, swapped) and defers(module) == [True, True]
    for found, exact in zip(gradients(module, x, compiled), wanted, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-11)


def test_a_fused_post_norm_drops_out_what_its_mask_says(monkeypatch):
    torch.manual_seed(1)
    tree = {"wiring": "post-norm", "mixer": {"kind": "attention", "heads": 3}, "channel": {"kind": "ffn", "hidden": 8}}
    module = parse(Layer, tree).build(COMMON.model_copy(update={"dropout": 0.4}), Depth(0, 1, "decoder")).double()
    module.prepare(CONTEXT, 2)
    for part in module.sublayers.values():  # only the dropout of the wiring
        for inner in part.modules():
            if hasattr(inner, "p"):
                inner.p = 0.0
    x = torch.randn(2, 5, 12, dtype=torch.double, requires_grad=True)
    seeds = torch.tensor([[5], [6]])
    draws = [torch.rand(2, 5, 12, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds]
    kept = iter([draw >= 0.4 for draw in draws])
    plain = module.wiring.dropout.forward
    module.wiring.dropout.forward = lambda y: y * next(kept) / 0.6
    wanted = gradients(module, x, False)
    module.wiring.dropout.forward = plain
    fuse_backward(module)
    drawn = iter(seeds)
    monkeypatch.setattr(torch, "randint", lambda *shape, **keys: next(drawn))
    for found, exact in zip(gradients(module, x, False), wanted, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("compiled", [False, True])
def test_fused_parts_train_in_bfloat16(compiled):
    """Under autocast, gradients are as precise as those of the plain parts, in the precision of the weights."""
    torch.manual_seed(1)
    ffn = {"kind": "ffn", "hidden": 20}
    layer = parse(Layer, {"wiring": "pre-norm", "mixer": {"kind": "attention", "heads": 3}, "channel": ffn})
    module = layer.build(COMMON, Depth(0, 1, "decoder"))
    module.prepare(CONTEXT, 2)
    x = torch.randn(2, 5, 12, requires_grad=True)
    exact = gradients(module, x, False)
    with torch.autocast("cpu", torch.bfloat16):
        usual = gradients(module, x, False)
        assert len(fused(module)) == 3
        found = gradients(module, x, compiled)
    for ours, plain, true in zip(found, usual, exact, strict=True):
        assert ours.dtype == plain.dtype
        assert (ours - true).norm() <= 1.5 * (plain - true).norm() + 1e-6


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.1},
        {"wiring": {"kind": "pre-norm", "layer_scale": 0.1}},
        {"mixer": {"kind": "longformer", "heads": 3, "window": 2}, "channel": None},
    ],
)
def test_an_output_is_deferred_only_where_it_is_added_unchanged(changes):
    common = COMMON.model_copy(update={"dropout": changes.pop("dropout", 0.0)})
    tree = {"wiring": "pre-norm", "mixer": {"kind": "attention", "heads": 3}, "channel": {"kind": "ffn", "hidden": 8}}
    module = parse(Layer, tree | changes).build(common, Depth(0, 1, "decoder"))
    assert fused(module) and not any(defers(module))


def test_nothing_is_deferred_in_eval_mode():
    layer = parse(Layer, {"wiring": "pre-norm", "channel": {"kind": "ffn", "hidden": 8}})
    module = layer.build(COMMON, Depth(0, 1, "decoder")).double()
    torch.nn.init.normal_(module.sublayers["channel"].down.bias)
    x = torch.randn(2, 5, 12, dtype=torch.double)
    wanted, alone = module(x, CONTEXT), module.sublayers["channel"](x, CONTEXT)
    fused(module)
    torch.testing.assert_close(module(x, CONTEXT), wanted)
    assert module.sublayers["channel"](x, CONTEXT).shape == (2, 5, 8)  # the input of the output map
    module.eval()
    torch.testing.assert_close(module(x, CONTEXT), wanted)
    torch.testing.assert_close(module.sublayers["channel"](x, CONTEXT), alone)


def test_parts_that_cannot_be_fused_are_left_alone():
    ternary = Common(width=12, linear=Bit())
    turned = parse(Attention, {"kind": "attention", "heads": 4, "positions": {"kind": "rotary"}})
    normed = parse(Attention, {"kind": "attention", "heads": 4, "qk_norm": {"kind": "layer"}})
    parts = [
        FFN(hidden=8, bias=False),
        FFN(hidden=8, activation="mish"),
        Attention(heads=4, bias=False),
        turned,
        normed,
    ]
    parts.append(parse(Attention, {"kind": "attention", "heads": 4, "bias": {"k": False}}))
    for part in parts:
        module = part.build(COMMON)
        assert not (can_fuse_ffn if isinstance(part, FFN) else can_fuse_qkv)(module) and not fused(module)
    assert not can_fuse_ffn(FFN(hidden=8).build(ternary)) and can_fuse_ffn(FFN(hidden=8).build(COMMON))
