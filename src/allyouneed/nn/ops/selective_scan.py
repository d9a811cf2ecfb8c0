"""The selective scan of Mamba (Gu, Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces",
algorithm 2, S6).

    h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_t        y_t = C_t · h_t        (N states per feature)

`selective_scan` gives y of all tokens and the last state, in at least single precision. It is computed in segments, so
short that their h (batch, tokens, N, features) stay in the cache, and recomputed in the backward pass instead of
stored. `selective_ssm` is the whole state space of a Mamba mixer, time steps and skip included; on GPUs a kernel
computes it (kernels/triton/selective_scan.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from allyouneed.kernels import usable

CACHED = 1 << 19  # elements of h held at once


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
    if not x.numel():
        return x, state
    y, last = _Scan.apply(x, dt, a, b, c, state)
    return y, last


class _Scan(torch.autograd.Function):
    """The gradient g of h_t follows the same recurrence from the end: g_t = C_t ∂y_t + exp(Δ_{t+1} A) g_{t+1}."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        found, starts = [], []
        for some_x, some_dt, some_b, some_c in zip(*_segments(a, x, dt, b, c), strict=True):
            starts.append(state)
            _, h = _states(some_x, some_dt, a, some_b, state)
            found.append((some_c[:, :, None] @ h[:, 1:])[:, :, 0])
            state = h[:, -1].clone()
        ctx.save_for_backward(x, dt, a, b, c, *starts)
        return torch.cat(found, 1), state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, d_last: Tensor) -> tuple[Tensor, ...]:
        x, dt, a, b, c, *starts = ctx.saved_tensors
        segments = list(zip(*_segments(a, x, dt, b, c, dy), starts, strict=True))
        on_a, g = torch.zeros_like(a), d_last
        found: list[tuple[Tensor, ...]] = []
        for some_x, some_dt, some_b, some_c, some_dy, start in reversed(segments):
            decay, h = _states(some_x, some_dt, a, some_b, start)
            slopes = some_c[..., None] * some_dy[:, :, None]  # (batch, tokens, N, features)
            for t in reversed(range(slopes.shape[1])):
                g = slopes[:, t].add_(g) * decay[:, t]
            on_c = (h[:, 1:] @ some_dy[..., None])[..., 0]
            on_b = (slopes @ (some_dt * some_x)[..., None])[..., 0]
            on_input = (some_b[:, :, None] @ slopes)[:, :, 0]  # of Δ x
            on_log = slopes.mul_(decay).mul_(h[:, :-1])  # of Δ A
            on_dt = on_input * some_x + (on_log * a).sum(2)
            on_a += on_log.mul_(some_dt[:, :, None]).sum((0, 1))
            found.append((on_input * some_dt, on_dt, on_b, on_c))
        dx, d_dt, d_b, d_c = (torch.cat(parts, 1) for parts in zip(*reversed(found), strict=True))
        return dx, d_dt, on_a, d_b, d_c, g


def _segments(a: Tensor, *parts: Tensor) -> list[tuple[Tensor, ...]]:
    """Each of the parts, cut along the tokens."""
    tokens = max(1, CACHED // (a.numel() * len(parts[0])))
    return [part.split(tokens, 1) for part in parts]


def _states(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Decays (batch, tokens, N, features), and h before the first and after each token (batch, tokens + 1, …)."""
    decay = (dt[:, :, None] * a).exp_()
    h = torch.empty(len(x), x.shape[1] + 1, *a.shape, dtype=state.dtype, device=x.device)
    h[:, 0] = state
    torch.mul((dt * x)[:, :, None], b[..., None], out=h[:, 1:])
    for t in range(x.shape[1]):
        h[:, t + 1].addcmul_(decay[:, t], h[:, t])
    return decay, h
