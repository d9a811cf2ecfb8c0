"""The selective scan of Mamba (Gu, Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces",
algorithm 2, S6).

    h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_t        y_t = C_t · h_t        (N states per feature)

`selective_scan` gives y of all tokens and the last state, in at least single precision. It is computed in segments, so
short that their h (batch, tokens, N, features) stay in the cache, and recomputed in the backward pass instead of
stored. `selective_ssm` is the whole state space of a Mamba mixer, time steps and skip included; kernels compute it on
GPUs (kernels/triton/selective_scan.py) and, in single precision, on CPUs (kernels/cpu/selective_scan.h). `starts`
(batch, time) of packed rows (ops/unpack.py): h is dropped at the first token of each sentence, as if exp(Δ_t A) were 0
there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from allyouneed.kernels import usable
from allyouneed.nn.ops.unpack import first_tokens

CACHED = 1 << 19  # elements of h held at once


def selective_ssm(
    x: Tensor, steps: Tensor, bias: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor,
    real: Tensor | None = None, starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """C_t · h_t + D ⊙ x_t of every token with Δ = softplus(steps + bias), and the state after each row's last real one.

    Shapes as in `selective_scan`; bias, skip (D) (features,). `real` (batch, time) bool is left-aligned; outputs after
    it are undefined. Computed in the dtype of `state`.
    """
    if usable(x) and x.numel():
        from allyouneed.kernels.triton.selective_scan import selective_scan as kernel

        return kernel(x, steps, bias, a, b, c, skip, state, None if real is None else real.sum(1), starts)
    x, steps, bias, a, b, c, skip = (part.to(state.dtype) for part in (x, steps, bias, a, b, c, skip))
    on_cpu = x.device.type == "cpu" and x.dtype is torch.float32 and not torch.compiler.is_compiling()
    if on_cpu and starts is None and x.numel():
        from allyouneed.kernels.cpu.selective_scan import selective_scan as native

        lengths = None if real is None else real.sum(1)
        found: tuple[Tensor, Tensor] | None = native(x, steps, bias, a, b, c, skip, state, lengths)
        if found is not None:
            return found
    dt = nn.functional.softplus(steps + bias)
    dt = dt if real is None else dt * real[..., None]
    y, state = selective_scan(x, dt, a, b, c, state, starts)
    return y + skip * x, state


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y (batch, time, features) and the state (batch, N, features) after the last token.

    x, dt (batch, time, features); a (N, features), negative; b, c (batch, time, N). A token with dt = 0 leaves the
    state unchanged.
    """
    if not x.numel():
        return x, state
    y, last = _Scan.apply(x, dt, a, b, c, state, None if starts is None else first_tokens(starts))
    return y, last


class _Scan(torch.autograd.Function):
    """The gradient g of h_t follows the same recurrence from the end: g_t = C_t ∂y_t + exp(Δ_{t+1} A) g_{t+1}.

    Inside, tokens come first: the states of one, and those of a segment, lie side by side in memory."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, first: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        found, starts = [], []
        for some_x, some_dt, some_b, some_c, some_first in zip(*_segments(a, x, dt, b, c, first), strict=True):
            starts.append(state)
            _, h = _states(some_x, some_dt, a, some_b, state, some_first)
            found.append((some_c[:, :, None] @ h[1:])[:, :, 0])
            state = h[-1].clone()
        ctx.save_for_backward(x, dt, a, b, c, first, *starts)
        return torch.cat(found).transpose(0, 1), state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, a, b, c, first, *starts = ctx.saved_tensors
        segments = list(zip(*_segments(a, x, dt, b, c, dy, first), starts, strict=True))
        on_a, g = torch.zeros_like(d_last), d_last  # on_a of each row
        found: list[tuple[Tensor, ...]] = []
        for some_x, some_dt, some_b, some_c, some_dy, some_first, start in reversed(segments):
            decay, h = _states(some_x, some_dt, a, some_b, start, some_first)
            slopes = some_c[..., None] * some_dy[:, :, None]  # (tokens, batch, N, features)
            passed = decay  # overwritten by what each token passes to the one before it: g exp(Δ A)
            for slope, before in zip(reversed(slopes.unbind()), reversed(passed.unbind()), strict=True):
                g = before.mul_(slope.add_(g))
            g = g.clone()
            # vectors on the left: torch multiplies by one on the right twelve times as slowly
            on_c = (some_dy[:, :, None] @ h[1:].transpose(-1, -2))[:, :, 0]
            on_b = ((some_dt * some_x)[:, :, None] @ slopes.transpose(-1, -2))[:, :, 0]
            on_input = (some_b[:, :, None] @ slopes)[:, :, 0]  # of Δ x
            on_log = passed.mul_(h[:-1])  # of Δ A
            on_dt = on_input * some_x
            for part, rate in zip(on_log.unbind(2), a.unbind(0), strict=True):  # a sum without its terms in memory
                on_dt.addcmul_(part, rate)
            for part, step in zip(on_log.unbind(), some_dt.unbind(), strict=True):
                on_a.addcmul_(part, step[:, None])
            found.append((on_input * some_dt, on_dt, on_b, on_c))
        dx, d_dt, d_b, d_c = (torch.cat(parts).transpose(0, 1) for parts in zip(*reversed(found), strict=True))
        return dx, d_dt, on_a.sum(0), d_b, d_c, g, None


def _segments(a: Tensor, x: Tensor, *parts: Tensor | None) -> list[Any]:
    """Each of the parts (batch, time, …), tokens first, cut along them."""
    tokens = max(1, CACHED // (a.numel() * len(x)))
    count = -(-x.shape[1] // tokens)
    return [[None] * count if part is None else part.transpose(0, 1).contiguous().split(tokens) for part in (x, *parts)]


def _states(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, state: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """Decays (tokens, batch, N, features), and h before the first and after each token (tokens + 1, …). `first`
    (tokens, batch) bool: tokens that nothing passes to."""
    decay = (dt[:, :, None] * a).exp_()
    if first is not None:
        decay.masked_fill_(first[..., None, None], 0.0)
    h = torch.empty(len(x) + 1, *state.shape, dtype=state.dtype, device=x.device)
    h[0] = state
    torch.mul((dt * x)[:, :, None], b[..., None], out=h[1:])
    before, *others = h.unbind()
    for fade, after in zip(decay.unbind(), others, strict=True):
        before = after.addcmul_(fade, before)
    return decay, h
