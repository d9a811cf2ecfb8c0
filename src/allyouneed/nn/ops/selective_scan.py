"""The selective scan of Mamba (Gu, Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces",
algorithm 2, S6).

    h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_t        y_t = C_t · h_t        (N states per feature)

`selective_scan` gives y of all tokens and the last state, in at least single precision. It is computed in segments of
`SEGMENT` tokens, whose h (batch, tokens, N, features) is recomputed in the backward pass instead of stored; within a
segment by `linear_recurrence`, which runs √tokens pieces at once and then joins them. `selective_ssm` is the whole
state space of a Mamba mixer, time steps and skip included; a kernel on GPUs (kernels/triton/selective_scan.py).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from allyouneed.kernels import usable

SEGMENT = 128  # tokens whose states are held at once


def selective_ssm(
    x: Tensor, steps: Tensor, bias: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor,
    real: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """C_t · h_t + D ⊙ x_t of every token with Δ = softplus(steps + bias), and the state after each row's last real one.

    Shapes as in `selective_scan`; bias, skip (D) (features,). `real` (batch, time) bool is left-aligned; outputs after
    it are undefined. Computed in the dtype of `state`.
    """
    if usable(x) and x.numel():
        from allyouneed.kernels.triton.selective_scan import selective_scan as kernel

        return kernel(x, steps, bias, a, b, c, skip, state, None if real is None else real.sum(1))
    x, steps, bias, a, b, c, skip = (part.to(state.dtype) for part in (x, steps, bias, a, b, c, skip))
    dt = nn.functional.softplus(steps + bias)
    dt = dt if real is None else dt * real[..., None]
    y, state = selective_scan(x, dt, a, b, c, state)
    return y + skip * x, state


def selective_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """y (batch, time, features) and the state (batch, N, features) after the last token.

    x, dt (batch, time, features); a (N, features), negative; b, c (batch, time, N). A token with dt = 0 leaves the
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
    decay = (dt[:, :, None] * a).exp()  # (batch, time, N, features)
    h = linear_recurrence(decay, (dt * x)[:, :, None] * b[..., None], state)
    y = (c[:, :, None] @ h)[:, :, 0]  # (batch, time, features)
    return y, h[:, -1] if x.shape[1] else state


def linear_recurrence(decay: Tensor, added: Tensor, start: Tensor) -> Tensor:
    """h_t = decay_t ⊙ h_{t−1} + added_t of every t; decay and added (batch, time, …), start (batch, …) is h_{−1}."""
    if decay.shape[1] == 1:
        return decay * start[:, None] + added
    found: Tensor = _Recurrence.apply(decay, added, start)
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
        following = torch.cat((decay[:, 1:], torch.zeros_like(start)[:, None]), 1)
        total = _run(following, grad.contiguous(), torch.zeros_like(start), backwards=True)
        on_decay = torch.empty_like(total)
        torch.mul(total[:, 0], start, out=on_decay[:, 0])
        torch.mul(total[:, 1:], h[:, :-1], out=on_decay[:, 1:])
        return on_decay, total, total[:, 0] * decay[:, 0]


def _run(decay: Tensor, added: Tensor, start: Tensor, backwards: bool = False) -> Tensor:
    """Time is cut into about √time pieces. All pieces run at once, first to find their ends if they started from
    nothing, then, from their true starts, to fill in everything."""
    time = decay.shape[1]
    size = _piece(time)
    padding = [0, 0] * (decay.dim() - 2) + ([-time % size, 0] if backwards else [0, -time % size])
    if time % size:
        decay, added = nn.functional.pad(decay, padding, value=1.0), nn.functional.pad(added, padding)
    decay, added = decay.unflatten(1, (-1, size)), added.unflatten(1, (-1, size))  # (batch, pieces, size, …)
    steps, pieces = list(range(size)), list(range(decay.shape[1]))
    if backwards:
        steps, pieces = steps[::-1], pieces[::-1]
    starts, h = torch.empty_like(decay[:, :, 0]), torch.empty_like(added)
    starts[:, pieces[0]] = start
    if len(pieces) > 1:
        ends, kept = added[:, :, steps[0]].clone(), decay[:, :, steps[0]].clone()
        for step in steps[1:]:
            torch.addcmul(added[:, :, step], decay[:, :, step], ends, out=ends)
            kept *= decay[:, :, step]
        for piece, following in pairwise(pieces):
            torch.addcmul(ends[:, piece], kept[:, piece], starts[:, piece], out=starts[:, following])
    last = starts
    for step in steps:
        last = torch.addcmul(added[:, :, step], decay[:, :, step], last, out=h[:, :, step])
    return h.flatten(1, 2)[:, -time:] if backwards else h.flatten(1, 2)[:, :time]


def _piece(time: int) -> int:
    """Tokens per piece: about √time, a divisor of time where there is one nearby."""
    root = max(1, round(time**0.5))
    near = [size for size in range(max(1, root // 2), 2 * root + 1) if time % size == 0]
    return min(near, key=lambda size: abs(size - root), default=root)
