"""Backward passes that read each large tensor once, swapped into a model from outside.

`fuse_backward(model)` replaces the class of the modules it can speed up; their weights, names and results stay. Bias
gradients are then summed where their summands are written (bias_gradients.py): with the activation's gradient in a
feed-forward layer, with the concatenation of the query, key and value gradients in self-attention (or in the backward
pass of attention itself, which writes them side by side, in short packed rows), and with the layer norm's gradient in a
block. There the end of a sub-layer is *deferred* to the wiring, so that the norm's backward sums the gradient of its
output bias too: in pre-norm blocks the output map, whose product then adds the residual as well, in post-norm blocks
its bias, which the norm behind it adds before dropout.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from allyouneed.nn.channels.feedforward import FFNModule
from allyouneed.nn.context import Context
from allyouneed.nn.linear.dense import is_dense
from allyouneed.nn.mixers.attention.attention import CrossAttention, SelfAttention
from allyouneed.nn.mixers.attention.scores import ScoresModule
from allyouneed.nn.models.block import Block
from allyouneed.nn.norms import LayerNormModule
from allyouneed.nn.observe import is_observed
from allyouneed.nn.ops.attention.short_rows import ShortRows, attend, attend_qkv_backward, fits_tile, split_heads
from allyouneed.nn.positions.relative import RelativeModule
from allyouneed.nn.states.base import State
from allyouneed.nn.wiring.residual import Call, ChainedModule, PostNorm, PreNorm
from allyouneed.runtime.cuda.bias_gradients import (
    ACTIVATIONS,
    activation_backward,
    add_norm,
    add_norm_backward,
    layer_norm_backward,
    merge_heads,
)
from allyouneed.runtime.cuda.products import EPILOGUES, FastLinear, linear_add, linear_epilogue
from allyouneed.runtime.swapped_linear import linear, product_dtype

FUSIONS = ("ffn", "qkv", "norms", "biases")


def fuse_backward(model: nn.Module, fusions: Collection[str] = FUSIONS) -> None:
    """Swap in the fused modules wherever they apply. `biases` needs `norms`."""
    for module in list(model.modules()):
        if "ffn" in fusions and isinstance(module, FFNModule) and can_fuse_ffn(module):
            _swap(module, FusedFFN)
        elif "qkv" in fusions and isinstance(module, SelfAttention) and can_fuse_qkv(module):
            _swap(module, FusedQKV)
    for module in list(model.modules()):
        if "norms" in fusions and isinstance(module, Block) and can_fuse_norms(module.wiring):
            _swap(module.wiring, ForkedPreNorm if is_pre_norm(module.wiring) else FusedPostNorm)
            if "biases" in fusions:
                _defer_outputs(module)


def can_fuse_ffn(module: FFNModule) -> bool:
    return has_local_bias(module.up) and module.kind in ACTIVATIONS


def can_fuse_qkv(module: SelfAttention) -> bool:
    """Nothing stands between the projection and attention. Where something does (rotary positions, a norm), the
    compiler fuses it with the concatenation of the gradients."""
    return has_local_bias(module.qkv) and module.q_norm is None and type(module.relative) is RelativeModule


def can_fuse_norms(wiring: Any) -> bool:
    if not isinstance(wiring, ChainedModule) or not isinstance(wiring.config, PreNorm | PostNorm):
        return False
    if isinstance(wiring.config, PostNorm) and wiring.scale_start is not None:
        return False
    return all(isinstance(n, LayerNormModule) and _is_local(n.weight) and _is_local(n.bias) for n in wiring.norms)


def is_pre_norm(wiring: Any) -> bool:
    return isinstance(wiring.config, PreNorm)


def has_local_bias(module: Any) -> bool:
    """A dense linear map with a bias, both held whole by this process."""
    return is_dense(module) and _is_local(module.weight) and _is_local(module.bias)


def _is_local(weight: Tensor | None) -> bool:
    return type(weight) is nn.Parameter


# --- modules ----------------------------------------------------------------------------------------------------------


def _swap(module: nn.Module, fused: type) -> None:
    if not isinstance(module, fused):
        module.__class__ = _mixed(fused, type(module))  # type: ignore[arg-type]  # types hash


@functools.cache
def _mixed(fused: type, plain: type) -> type:
    return type(f"{fused.__name__}{plain.__name__}", (fused, plain), {"computes_as": computes_as(plain)})


def computes_as(kind: type) -> type:
    """The class whose formula a module of this class computes: its own, unless it was swapped in here."""
    found: type = getattr(kind, "computes_as", kind)
    return found


class Fused:
    """A module whose class was swapped. `computes_as`: the class whose formula it computes, for executors that lower
    modules by their class."""

    computes_as: ClassVar[type]


class FusedFFN(Fused, FFNModule):
    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        hidden = self.dropout(linear_activation(x, self.up, self.kind))
        return self.project_out(hidden if self.norm is None else self.norm(hidden, context))


class FusedQKV(Fused, SelfAttention):
    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        if state is None and (rows := self.short_rows(x, context)) is not None:
            seen = attend_qkv(x, self.qkv, [self.heads, self.kv_heads, self.kv_heads], rows, self.score_mod().scale)
            return self.merge_heads(seen, context)
        return super().forward(x, context, state)

    def short_rows(self, x: Tensor, context: Context) -> ShortRows | None:
        """The plan for packed rows whose scores are one tile, where queries, keys and values are attended to as they
        are projected, and no probe reads them."""
        mod, plain = self.score_mod(), type(self.scores).prepare is ScoresModule.prepare
        watched = context.record is not None or is_observed()
        if watched or not plain or not mod.plain or (self.training and self.dropout):
            return None
        rows = self.attention_fn(context, context.queries, len(x), mod)
        return rows if isinstance(rows, ShortRows) and fits_tile(self.head_width, product_dtype(x)) else None

    def split_qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return linear_split(x, self.qkv, [self.inner, self.kv_width, self.kv_width], self.head_width)


class DeferredBias(Fused):
    """The output bias is left to the wiring while training (`FusedPostNorm`)."""

    training: bool

    def project_out(self, x: Tensor) -> Tensor:
        last = output_map(self)
        return linear(x, last, None if self.training else last.bias)


class DeferredOutput(Fused):
    """The output map is left to the wiring while training and unobserved (`ForkedPreNorm`): what is returned is its
    input."""

    training: bool

    def project_out(self, x: Tensor) -> Tensor:
        last = output_map(self)
        return x if self.training and not is_observed() else linear(x, last, last.bias)


class ForkedPreNorm(Fused, ChainedModule):
    """The formula of `PreNorm`, x + f(norm(x)), with norm and residual in one autograd function. Where f ends with a
    deferred map, its product adds the residual, and the norm's backward sums the gradient of its bias."""

    deferred: Sequence[nn.Linear | None] = ()  # by sub-layer: the map that is applied here

    def before(self, stream: Any, number: int, norms: list[Call]) -> tuple[Any, Any]:
        if not isinstance(stream, Tensor):  # a symbolic value: trace the plain formula
            return super().before(stream, number, norms)
        norm: Any = self.norms[number]
        last = self.deferred_map(number)
        return fork_norm(stream, norm.weight, norm.bias, norm.eps, None if last is None else last.bias)

    def after(self, stream: Any, y: Any, number: int, norms: list[Call]) -> Any:
        last = self.deferred_map(number) if isinstance(stream, Tensor) else None
        if last is None:
            return super().after(stream, y, number, norms)
        return linear_add(y, last, last.bias.detach(), stream)

    def deferred_map(self, number: int) -> nn.Linear | None:
        return self.deferred[number] if self.deferred and self.training and not is_observed() else None


class FusedPostNorm(Fused, ChainedModule):
    """The formula of `PostNorm`, LayerNorm(x + dropout(f(x))), as one autograd function. The result, but for that of
    the last sub-layer, is returned twice, so that the gradients of both uses are added in the norm's backward: the
    stream is a pair within a block."""

    deferred: Sequence[nn.Linear | None] = ()  # by sub-layer: the map whose bias is added here

    def before(self, stream: Any, number: int, norms: list[Call]) -> tuple[Any, Any]:
        return stream if isinstance(stream, tuple) else (stream, stream)

    def after(self, stream: Any, y: Any, number: int, norms: list[Call]) -> Any:
        if not isinstance(stream, Tensor) or not self.training:
            return super().after(stream, y, number, norms)
        bias = None if not self.deferred or (last := self.deferred[number]) is None else last.bias
        seed = torch.randint(1 << 40, (1,), device=y.device) if self.dropout.p else None
        more = number < len(self.norms) - 1
        both = sum_norm(stream, y, bias, seed, self.dropout.p, self.norms[number], more)
        return both if more else both[0]


def _defer_outputs(block: Block) -> None:
    """Leave the last step of parts that end with their output map to the wiring; a subclass may do more after it."""
    wiring: Any = block.wiring
    if is_pre_norm(wiring) and (wiring.dropout.p or wiring.scale_start is not None):
        return  # it would have to pass through them
    left = DeferredOutput if is_pre_norm(wiring) else DeferredBias
    plain = (SelfAttention, CrossAttention, FFNModule)
    deferred: list[nn.Linear | None] = []
    parts: list[Any] = list(block.sublayers.values())
    for part in parts:
        defers = computes_as(type(part)) in plain and has_local_bias(output_map(part))
        deferred.append(output_map(part) if defers else None)
        if defers:
            _swap(part, left)
    wiring.deferred = deferred


def output_map(part: Any) -> Any:
    return part.down if isinstance(part, FFNModule) else part.out


# --- autograd ---------------------------------------------------------------------------------------------------------


def linear_activation(x: Tensor, module: Any, kind: str) -> Tensor:
    """activation(module(x))"""
    if isinstance(module, FastLinear) and module.training and kind in EPILOGUES and x.numel():
        return linear_epilogue(x, module, kind)
    out: Tensor = _Activation.apply(linear(x, module, module.bias.detach()), module.bias, kind)
    return out


def linear_split(x: Tensor, module: Any, sizes: Sequence[int], head_width: int) -> tuple[Tensor, ...]:
    """module(x) split into parts of these sizes, each (batch, heads, time, head_width)."""
    out: tuple[Tensor, ...] = _SplitHeads.apply(
        linear(x, module, module.bias.detach()), module.bias, tuple(sizes), head_width
    )
    return out


def attend_qkv(x: Tensor, module: Any, heads: list[int], rows: ShortRows, scale: float) -> Tensor:
    """Attention within sentences with queries, keys and values module(x). `heads`: how many of each."""
    qkv, (segments, _, positions, _) = linear(x, module, module.bias.detach()), rows.tokens
    out: Tensor = _AttendQKV.apply(qkv, module.bias, heads, segments, positions, rows.causal, scale)
    return out


def fork_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, deferred: Tensor | None) -> tuple[Tensor, Tensor]:
    """LayerNorm(x), and x, to which the deferred bias will be added: its gradient is that of x here."""
    normal, residual = _ForkNorm.apply(x, weight, bias, eps, deferred)
    return normal, residual


def sum_norm(
    x: Tensor, y: Tensor, bias: Tensor | None, seed: Tensor | None, dropout: float, norm: Any, twice: bool
) -> tuple[Tensor, Tensor]:
    """LayerNorm(x + dropout(y + bias)), as two results if it is used `twice`."""
    out: tuple[Tensor, ...] = _AddNorm.apply(x, y, bias, seed, dropout, norm.weight, norm.bias, norm.eps, twice)
    return out[0], out[-1]


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return ACTIVATIONS[kind].value(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        gradient, sums = activation_backward(gradients[0], x, ctx.kind)
        return gradient, sums.sum(0), None


class _AttendQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, bias: Tensor, heads: list[int], segments: Tensor, positions: Tensor, causal: bool,
        scale: float,
    ) -> Tensor:  # fmt: skip
        tokens = segments, segments, positions, positions
        out, lse = attend(*split_heads(qkv, heads), *tokens, causal, scale)
        ctx.save_for_backward(qkv, segments, positions, lse)
        ctx.heads, ctx.causal, ctx.scale = heads, causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        qkv, segments, positions, lse = ctx.saved_tensors
        found, sums = attend_qkv_backward(gradients[0], qkv, ctx.heads, segments, positions, ctx.causal, ctx.scale, lse)
        return found, sums.sum(0), None, None, None, None, None


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, sizes: tuple[int, ...], head_width: int) -> tuple[Tensor, ...]:
        return tuple(part.unflatten(-1, (-1, head_width)).transpose(1, 2) for part in x.split(sizes, -1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, sums = merge_heads(list(gradients))
        return gradient, sums.sum(0), None, None


class _ForkNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, deferred: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normal, mean, scale = torch.native_layer_norm(wide, x.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.deferred = deferred is not None
        return normal.to(x.dtype), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, sums = layer_norm_backward(*gradients, *ctx.saved_tensors)
        weight, bias, deferred = sums.sum(1).unbind()
        return gradient, weight, bias, None, deferred if ctx.deferred else None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, deferred: Tensor | None, seed: Tensor | None, dropout: float, weight: Tensor,
        bias: Tensor, eps: float, twice: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        out, total, kept, mean, scale = add_norm(x, y, deferred, seed, dropout, weight, bias, eps)
        ctx.save_for_backward(total, weight, mean, scale, *([] if seed is None else [kept]))
        ctx.deferred, ctx.factor, ctx.dtype = deferred is not None, 1 / (1 - dropout), y.dtype
        return (out, out.clone()) if twice else (out,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, mean, scale, *kept = ctx.saved_tensors
        second = gradients[1] if len(gradients) > 1 else None
        mask = kept[0] if kept else None
        of_x, of_y, sums = add_norm_backward(gradients[0], second, total, mask, ctx.factor, weight, mean, scale)
        by_weight, by_bias, deferred = sums.sum(1).unbind()
        of_y = (of_y if kept else of_x).to(ctx.dtype)
        return of_x, of_y, deferred if ctx.deferred else None, None, None, by_weight, by_bias, None, None
