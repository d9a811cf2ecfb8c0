"""The selective scan of Mamba (Gu, Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces",
algorithm 2, S6).

    h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_t        y_t = C_t · h_t        (N states per feature)

`selective_scan` gives y of all tokens and the last state, in at least single precision. It is computed in segments of
`SEGMENT` tokens, whose h (batch, tokens, features, N) is recomputed in the backward pass instead of stored; within a
segment by `linear_recurrence`, which runs √tokens pieces at once and then joins them. A kernel for GPUs would replace
`selective_scan`, as kernels/triton/retention.py replaces `chunkwise`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

SEGMENT = 128  # tokens whose states are held at once


def selective_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """y (batch, time, features) and the state (batch, features, N) after the last token.

    x, dt (batch, time, features); a (features, N), negative; b, c (batch, time, N). A token with dt = 0 leaves the
    state unchanged.
    """
    time = x.shape[1]
    if time <= SEGMENT:
        return _scan_segment(x, dt, a, b, c, state)
    found = []
    for some_x, some_dt, some_b, some_c in zip(*(part.split(SEGMENT, 1) for part in (x, dt, b, c)), strict=True):
        if torch.is_grad_enabled():
            y, state = checkpoint(
                _scan_segment, some_x, some_dt, a, some_b, some_c, state, use_reentrant=False, preserve_rng_state=False
            )
        else:
            y, state = _scan_segment(some_x, some_dt, a, some_b, some_c, state)
        found.append(y)
    return torch.cat(found, 1), state


def _scan_segment(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    decay = (dt[..., None] * a).exp()  # (batch, time, features, N)
    added = (dt * x)[..., None] * b[:, :, None]
    h = linear_recurrence(decay, added, state)
    y = (h @ c[..., None])[..., 0]  # (batch, time, features)
    return y, h[:, -1] if x.shape[1] else state


def linear_recurrence(decay: Tensor, added: Tensor, start: Tensor) -> Tensor:
    """h_t = decay_t ⊙ h_{t−1} + added_t of every t; decay and added (batch, time, …), start (batch, …) is h_{−1}."""
    if decay.shape[1] == 1:
        return decay * start[:, None] + added
    found: Tensor = _Recurrence.apply(decay, added, start)  # type: ignore[no-untyped-call]
    return found


class _Recurrence(torch.autograd.Function):
    """Its gradient is the same recurrence from the end: ∂_t = g_t + decay_{t+1} ∂_{t+1}."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, added: Tensor, start: Tensor) -> Tensor:
        h = _run(decay, added, start)
        ctx.save_for_backward(decay, h, start)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        decay, h, start = ctx.saved_tensors
        following = torch.cat((torch.zeros_like(start)[:, None], decay.flip(1)[:, :-1]), 1)  # from the end
        total = _run(following, grad.flip(1), torch.zeros_like(start)).flip(1)
        before = torch.cat((start[:, None], h[:, :-1]), 1)
        return total * before, total, total[:, 0] * decay[:, 0]


def _run(decay: Tensor, added: Tensor, start: Tensor) -> Tensor:
    """Time is cut into about √time pieces. All pieces run at once, first to find their ends if they started from
    nothing, then, from their true starts, to fill in everything."""
    time = decay.shape[1]
    size = max(1, round(time**0.5))
    padding = [0, 0] * (decay.dim() - 2) + [0, -time % size]
    decay = nn.functional.pad(decay, padding, value=1.0).unflatten(1, (-1, size))  # (batch, pieces, size, …)
    added = nn.functional.pad(added, padding).unflatten(1, (-1, size))
    ends, kept = added[:, :, 0].clone(), decay[:, :, 0].clone()
    for step in range(1, size):
        torch.addcmul(added[:, :, step], decay[:, :, step], ends, out=ends)
        kept *= decay[:, :, step]
    h = torch.empty_like(added)
    starts = [start]
    for piece in range(h.shape[1] - 1):
        starts.append(torch.addcmul(ends[:, piece], kept[:, piece], starts[-1]))
    last = torch.stack(starts, 1)
    for step in range(size):
        last = torch.addcmul(added[:, :, step], decay[:, :, step], last)
        h[:, :, step] = last
    return h.flatten(1, 2)[:, :time]
