"""Attention over the tiles of a plan (nn/ops/attention/tiled.py), forward and backward, as in Dao 2023,
"FlashAttention-2": nothing of the size of the scores is stored. The definition is `nn/ops/attention/dense.py`.

A table lists the key blocks of each query block, full blocks first, and another the query blocks of each key block. In
the remaining blocks pairs are masked: by stored tiles, or causal and by segment. A bias by distance is added to the
scores; its table has MARGIN more distances on both sides, so that tokens beyond the end need no mask. A plan may have
several parts, each with its own token order; the softmax continues from part to part, and the gradient of a part
follows from the final log-sum-exp (base 2).

The gradient of the bias is a sum along diagonals. Tiles at the same distance from the main diagonal hold the same
distances: a program adds up such tiles in registers, and the sums along their diagonals come last. Blocks that are
`near` blocks away or more share one bias on each side: it is read once for a tile, and its gradient is their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from allyouneed.kernels import _capability
from allyouneed.kernels.triton.retention import _contiguous_features
from allyouneed.kernels.triton.training import tiled_kernels as kernels

LOG2E, MARGIN = kernels.LOG2E.value, kernels.MARGIN.value
FIELDS = 6  # tensors of a part: order, key counts, key entries, query counts, query entries, mask tiles
PROGRAMS = 1024  # that add up the gradient of the bias, to occupy the GPU


def diagonal_sums(tiles: Tensor, time: int, ahead: int) -> Tensor:
    """Tiles (heads, diagonals, block, block) to sums by distance (heads, 2 · time − 1). `ahead`: diagonals above the
    main one."""
    block = tiles.shape[-1]
    skewed = pad(tiles.flip(-1), (0, block)).flatten(2)[..., :-block].unflatten(-1, (block, 2 * block - 1))
    near = pad(skewed.sum(2), (0, 1))  # (heads, diagonals, 2 · block): i − j + block − 1 of a tile
    found = pad(near[..., :block].flatten(1), (0, block)) + pad(near[..., block:].flatten(1), (block, 0))
    least = 1 - block - ahead * block  # the distance of the first sum
    left = least + time - 1
    return pad(found, (left, 2 * time - 1 - left - found.shape[1]))


class _Launch(NamedTuple):
    """Sizes of tiles and warps per program."""

    m: int
    n: int
    side: int  # of the tiles that the gradient of the bias adds up
    warps: int
    precision: str

    @classmethod
    def of(cls, q: Tensor, v: Tensor, table: int) -> _Launch:
        precision = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
        m, n, side = (128, 64, 64) if q.itemsize == 2 else (64, 32, 32)
        if max(q.shape[-1], v.shape[-1]) > 64 and _capability(q.device) < (9, 0):  # less shared memory
            m, n, side = m // 2, n // 2, side // 2
        m = min(table, m)
        return cls(m, min(table, n), min(table, side), 8 if m == 128 else 4, precision)


def _features(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    width, values = q.shape[-1], v.shape[-1]
    return width, max(16, triton.next_power_of_2(width)), values, max(16, triton.next_power_of_2(values))


def _narrow(bias: Tensor, q: Tensor) -> Tensor:
    """The table in two bytes for half precision: one of four is copied to shared memory ahead, element by element."""
    return bias.to(torch.float16) if q.itemsize == 2 else bias


def _parts(plan: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    return [plan[start : start + FIELDS] for start in range(0, len(plan), FIELDS)]


@torch.library.custom_op("allyouneed::tiled_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, segments: Tensor, plan: list[Tensor],
    scale: float, table: int, causal: bool, masked_by: int, near: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp (batch, heads, time), base 2. `bias` (heads, 2 · time − 1 + 2 · MARGIN), base 2, and
    `segments`: empty if there are none. `masked_by`: 0 nothing, 1 segments > 0, 2 equal segments."""
    (batch, heads, time, _), run = q.shape, _Launch.of(q, v, table)
    (out, lse), bias = _empty_outputs(q, v), _narrow(bias, q)
    for number, (order, counts, entries, _, _, masks) in enumerate(_parts(plan)):
        blocks, many = entries.shape[2:]
        kernels.outputs[(batch * heads * blocks * (table // run.m),)](
            q, k, v, bias, segments, order, counts, entries, masks, out, lse,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], heads, time, blocks, many,
            entries.stride(0), scale * LOG2E, ROWS=entries.shape[1], GROUP=heads // k.shape[1],
            **_widths(q, v), TABLE=table, M=run.m, N=run.n, **_flags(bias, order, masks, causal, masked_by),
            MORE=number > 0, PRECISION=run.precision, num_warps=run.warps, num_stages=3,
        )  # fmt: skip
    return out, lse


def _widths(q: Tensor, v: Tensor) -> dict[str, int]:
    return dict(zip(("WIDTH", "FEATURES", "VALUES", "WIDE"), _features(q, v), strict=True))


def _flags(bias: Tensor, order: Tensor, masks: Tensor, causal: bool, masked_by: int) -> dict[str, Any]:
    return {
        "CAUSAL": causal,
        "SEGMENTS": masked_by,
        "TILES": masks.numel() > 0,
        "BIAS": bias.numel() > 0,
        "SORTED": order.numel() > 0,
    }


def _empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, time, _ = q.shape
    out = v.new_empty(batch, time, heads, v.shape[-1]).transpose(1, 2)
    return out, v.new_empty(batch, heads, time, dtype=torch.float32)


_forward.register_fake(lambda q, k, v, *rest: _empty_outputs(q, v))


@torch.library.custom_op("allyouneed::tiled_attention_backward", mutates_args=())
def _backward(
    do: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, segments: Tensor,
    plan: list[Tensor], scale: float, table: int, causal: bool, masked_by: int, near: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and the bias."""
    (batch, heads, time, _), kv_heads, run, widths = q.shape, k.shape[1], _Launch.of(q, v, table), _widths(q, v)
    do, wide, bias = _contiguous_features(do), bias, _narrow(bias, q)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))  # with the strides of the inputs
    starts, lines = plan[2].shape[2] * (table // run.m), batch * heads
    rests = torch.empty(2, batch, heads, starts, dtype=torch.float32, device=q.device)
    delta, base, group = torch.empty_like(lse), scale * LOG2E, heads // kv_heads
    given = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3])
    kernels.deltas[(batch * heads * triton.cdiv(time, 64),)](
        out, do, delta, *out.stride()[:3], *do.stride()[:3], heads, time, *_features(q, v)[2:], 64, num_warps=4
    )
    for number, (order, k_counts, k_entries, q_counts, q_entries, masks) in enumerate(_parts(plan)):
        flags = _flags(bias, order, masks, causal, masked_by)
        both: dict[str, Any] = {
            "GROUP": group, **widths, "TABLE": table, "M": run.m, "N": run.n, **flags, "MORE": number > 0,
            "PRECISION": run.precision, "num_warps": run.warps, "num_stages": 2,
        }  # fmt: skip
        rows, blocks, many = k_entries.shape[1:]
        kernels.grad_q[(batch * heads * blocks * (table // run.m),)](
            q, k, v, bias, segments, order, k_counts, k_entries, masks, do, lse, delta, dq, rests, *given,
            *dq.stride()[:3], lines, heads, time, blocks, many, k_entries.stride(0), near, base, scale,
            ROWS=rows, **both,
        )  # fmt: skip
        rows, blocks, many = q_entries.shape[1:]
        kernels.grad_kv[(batch * kv_heads * blocks * (table // run.m),)](
            q, k, v, bias, segments, order, q_counts, q_entries, masks, do, lse, delta, dk, dv, *given,
            *dk.stride()[:3], *dv.stride()[:3], kv_heads, time, blocks, many,
            q_entries.stride(0), base, scale, ROWS=rows, **both,
        )  # fmt: skip
    if not bias.numel():
        return dq, dk, dv, torch.empty_like(wide)
    m, blocks = run.side, triton.cdiv(time, run.side)
    behind = min(blocks, near * (table // m))  # diagonals, the main one included
    ahead = 0 if causal else behind - 1
    splits = max(1, min(batch, PROGRAMS // (heads * (behind + ahead))))
    d_tiles = torch.empty(splits, heads, behind + ahead, m, m, dtype=torch.float32, device=q.device)
    kernels.grad_bias[(heads * (behind + ahead) * splits,)](
        q, k, v, bias, segments, do, lse, delta, d_tiles, *given, batch, heads, time, blocks, behind + ahead, ahead,
        near, base, SPLITS=splits, GROUP=group, **widths, TABLE=table, M=m, CAUSAL=causal, SEGMENTS=masked_by,
        PRECISION=run.precision, num_warps=4, num_stages=2,
    )  # fmt: skip
    d_bias = diagonal_sums(d_tiles.sum(0), time, ahead)
    far = rests.sum((1, 3))  # (2, heads)
    d_bias[:, -1] += far[0]
    d_bias[:, 0] += far[1]
    return dq, dk, dv, pad(d_bias / LOG2E, (MARGIN, MARGIN))


_backward.register_fake(lambda do, out, lse, *given: tuple(torch.empty_like(x) for x in given[:4]))  # q, k, v, bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, bias, segments, plan, *rest = inputs
    out, lse = output
    ctx.save_for_backward(out, lse, q, k, v, bias, segments, *plan)
    ctx.rest = rest


def _gradients(ctx: Any, do: Tensor, _: Tensor) -> tuple[Any, ...]:
    out, lse, q, k, v, bias, segments, *plan = ctx.saved_tensors
    dq, dk, dv, d_bias = _backward(do, out, lse, q, k, v, bias, segments, plan, *ctx.rest)
    return dq, dk, dv, d_bias if bias.numel() else None, None, [None] * len(plan), *[None] * len(ctx.rest)


_forward.register_autograd(_gradients, setup_context=_save)


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, segments: Tensor | None, plan: list[Tensor],
    scale: float, table: int, causal: bool, masked_by: int, near: int,
) -> Tensor:  # fmt: skip
    """q (batch, heads, time, width), k and v with as many or fewer heads, to (batch, heads, time, width of v).

    `bias` (heads, 2 · time − 1): added to the scores, by distance from 1 − time to time − 1. `segments` (batch or 1,
    time) int32. `plan`: FIELDS tensors of each part; `table`: tokens of a block. `near`: blocks that are this far apart
    or farther share one bias on each side.
    """
    cast = torch.get_autocast_dtype("cuda") if q.is_cuda and torch.is_autocast_enabled("cuda") else v.dtype
    q, k, v = (_contiguous_features(x.to(cast)) for x in (q, k, v))
    none = q.new_empty(0, dtype=torch.float32)
    bias = none if bias is None else pad(bias.float() * LOG2E, (MARGIN, MARGIN)).contiguous()
    marks = none.to(torch.int32) if segments is None else segments.expand(len(q), -1).contiguous()
    return _forward(q, k, v, bias, marks, plan, scale, table, causal, masked_by, near)[0]
