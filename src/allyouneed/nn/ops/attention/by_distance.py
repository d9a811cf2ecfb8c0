"""Self-attention within sentences, whose scores get a number for each query and distance (Shaw, Transformer-XL), or
which is limited to pairs that share a code (LSH). Rows are packed or whole; in both, a distance is that of the columns.

`attend` is an operator that the compiler leaves alone; on a GPU it is a kernel
(kernels/triton/training/distance_attention.py), elsewhere the definition, which stores all scores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from allyouneed.kernels import usable
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.ops.attention.dense import AttentionFn, ScoreMod, repeat_kv
from allyouneed.nn.ops.unpack import flip_starts, sentence_starts

WIDEST = 128  # features of a head that fit in a program


class Sentences:
    """Where the sentence of each token begins and ends, `starts` and `ends` (batch, time) int32."""

    def __init__(self, layout: TokenLayout) -> None:
        if layout.segments is None:
            self.starts = torch.zeros(1, layout.time, dtype=torch.int32, device=layout.device)
            self.ends = torch.full_like(self.starts, layout.time - 1)
        else:
            self.starts = sentence_starts(layout).contiguous()
            self.ends = (layout.time - 1 - flip_starts(self.starts).flip(1)).contiguous()

    @classmethod
    def of(cls, context: Context) -> Sentences | None:
        """Those of the batch, one for all layers; None: they are not `known`."""
        if not cls.known(context.queries):
            return None
        return context.memoize(cls, "of the batch", lambda: cls(context.queries))

    @staticmethod
    def known(layout: TokenLayout) -> bool:
        """In training on a GPU, where positions follow one another."""
        there = layout.time > 0 and layout.consecutive and layout.order is None
        return there and torch.is_grad_enabled() and has_kernels(layout)


def has_kernels(layout: TokenLayout) -> bool:
    return layout.device.type == "cuda" and usable(torch.empty(0, device=layout.device))


class AttentionByDistance:
    """`make_fallback` builds the plan for what the kernel cannot do: dropout, wide heads."""

    def __init__(self, sentences: Sentences, causal: bool, make_fallback: Callable[[], AttentionFn]) -> None:
        self.sentences, self.causal, self.make_fallback = sentences, causal, make_fallback

    @cached_property
    def fallback(self) -> AttentionFn:
        return self.make_fallback()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
        if dropout or score_mod.by_query is None or max(q.shape[-1], v.shape[-1]) > WIDEST:
            return self.fallback(q, k, v, dropout, score_mod)
        scores, far, values = score_mod.by_query(q, score_mod.scale, self.causal)
        out, sums, _ = attend_within(
            q, k, v, self.sentences, self.causal, score_mod.scale, scores, far, sums=values is not None
        )
        return out if values is None else out + (sums @ values.to(sums.dtype)).to(out.dtype)


def attend_within(
    q: Tensor, k: Tensor, v: Tensor, sentences: Sentences, causal: bool, scale: float,
    scores: Tensor | None = None, far: int = 0, codes: Tensor | None = None, sums: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What is seen (batch, heads, time, width of v); with `sums`, the weights of each query by distance; and the
    log-sum-exp of the scores, −inf of a query without keys.

    `scores` (batch, heads, time, columns): the number of column c is added to the score of a key that is `far` − c
    tokens behind, that of the first and the last column also beyond. `codes` (batch, heads, time, rounds) int32: a
    token attends to others that have the same code as it in at least one round, not to itself.
    """
    device = q.device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else v.dtype
    k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
    none = q.new_empty(*q.shape[:3], 0, dtype=cast)
    scores = none if scores is None else scores.to(cast).contiguous()
    codes = none.to(torch.int32) if codes is None else codes.contiguous()
    rows = sentences.starts.expand(len(q), -1).contiguous(), sentences.ends.expand(len(q), -1).contiguous()
    out, lse, found = attend(q.to(cast), k.to(cast), v.to(cast), scores, codes, *rows, causal, far, sums, scale)
    return out, found, lse


@torch.library.custom_op("allyouneed::attend_by_distance", mutates_args=())
def attend(
    q: Tensor, k: Tensor, v: Tensor, scores: Tensor, codes: Tensor, starts: Tensor, ends: Tensor,
    causal: bool, far: int, sums: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What is seen, the log-sum-exp of the scores, and the sums; no `scores` or `codes`: without elements."""
    if usable(q):
        from allyouneed.kernels.triton.training.distance_attention import distance_attention

        return distance_attention(q, k, v, scores, codes, starts, ends, causal, far, sums, scale)
    every = _scores(q, k, scores, codes, starts, ends, causal, far, scale)
    out, lse, found = _empty(q, v, scores, sums)
    lse.copy_(every.logsumexp(-1))
    weights = (every - lse.where(lse.isfinite(), 0)[..., None]).exp()
    out.copy_(weights @ v.to(weights.dtype))
    if sums:
        found.zero_().scatter_add_(3, _columns(scores, far).expand_as(weights), weights.to(found.dtype))
    return out, lse, found


attend.register_fake(lambda q, k, v, scores, *rest: _empty(q, v, scores, sums=rest[-2]))


@torch.library.custom_op("allyouneed::attend_by_distance_backward", mutates_args=())
def attend_backward(
    gradient: Tensor, of_sums: Tensor, out: Tensor, lse: Tensor, found: Tensor, q: Tensor, k: Tensor, v: Tensor,
    scores: Tensor, codes: Tensor, starts: Tensor, ends: Tensor, causal: bool, far: int, sums: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if usable(q):
        from allyouneed.kernels.triton.training.distance_attention import distance_attention_backward

        gradients = distance_attention_backward(
            gradient, of_sums, out, lse, found, q, k, v, scores, codes, starts, ends, causal, far, sums, scale
        )
        return tuple(map(_laid_out, gradients, (q, k, v, scores)))  # type: ignore[return-value]
    every = _scores(q, k, scores, codes, starts, ends, causal, far, scale)
    weights = (every - lse.where(lse.isfinite(), 0)[..., None]).exp()
    slopes = gradient.to(weights.dtype) @ v.to(weights.dtype).mT
    if sums:
        slopes = slopes + of_sums.to(weights.dtype).gather(3, _columns(scores, far).expand_as(weights))
    slopes = weights * (slopes - (weights * slopes).sum(-1, keepdim=True))
    d_scores = torch.zeros_like(scores)
    if scores.numel():
        d_scores.scatter_add_(3, _columns(scores, far).expand_as(slopes), slopes.to(scores.dtype))
    dq, dk, dv = slopes @ k.to(slopes.dtype) * scale, slopes.mT @ q.to(slopes.dtype) * scale, weights.mT @ gradient
    return tuple(map(_laid_out, (dq, dk, dv, d_scores), (q, k, v, scores)))  # type: ignore[return-value]


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """With the strides that the compiler was told."""
    found = torch.empty_like(like)
    return x if (x.dtype, x.stride()) == (found.dtype, found.stride()) else found.copy_(x)


attend_backward.register_fake(
    lambda gradient, of_sums, out, lse, found, *given: tuple(torch.empty_like(x) for x in given[:4])
)  # q, k, v, scores


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.causal, ctx.far, ctx.sums, ctx.scale = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(True)


def _gradients(ctx: Any, gradient: Tensor, of_lse: Tensor, of_sums: Tensor) -> tuple[Tensor | None, ...]:
    out, lse, found, *tensors = ctx.saved_tensors
    given = (out, lse, found, *tensors, ctx.causal, ctx.far, ctx.sums, ctx.scale)
    dq, dk, dv, d_scores = attend_backward(gradient, of_sums, *given)
    return dq, dk, dv, d_scores if d_scores.numel() else None, *[None] * 7


attend.register_autograd(_gradients, setup_context=_save)


def _empty(q: Tensor, v: Tensor, scores: Tensor, sums: bool) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, time, _ = q.shape
    out = v.new_empty(batch, time, heads, v.shape[3]).transpose(1, 2)
    lse = q.new_empty(batch, heads, time, dtype=torch.promote_types(q.dtype, torch.float32))
    return out, lse, torch.empty_like(scores) if sums else scores.new_empty(0)


def _columns(scores: Tensor, far: int) -> Tensor:
    """The column of each pair (time, time)."""
    at = torch.arange(scores.shape[2], device=scores.device)
    return (far - at[:, None] + at).clamp(0, scores.shape[3] - 1)


def _scores(
    q: Tensor, k: Tensor, scores: Tensor, codes: Tensor, starts: Tensor, ends: Tensor, causal: bool, far: int,
    scale: float,
) -> Tensor:  # fmt: skip
    wide, at = torch.promote_types(q.dtype, torch.float32), torch.arange(q.shape[2], device=q.device)
    found = q.to(wide) @ k.to(wide).mT * scale
    if scores.numel():
        found = found + scores.to(wide).gather(3, _columns(scores, far).expand_as(found))
    last = at[:, None] if causal else ends[..., None]
    seen = ((starts[..., None] <= at) & (at <= last))[:, None]
    if codes.shape[3]:
        seen = seen & (codes[..., :, None, :] == codes[..., None, :, :]).any(-1) & (at[:, None] != at)
    return found.masked_fill(~seen, -torch.inf)
