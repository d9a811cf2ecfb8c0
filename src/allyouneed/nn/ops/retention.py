"""The arithmetic of retention: sums over the past in which every token makes what was before it fade.

    S_t = a_t S_{t−1} + k_tᵀ v_t        o_t = q_t S_t        (a matrix a head)
    z_t = a_t z_{t−1} + k_t             r_t = q_t · z_t      (the same of the scores alone)

with a_t = exp(log_t), between 0 and 1. `fold` gives S and z after some tokens. `chunkwise` gives o and r of all of
them: inside a chunk as attention without softmax, between chunks by S and z, so the time is linear in the length (Sun
et al. 2023, "Retentive Network", eq. 7). Products are those of the inputs' precision, sums at least 32 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from allyouneed.kernels import usable

CHUNK = 128  # near a head's width, where both halves of the work are alike

Sums = tuple[Tensor, Tensor]  # S (batch, heads, key width, value width), z (batch, heads, key width)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def nothing(batch: int, heads: int, keys: int, values: int, like: Tensor) -> Sums:
    """The sums of no tokens."""
    dtype = wide(like.dtype)
    return like.new_zeros(batch, heads, keys, values, dtype=dtype), like.new_zeros(batch, heads, keys, dtype=dtype)


def fold(sums: Sums, k: Tensor, v: Tensor, log: Tensor) -> Sums:
    """k, v (batch, heads, time, …), log (batch or 1, heads, time); a token with k = 0 and log = 0 changes nothing."""
    after = log.flip(-1).cumsum(-1).flip(-1)  # what is left of a token's own step and all later ones, as a logarithm
    left = (after - log).exp()[..., None]
    faded = k * left.to(k.dtype)
    total = log.sum(-1, keepdim=True).exp()  # (batch or 1, heads, 1)
    s = sums[0] * total[..., None] + (faded.transpose(-1, -2) @ v).to(sums[0].dtype)
    return s, sums[1] * total + faded.sum(2, dtype=sums[1].dtype)


def chunkwise(q: Tensor, k: Tensor, v: Tensor, log: Tensor, sums: Sums | None = None) -> tuple[Tensor, Tensor]:
    """o (batch, heads, time, value width) and r (batch, heads, time), of tokens that come after those in `sums`.

    log (batch or 1, heads, time), or (1, heads, 1) if it is always the same. r carries no gradient.
    """
    batch, heads, time, width = q.shape
    if not time:
        return v, v[..., 0].to(wide(v.dtype))
    if usable(v):
        from allyouneed.kernels.triton.retention import retention

        return retention(q, k, v, log, sums)[:2]
    size = min(CHUNK, time)
    steady = log.shape[-1] == 1
    q, k, v = (nn.functional.pad(x, (0, 0, 0, -time % size)).unflatten(2, (-1, size)) for x in (q, k, v))
    if steady:
        since = log[..., None] * torch.arange(1, size + 1, device=q.device)  # (1, heads, 1, size)
    else:
        since = nn.functional.pad(log, (0, -time % size)).unflatten(2, (-1, size)).cumsum(-1)
    inside = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    # the future is hidden before exp, for there it would overflow
    fading = (since[..., None] - since[..., None, :]).masked_fill(~inside, -torch.inf).exp()
    scores = q @ k.transpose(-1, -2) * fading.to(q.dtype)  # (batch, heads, chunks, size, size)
    o, r = scores @ v, scores.detach().sum(-1, dtype=wide(q.dtype))
    if q.shape[2] > 1 or sums is not None:
        sums = nothing(batch, heads, width, v.shape[-1], q) if sums is None else sums
        s, z = _before(sums, k, v, since)
        looking = q * since.exp()[..., None].to(q.dtype)
        o = o + looking @ s.to(q.dtype)
        r = r + (looking.detach() @ z[..., None].to(q.dtype))[..., 0]
    return o.flatten(2, 3)[:, :, :time], r.flatten(2, 3)[:, :, :time]


def _before(sums: Sums, k: Tensor, v: Tensor, since: Tensor) -> Sums:
    """S and z before each chunk: (batch, heads, chunks, …); z without gradients."""
    end = since[..., -1:]
    faded = k * (end - since).exp()[..., None].to(k.dtype)
    left = end.exp().expand(-1, -1, k.shape[2], -1)  # (batch or 1, heads, chunks, 1)
    new_s = (faded.transpose(-1, -2) @ v).to(sums[0].dtype)
    new_z = faded.detach().sum(3, dtype=sums[1].dtype)
    (s, z), found_s, found_z = sums, [], []
    # taken apart at once: a slice each would have a gradient as large as the whole, each
    for rest, more_s, more_z in zip(left.unbind(2), new_s.unbind(2), new_z.unbind(2), strict=True):
        found_s.append(s)
        found_z.append(z)
        s = s * rest[..., None] + more_s
        z = z * rest.detach() + more_z
    return torch.stack(found_s, 2), torch.stack(found_z, 2)
