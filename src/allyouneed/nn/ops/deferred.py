"""A linear recurrence that writes its matrix only once in `RECENT` tokens: for decode steps of many rows, most of whose
work is to read and write the matrices.

    h_t = e^{log_t} h_{t−1} + k_t v_tᵀ        y_t = q_tᵀ h_t        (one matrix (N, width) per head)

With h as of a token s, and the tokens since then kept as they are, the same y is

    y_t = e^{log_{s+1} + … + log_t} q_tᵀ h_s + Σ_{s < i ≤ t} e^{log_{i+1} + … + log_t} (q_t·k_i) v_i

(Dao, Gu 2024, section 6: recurrent between chunks, quadratic within one). The token at position p has place p mod
`RECENT`, and the last place folds all of them into the matrix: the caller of a step knows its place from the position
alone. Rows that begin anywhere begin with places of zeros, which add nothing. `log` is at most 0, so no factor grows.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from allyouneed.nn.cost import Cost

Recent = tuple[Tensor, Tensor, Tensor]  # keys, values, log decays
RECENT = 8  # more would read as many bytes of recent tokens as they save in writes of the matrix


@runtime_checkable
class Deferred(Protocol):
    """A recurrent mixer whose decode steps defer the writes of its matrices. A carry is its state (`Recurrent`)."""

    def begin(self, batch: int, like: Tensor) -> Any: ...

    def fold(self, *given: Any) -> Any: ...

    def begin_recent(self, carry: Any) -> Recent: ...

    def step(self, x: Tensor, carry: Any, recent: Recent, positions: Tensor) -> Tensor:
        """One token per row; all states change in place."""
        ...


def begin_recent(h: Tensor, groups: int) -> Recent:
    """Keys (batch, groups, RECENT, N), values (batch, heads, RECENT, width) and log decays (batch, heads, RECENT), for
    matrices h (batch, heads, N, width); heads of a group share their keys."""
    batch, heads, n, width = h.shape
    keys, values = h.new_zeros(batch, groups, RECENT, n), h.new_zeros(batch, heads, RECENT, width)
    return keys, values, values.new_zeros(values.shape[:3])


def recent_cost(groups: int, heads: int, n: int, width: int) -> Cost:
    """What a captured step keeps beside the matrices."""
    kept = RECENT * (groups * n + heads * (width + 1))
    return Cost(trim=-kept, trim_wide=-kept)


def deferred_step(q: Tensor, k: Tensor, v: Tensor, log: Tensor, h: Tensor, recent: Recent, positions: Tensor) -> Tensor:
    """y (batch, heads, width) of the tokens at these positions (batch,): q, k (batch, groups, N), v (batch, heads,
    width), log (batch, heads). `h` and `recent` are changed in place. Kernels: kernels/triton/mixer_steps/deferred.py.
    """
    rows, each = torch.arange(len(q), device=q.device), v.shape[1] // q.shape[1]
    place, places = positions % RECENT, torch.arange(RECENT, device=q.device)
    for kept, new in zip(recent, (k, v, log), strict=True):
        kept[rows, :, place] = new.to(kept.dtype)
    there = (places <= place[:, None])[:, None]  # (batch, 1, RECENT)
    keys, values, logs = recent
    logs = logs * there
    later = (places > places[:, None]) * logs[..., None, :]  # (batch, heads, RECENT, RECENT)
    fade, left = logs.sum(-1).exp()[..., None], later.sum(-1).exp() * there  # (batch, heads, 1), (batch, heads, RECENT)
    q, keys = (x.to(h.dtype).repeat_interleave(each, 1) for x in (q, keys))  # of each head
    weights = (keys @ q[..., None])[..., 0] * left
    y = fade * (q[..., None, :] @ h)[..., 0, :] + (weights[..., None, :] @ values)[..., 0, :]
    folded = fade[..., None] * h + keys.mT @ (left[..., None] * values)
    h.copy_(torch.where((place == RECENT - 1)[:, None, None, None], folded, h))
    return y
