"""The sums inside RWKV-4, for all places of a sentence at once (Peng et al. 2023, eq. 16; stably: appendix D).

    wkv_t = (Σ_{j<t} e^{k_j − (t−1−j) δ} v_j + e^{u + k_t} v_t) / (the same without v)

Numerator and denominator of the past are one linear recurrence, S_t = e^{−δ} S_{t−1} + e^{k_t} (v_t, 1), and two
stretches of it side by side are joined as two tokens are. So it is scanned by pairs: work grows with the length, depth
with its logarithm. Keys may be of any size: a sum is (m, a, b), meaning e^m a over e^m b, and m is the greatest
exponent in it. m is a matter of writing only, so no gradient flows through it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allyouneed.kernels import usable

Sums = tuple[Tensor, Tensor, Tensor]  # m, a, b, each (batch, time, features) or, of one place, (batch, features)
SEGMENT = 1024  # tokens that are scanned at once: what a scan leaves behind for its gradient stays near the cores
LEAST = -1e38  # m of a sum without terms: finite, so that no difference of two is undefined


def nothing(batch: int, features: int, like: Tensor) -> Sums:
    """The sums of rows that have seen nothing, in at least single precision."""
    zeros = like.new_zeros(batch, features, dtype=torch.promote_types(like.dtype, torch.float32))
    return zeros + LEAST, zeros, zeros


def along(
    past: Sums, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, real: Tensor | None = None
) -> tuple[Tensor, Sums]:
    """wkv of every token, and the sums after each row's last real one. `real` (batch, time) bool is True from the left
    on; what comes after it gets any numbers."""
    if usable(k):
        from allyouneed.kernels.triton.wkv import wkv

        return wkv(past, k, v, decay, bonus, None if real is None else real.sum(1), LEAST)
    k, v = k.to(past[0].dtype), v.to(past[0].dtype)
    if k.shape[1] > SEGMENT:
        return _in_segments(past, k, v, decay, bonus, real)
    sums = prefixes(past, k, v, decay)
    m, a, b = (value[:, -1] if real is None else after(value, real) for value in sums)
    return weighted(sums, k, v, bonus), (m, a, b)


def _in_segments(
    past: Sums, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, real: Tensor | None
) -> tuple[Tensor, Sums]:
    keys, values = k.split(SEGMENT, 1), v.split(SEGMENT, 1)  # gradients of slices would each be as long as all
    whole = [None] * len(keys) if real is None else real.split(SEGMENT, 1)
    found = []
    for some_keys, some_values, some_real in zip(keys, values, whole, strict=True):
        some, past = along(past, some_keys, some_values, decay, bonus, some_real)
        found.append(some)
    return torch.cat(found, 1), past


def after(values: Tensor, real: Tensor) -> Tensor:
    """Of values (batch, time + 1, features) before the first token and after each: those after the last real one."""
    last = real.sum(1)[:, None, None]
    return values.gather(1, last.expand(-1, 1, values.shape[2]))[:, 0]


def prefixes(past: Sums, k: Tensor, v: Tensor, decay: Tensor) -> Sums:
    """S before the first token, …, S after the last: (batch, time + 1, features). `decay` is δ = e^w."""
    m = k.detach()
    term = (k - m).exp()  # 1; it is here for its gradient
    first = (value[:, None] for value in past)
    tokens = (m, v * term, term)
    joined = tuple(torch.cat(both, 1) for both in zip(first, tokens, strict=True))
    return _scan((joined[0], joined[1], joined[2]), decay)


def weighted(sums: Sums, k: Tensor, v: Tensor, bonus: Tensor) -> Tensor:
    """wkv of every token, given the sums before it."""
    m, a, b = (value[:, : k.shape[1]] for value in sums)
    own = bonus.to(k.dtype) + k
    top = torch.maximum(m, own.detach())
    past, now = (m - top).exp(), (own - top).exp()
    return (past * a + now * v) / (past * b + now)


def _scan(sums: Sums, decay: Tensor) -> Sums:
    """Sums of single stretches to those of all stretches up to each one; all but the first are equally long, and what
    came before one of them is e^{−decay} times as much after it."""
    time = sums[0].shape[1]
    if time == 1:
        return sums
    odd = _scan(_joined(_places(sums, slice(0, -1, 2)), _places(sums, slice(1, None, 2)), decay), 2 * decay)
    even = _joined(_places(odd, slice(0, (time - 1) // 2)), _places(sums, slice(2, None, 2)), decay)
    first, half = _places(sums, slice(0, 1)), time // 2
    woven = []
    for start, others, ends in zip(first, even, odd, strict=True):
        begins = torch.cat((start, others), 1)
        pairs = torch.stack((begins[:, :half], ends), 2).flatten(1, 2)
        woven.append(torch.cat((pairs, begins[:, half:]), 1))
    return woven[0], woven[1], woven[2]


def _joined(left: Sums, right: Sums, decay: Tensor) -> Sums:
    (m, a, b), (n, c, d) = left, right
    top = torch.maximum(m - decay.detach(), n)
    old, new = (m - decay - top).exp(), (n - top).exp()
    return top, old * a + new * c, old * b + new * d


def _places(sums: Sums, which: slice) -> Sums:
    m, a, b = sums
    return m[:, which], a[:, which], b[:, which]
