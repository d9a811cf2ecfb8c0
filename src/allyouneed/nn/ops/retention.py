"""The retention recurrence.

    S_t = a_t S_{t−1} + k_tᵀ v_t        o_t = q_t S_t        (one matrix per head)
    z_t = a_t z_{t−1} + k_t             r_t = q_t · z_t      (sum of the scores)

with decay a_t = exp(log_t) in (0, 1]. `fold` gives S and z after some tokens. `chunkwise` gives o and r of all tokens:
as attention without softmax within a chunk, by S and z between chunks, in time linear in the length (Sun et al. 2023,
"Retentive Network", eq. 7). Matmuls run in the input dtype, accumulation in at least fp32.

Packed rows: S and z are dropped at the first token of each sentence, as if its decay were 0. `starts` (batch, time) is
the index of that token in the row (ops/unpack.py); then a token sees those of its chunk from there on, and the state
before the chunk if its sentence began before it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from allyouneed.kernels import usable
from allyouneed.nn.ops.unpack import Restarts

CHUNK = 128  # about the head width, where both halves cost the same

RetentionState = tuple[Tensor, Tensor]  # S (batch, heads, key width, value width), z (batch, heads, key width)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def initial_state(batch: int, heads: int, keys: int, values: int, like: Tensor) -> RetentionState:
    """S and z before the first token."""
    dtype = accumulator_dtype(like.dtype)
    return like.new_zeros(batch, heads, keys, values, dtype=dtype), like.new_zeros(batch, heads, keys, dtype=dtype)


def fold(state: RetentionState, k: Tensor, v: Tensor, log: Tensor) -> RetentionState:
    """k, v (batch, heads, time, …), log (batch or 1, heads, time); a token with k = 0 and log = 0 leaves the state
    unchanged."""
    after = log.flip(-1).cumsum(-1).flip(-1)  # log decay from each token to the end, its own step included
    left = (after - log).exp()[..., None]
    decayed_k = k * left.to(k.dtype)
    total = log.sum(-1, keepdim=True).exp()  # (batch or 1, heads, 1)
    s = state[0] * total[..., None] + (decayed_k.transpose(-1, -2) @ v).to(state[0].dtype)
    return s, state[1] * total + decayed_k.sum(2, dtype=state[1].dtype)


def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, log: Tensor, state: RetentionState | None = None, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """o (batch, heads, time, value width) and r (batch, heads, time) of tokens that follow `state`.

    log (batch or 1, heads, time), or (1, heads, 1) if constant. r carries no gradient. `starts`: of packed rows, which
    follow nothing.
    """
    return _chunkwise(q, k, v, log, state, needs_last=False, starts=starts)[:2]


def continued(
    q: Tensor, k: Tensor, v: Tensor, log: Tensor, state: RetentionState
) -> tuple[Tensor, Tensor, RetentionState]:
    """o and r as in `chunkwise`, and the state after the last token, from one pass over the chunks."""
    o, r, last = _chunkwise(q, k, v, log, state, needs_last=True)
    assert last is not None
    return o, r, last


def _chunkwise(
    q: Tensor, k: Tensor, v: Tensor, log: Tensor, state: RetentionState | None, needs_last: bool,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor, RetentionState | None]:  # fmt: skip
    batch, heads, time, width = q.shape
    if not time:
        return v, v[..., 0].to(accumulator_dtype(v.dtype)), state
    if usable(v):
        from allyouneed.kernels.triton.retention import retention

        return retention(q, k, v, log, state, starts)
    size = min(CHUNK, time)
    steady = log.shape[-1] == 1
    q, k, v = (nn.functional.pad(x, (0, 0, 0, -time % size)).unflatten(2, (-1, size)) for x in (q, k, v))
    if steady:
        since = log[..., None] * torch.arange(1, size + 1, device=q.device)  # (1, heads, 1, size)
    else:
        since = nn.functional.pad(log, (0, -time % size)).unflatten(2, (-1, size)).cumsum(-1)
    cut = None if starts is None else Restarts.of(starts, size)
    inside = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    inside = inside if cut is None else inside & cut.pairs[:, None]
    # mask before exp, which would overflow for future tokens
    decay = (since[..., None] - since[..., None, :]).masked_fill(~inside, -torch.inf).exp()
    scores = q @ k.transpose(-1, -2) * decay.to(q.dtype)  # (batch, heads, chunks, size, size)
    o, r = scores @ v, scores.detach().sum(-1, dtype=accumulator_dtype(q.dtype))
    if q.shape[2] > 1 or state is not None:
        state = initial_state(batch, heads, width, v.shape[-1], q) if state is None else state
        s, z, state = _states_before_chunks(state, k, v, since, cut)
        left = since.exp() if cut is None else since.exp() * cut.reads[:, None]
        decayed_q = q * left[..., None].to(q.dtype)
        o = o + decayed_q @ s.to(q.dtype)
        r = r + (decayed_q.detach() @ z[..., None].to(q.dtype))[..., 0]
    if needs_last and state is not None and steady and time % size:  # decayed by the padding, too
        back = (-log * (-time % size)).exp()  # (1, heads, 1)
        state = state[0] * back[..., None], state[1] * back
    return o.flatten(2, 3)[:, :, :time], r.flatten(2, 3)[:, :, :time], state


def _states_before_chunks(
    state: RetentionState, k: Tensor, v: Tensor, since: Tensor, cut: Restarts | None
) -> tuple[Tensor, Tensor, RetentionState]:
    """S and z before each chunk, (batch, heads, chunks, …), and after the last; z without gradients."""
    end = since[..., -1:]
    kept, left = (end - since).exp(), end.exp().expand(-1, -1, k.shape[2], -1)  # left: (batch or 1, heads, chunks, 1)
    if cut is not None:
        kept, left = kept * cut.kept[:, None], left * cut.passes[:, None, :, None]
    decayed_k = k * kept[..., None].to(k.dtype)
    new_s = (decayed_k.transpose(-1, -2) @ v).to(state[0].dtype)
    new_z = decayed_k.detach().sum(3, dtype=state[1].dtype)
    (s, z), found_s, found_z = state, [], []
    # unbind: the gradient of each slice would have the size of the whole
    for rest, more_s, more_z in zip(left.unbind(2), new_s.unbind(2), new_z.unbind(2), strict=True):
        found_s.append(s)
        found_z.append(z)
        s = s * rest[..., None] + more_s
        z = z * rest.detach() + more_z
    return torch.stack(found_s, 2), torch.stack(found_z, 2), (s, z)
