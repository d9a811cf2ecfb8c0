"""Packed rows of few tokens on GPU: all scores of a row and head are one tile of a kernel, so that nothing is searched,
looped over or read twice (kernels/triton/training/row_attention.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from allyouneed.kernels import usable
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.ops.attention.dense import AttentionFn, HasFallback, ScoreMod


class ShortRows(HasFallback):
    """A token attends to its sentence, or to what is not later in it if `causal`. `make_fallback` builds the plan for
    what the kernel cannot do: dropout, odd head widths, single or mixed precision."""

    def __init__(
        self, queries: TokenLayout, keys: TokenLayout, causal: bool, make_fallback: Callable[[], AttentionFn]
    ) -> None:
        self.causal, self.make_fallback = causal, make_fallback
        self.tokens = [_segments(queries), _segments(keys), _positions(queries), _positions(keys)]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
        if dropout or not score_mod.plain or not can_tile(q, k, v):
            return self.fallback(q, k, v, dropout, score_mod)
        return attend(q, k, v, *self.tokens, self.causal, score_mod.scale)[0]


def can_tile(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return q.dtype == k.dtype == v.dtype and all(fits_tile(x.shape[-1], q.dtype) for x in (q, v))


def fits_tile(head_width: int, dtype: torch.dtype) -> bool:
    return 16 <= head_width <= 128 and not head_width & (head_width - 1) and dtype in (torch.bfloat16, torch.float16)


def _segments(layout: TokenLayout) -> Tensor:
    assert layout.segments is not None
    return layout.segments.to(torch.int32).contiguous()


def _positions(layout: TokenLayout) -> Tensor:
    assert layout.segments is not None
    return layout.positions.expand_as(layout.segments).to(torch.int32).contiguous()


@torch.library.custom_op("allyouneed::row_attention", mutates_args=())
def attend(
    q: Tensor, k: Tensor, v: Tensor, q_segments: Tensor, k_segments: Tensor, q_positions: Tensor, k_positions: Tensor,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale · q kᵀ) v (batch, heads, queries, width) within sentences, and the log-sum-exp of the scores.
    Segments and positions (batch, time) of queries and keys: as in `TokenLayout`; padding, 0, sees nothing."""
    out = _like_heads(q, v.shape[3])
    if usable(q):
        from allyouneed.kernels.triton.training.row_attention import row_attention

        tokens = q_segments, k_segments, q_positions, k_positions
        return out, row_attention(q, k, v, *tokens, causal, scale, out)
    k, v = _repeat(k, q), _repeat(v, q)
    scores = _scores(q, k, q_segments, k_segments, q_positions, k_positions, causal, scale)
    lse = scores.logsumexp(-1)
    lse = lse.where(lse.isfinite(), 0)
    out.copy_((scores - lse[..., None]).exp().to(v.dtype) @ v)
    return out, lse


attend.register_fake(
    lambda q, k, v, *rest: (
        _like_heads(q, v.shape[3]),
        q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32)),
    )
)


@torch.library.custom_op("allyouneed::row_attention_backward", mutates_args=())
def attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, q_segments: Tensor, k_segments: Tensor, q_positions: Tensor,
    k_positions: Tensor, causal: bool, scale: float, lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = _like_heads(q), _like_heads(k), _like_heads(v)
    tokens = q_segments, k_segments, q_positions, k_positions
    if usable(q):
        from allyouneed.kernels.triton.training.row_attention import row_attention_backward

        row_attention_backward(gradient, q, k, v, *tokens, causal, scale, lse, dq, dk, dv)
        return dq, dk, dv
    right, value = _repeat(k, q), _repeat(v, q)
    scores = _scores(q, right, *tokens, causal, scale)
    weights = (scores - lse[..., None].to(scores.dtype)).exp()
    slopes = gradient.to(weights.dtype) @ value.to(weights.dtype).mT
    slopes = weights * (slopes - (weights * slopes).sum(-1, keepdim=True)) * scale
    dq.copy_(slopes @ right.to(slopes.dtype))
    group = (k.shape[1], -1)
    dk.copy_((slopes.mT @ q.to(slopes.dtype)).unflatten(1, group).sum(2))
    dv.copy_((weights.mT @ gradient.to(weights.dtype)).unflatten(1, group).sum(2))
    return dq, dk, dv


attend_backward.register_fake(lambda gradient, *given: tuple(_like_heads(x) for x in given[:3]))  # q, k, v


@torch.library.custom_op("allyouneed::row_attention_qkv_backward", mutates_args=())
def attend_qkv_backward(
    gradient: Tensor, qkv: Tensor, heads: list[int], segments: Tensor, positions: Tensor, causal: bool, scale: float,
    lse: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient with respect to queries, keys and values that lie side by side (batch, time, width), with as many
    `heads` each; and its sums over the tokens of each row (batch, width)."""
    q, k, v = split_heads(qkv, heads)
    tokens, sums = (segments, segments, positions, positions), _empty_sums(qkv)
    if usable(qkv):
        from allyouneed.kernels.triton.training.row_attention import row_attention_backward

        found = torch.empty_like(qkv, memory_format=torch.contiguous_format)
        dq, dk, dv = split_heads(found, heads)
        row_attention_backward(gradient, q, k, v, *tokens, causal, scale, lse, dq, dk, dv, sums)
        return found, sums
    parts = attend_backward(gradient, q, k, v, *tokens, causal, scale, lse)
    found = torch.cat([part.transpose(1, 2).flatten(2) for part in parts], -1)
    return found, found.to(sums.dtype).sum(1)


attend_qkv_backward.register_fake(
    lambda gradient, qkv, *rest: (torch.empty_like(qkv, memory_format=torch.contiguous_format), _empty_sums(qkv))
)


def _empty_sums(x: Tensor) -> Tensor:
    return x.new_empty(len(x), x.shape[2], dtype=torch.promote_types(x.dtype, torch.float32))


def split_heads(qkv: Tensor, heads: Sequence[int]) -> tuple[Tensor, ...]:
    """Queries, keys and values (batch, heads, time, head_width) that lie side by side (batch, time, width)."""
    width = qkv.shape[-1] // sum(heads)
    return tuple(part.unflatten(-1, (-1, width)).transpose(1, 2) for part in qkv.split([n * width for n in heads], -1))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors, output[1])


def _gradients(ctx: Any, gradient: Tensor, of_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, lse = ctx.saved_tensors
    found = attend_backward(gradient, *tensors, ctx.causal, ctx.scale, lse)
    return *found, None, None, None, None, None, None


attend.register_autograd(_gradients, setup_context=_save)


def _like_heads(x: Tensor, width: int | None = None) -> Tensor:
    """(batch, heads, time, width), heads of a token side by side in memory."""
    batch, heads, time, own = x.shape
    return x.new_empty(batch, time, heads, own if width is None else width).transpose(1, 2)


def _repeat(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _scores(
    q: Tensor, k: Tensor, q_segments: Tensor, k_segments: Tensor, q_positions: Tensor, k_positions: Tensor,
    causal: bool, scale: float,
) -> Tensor:  # fmt: skip
    allowed = (q_segments[:, :, None] == k_segments[:, None]) & (q_segments > 0)[:, :, None]
    if causal:
        allowed &= q_positions[:, :, None] >= k_positions[:, None]
    wide = torch.promote_types(q.dtype, torch.float32)
    return (q.to(wide) @ k.to(wide).mT * scale).masked_fill(~allowed[:, None], -torch.inf)
