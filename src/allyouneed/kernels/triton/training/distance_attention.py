"""Attention within sentences whose scores get a number from a table for each query and distance, forward and backward,
as in Dao 2023, "FlashAttention-2". The definition is in nn/ops/attention/by_distance.py.

Sentences are found by where each token's begins and ends, so that nothing is planned before. The farthest distances
share one number on each side: its gradient is a sum in registers. All other elements of the table belong to one pair
of tokens, and their gradient is stored as it is found, without atomic additions.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from allyouneed.kernels.triton.retention import _contiguous_features
from allyouneed.kernels.triton.training import distance_kernels as kernels
from allyouneed.kernels.triton.training.tiled_attention import LOG2E, _Launch, _widths

TILE = 128  # most queries of a program


def _launch(q: Tensor, v: Tensor) -> tuple[_Launch, dict[str, Any]]:
    run = _Launch.of(q, v, min(TILE, max(16, triton.next_power_of_2(q.shape[2]))))
    return run, {"M": run.m, "N": run.n, "PRECISION": run.precision, "num_warps": run.warps, "num_stages": 2}


def distance_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, codes: Tensor, starts: Tensor, ends: Tensor,
    causal: bool, far: int, sums: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `attend` in nn/ops/attention/by_distance.py, the log-sum-exp to base 2."""
    q, k, v = (_contiguous_features(x) for x in (q, k, v))
    (batch, heads, time, _), (run, how) = q.shape, _launch(q, v)
    columns, rounds, widths = table.shape[3], codes.shape[3], _widths(q, v)
    out = v.new_empty(batch, time, heads, v.shape[3]).transpose(1, 2)
    lse = torch.empty(batch, heads, time, dtype=torch.float32, device=q.device)
    found = torch.zeros_like(table) if sums else table.new_empty(0)
    grid = (batch * heads * triton.cdiv(time, run.m),)
    if out.numel():
        kernels.outputs[grid](
            q, k, v, table, codes, starts, ends, out, lse,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], heads, time, columns, far,
            scale * LOG2E, CAUSAL=causal, KIND=int(columns > 0), ROUNDS=rounds, **widths, **how,
        )  # fmt: skip
    if out.numel() and sums:
        kernels.weight_sums[grid](
            q, k, table, codes, starts, ends, lse, found, *q.stride()[:3], *k.stride()[:3], heads, time, columns, far,
            _least(columns, far, causal), scale * LOG2E, CAUSAL=causal, ROUNDS=rounds, WIDTH=widths["WIDTH"],
            FEATURES=widths["FEATURES"], **how,
        )  # fmt: skip
    return out, lse, found


def distance_attention_backward(
    do: Tensor, of_sums: Tensor, out: Tensor, lse: Tensor, found: Tensor, q: Tensor, k: Tensor, v: Tensor,
    table: Tensor, codes: Tensor, starts: Tensor, ends: Tensor, causal: bool, far: int, sums: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and the table; `found` and `of_sums`: the sums by distance, and their gradient."""
    q, k, v, do = (_contiguous_features(x) for x in (q, k, v, do))
    (batch, heads, time, _), (run, how) = q.shape, _launch(q, v)
    columns, rounds, kind = table.shape[3], codes.shape[3], int(table.shape[3] > 0)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    d_table, delta = torch.zeros_like(table), torch.empty_like(lse)
    if not q.numel():
        return dq, dk, dv, d_table
    if sums:
        of_sums = of_sums.contiguous()
        delta = (of_sums * found).sum(-1, dtype=torch.float32)
    flags: dict[str, Any] = {"CAUSAL": causal, "KIND": kind, "SUMS": sums, "ROUNDS": rounds, **_widths(q, v), **how}
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    grid = (batch * heads * triton.cdiv(time, run.m),)
    kernels.grad_q[grid](
        q, k, v, table, of_sums, codes, starts, ends, out, do, lse, delta, dq, d_table, *strides, *out.stride()[:3],
        *do.stride()[:3], *dq.stride()[:3], heads, time, columns, far, _least(columns, far, causal), scale * LOG2E,
        scale, **flags,
    )  # fmt: skip
    flags["N"] = min(run.n, 32)  # more spill registers
    kernels.grad_kv[grid](
        q, k, v, table, of_sums, codes, starts, ends, do, lse, delta, dk, dv, *strides, *do.stride()[:3],
        *dk.stride()[:3], *dv.stride()[:3], heads, time, columns, far, scale * LOG2E, scale, **flags,
    )  # fmt: skip
    return dq, dk, dv, d_table


def _least(columns: int, far: int, causal: bool) -> int:
    """Distances up to this one share a number; a causal query sees none of them."""
    return -1 if causal else far + 1 - columns
