"""State-space duality: the recurrence of Mamba-2 (Dao, Gu 2024, "Transformers are SSMs: Generalized Models and
Efficient Algorithms Through Structured State Space Duality").

    h_t = e^{log_t} h_{t−1} + B_t x_tᵀ        y_t = C_tᵀ h_t        (one matrix (N, head width) per head)

Three forms of it: `recurrent` (eq. 1, the definition), `quadratic`, y = (L ∘ C Bᵀ) x with L_ij = e^{log_{j+1} + … +
log_i} (eq. 7, attention with a decay for a mask), and `chunked` (section 6): quadratic within a chunk, recurrent
between chunks, in time linear in the length. Heads of a group share B and C. On a GPU, `chunked` runs retention's
kernel, since both are the same sums (nn/ops/retention.py).

x (batch, heads, time, head width); log (batch, heads, time), at most 0; b, c (batch, groups, time, N); the state h
(batch, heads, N, head width). A token with x = 0 and log = 0 leaves the state unchanged. All in at least single
precision, except matmuls. `starts` (batch, time) of packed rows: h is dropped at the first token of each sentence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from allyouneed.kernels import usable
from allyouneed.nn.ops.unpack import Restarts

CHUNK = 64  # about the head width, where both halves cost the same


def recurrent(x: Tensor, log: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """y (batch, heads, time, head width) and the state after the last token, token by token."""
    b, c = _per_head(b, x), _per_head(c, x)
    found = []
    for t in range(x.shape[2]):
        new = b[:, :, t, :, None] * x[:, :, t, None].to(state.dtype)
        state = log[:, :, t, None, None].exp() * state + new
        found.append((c[:, :, t, None].to(state.dtype) @ state)[:, :, 0])
    return torch.stack(found, 2), state


def quadratic(x: Tensor, log: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """y of tokens that follow nothing, as one masked matrix of all pairs."""
    scores = (c @ b.transpose(-1, -2)).repeat_interleave(x.shape[1] // b.shape[1], 1)
    return (scores * _decay(log).to(x.dtype)) @ x


def chunked(
    x: Tensor, log: Tensor, b: Tensor, c: Tensor, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y and the state after the last token."""
    time, groups = x.shape[2], b.shape[1]
    if not time:
        return x, state
    if usable(x):
        return by_kernel(x, log, b, c, state, starts)
    size = min(CHUNK, time)
    within = None if starts is None else Restarts.of(starts, size)

    def cut(part: Tensor) -> Tensor:
        """(batch, groups, heads of a group or 1, chunks, size, …)"""
        padded = nn.functional.pad(part, (0, 0, 0, -time % size)).unflatten(2, (-1, size))
        return padded.unflatten(1, (groups, -1))

    x, b, c, log = cut(x), cut(b), cut(c), cut(log[..., None])[..., 0]
    decay, left, right = _decay(log), log.cumsum(-1).exp(), _after(log).exp()
    kept = left[..., -1:, None]  # (batch, groups, heads of a group, chunks, 1, 1)
    if within is not None:
        pairs, reads, keeps, passes = (mask[:, None, None] for mask in within)
        decay, left, right, kept = decay * pairs, left * reads, right * keeps, kept * passes[..., None, None]
    y = (c @ b.transpose(-1, -2) * decay.to(x.dtype)) @ x  # within chunks
    added = (right[..., None].to(x.dtype) * x).transpose(-1, -2) @ b  # transposed: b is not copied
    h, before = state.unflatten(1, (groups, -1)).transpose(-1, -2), []
    # unbind: the gradient of each slice would have the size of the whole
    for rest, new in zip(kept.unbind(3), added.unbind(3), strict=True):
        before.append(h)
        h = h * rest + new.to(h.dtype)
    across = c @ torch.stack(before, 3).transpose(-1, -2).to(c.dtype)
    y = y + left[..., None].to(x.dtype) * across
    return y.flatten(3, 4)[:, :, :, :time].flatten(1, 2), h.transpose(-1, -2).flatten(1, 2)


def by_kernel(
    x: Tensor, log: Tensor, b: Tensor, c: Tensor, state: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`chunked` by retention's kernel: C are its queries, B its keys, x its values."""
    from allyouneed.kernels.triton.retention import retention

    unused = torch.zeros_like(state[..., 0])  # retention's sum of keys
    y, _, (state, _) = retention(_per_head(c, x), _per_head(b, x), x, log, (state, unused), starts)
    return y, state


def _decay(log: Tensor) -> Tensor:
    """L: e^{log_{j+1} + … + log_i} for j ≤ i, else 0. Each sum on its own: differences of sums from the start would
    lose digits in a head that decays fast."""
    size = log.shape[-1]
    inside = torch.ones(size, size, dtype=torch.bool, device=log.device).tril()
    each = log[..., None].expand(*log.shape, size).masked_fill(~inside.tril(-1), 0.0)
    return each.cumsum(-2).masked_fill(~inside, -torch.inf).exp()


def _after(log: Tensor) -> Tensor:
    """Log decay from after each token to the end."""
    return nn.functional.pad(log[..., 1:].flip(-1).cumsum(-1).flip(-1), (0, 1))


def _per_head(part: Tensor, x: Tensor) -> Tensor:
    """A view where all heads are one group."""
    return part[:, :, None].expand(-1, -1, x.shape[1] // part.shape[1], -1, -1).flatten(1, 2)
