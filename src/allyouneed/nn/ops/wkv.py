"""The WKV recurrence of RWKV-4 over whole sentences (Peng et al. 2023, eq. 16; numerically stable: appendix D).

    wkv_t = (Σ_{j<t} e^{k_j − (t−1−j) δ} v_j + e^{u + k_t} v_t) / (the same without v)

Numerator and denominator are one linear recurrence, S_t = e^{−δ} S_{t−1} + e^{k_t} (v_t, 1), evaluated by a parallel
scan: work linear in the length, depth logarithmic. A state (m, a, b) stands for e^m a and e^m b with m the largest
exponent, so keys may be of any size; m carries no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from allyouneed.kernels import usable

WKVState = tuple[Tensor, Tensor, Tensor]  # m, a, b: (batch, time, features) each, or (batch, features) for one position
SEGMENT = 1024  # tokens per scan: its saved activations fit into the cache
LEAST = -1e38  # m of an empty sum: finite, so that differences are defined


def initial_state(batch: int, features: int, like: Tensor) -> WKVState:
    """The state before the first token, in at least single precision."""
    zeros = like.new_zeros(batch, features, dtype=torch.promote_types(like.dtype, torch.float32))
    return zeros + LEAST, zeros, zeros


def run_wkv(
    past: WKVState, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, real: Tensor | None = None
) -> tuple[Tensor, WKVState]:
    """wkv of every token, and the state after each row's last real one. `real` (batch, time) bool is left-aligned;
    results after it are undefined."""
    if usable(k):
        from allyouneed.kernels.triton.wkv import wkv

        return wkv(past, k, v, decay, bonus, None if real is None else real.sum(1), LEAST)
    k, v = k.to(past[0].dtype), v.to(past[0].dtype)
    if k.shape[1] > SEGMENT:
        return _in_segments(past, k, v, decay, bonus, real)
    sums = prefix_states(past, k, v, decay)
    m, a, b = (value[:, -1] if real is None else after_last_real(value, real) for value in sums)
    return wkv_output(sums, k, v, bonus), (m, a, b)


def _in_segments(
    past: WKVState, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, real: Tensor | None
) -> tuple[Tensor, WKVState]:
    # split, because the gradient of a slice has the size of the whole
    keys, values = k.split(SEGMENT, 1), v.split(SEGMENT, 1)
    whole = [None] * len(keys) if real is None else real.split(SEGMENT, 1)
    found = []
    for some_keys, some_values, some_real in zip(keys, values, whole, strict=True):
        some, past = run_wkv(past, some_keys, some_values, decay, bonus, some_real)
        found.append(some)
    return torch.cat(found, 1), past


def after_last_real(values: Tensor, real: Tensor) -> Tensor:
    """Select from values (batch, time + 1, features), before the first and after each token, those after the last real
    one."""
    last = real.sum(1)[:, None, None]
    return values.gather(1, last.expand(-1, 1, values.shape[2]))[:, 0]


def prefix_states(past: WKVState, k: Tensor, v: Tensor, decay: Tensor) -> WKVState:
    """S before the first token, …, S after the last: (batch, time + 1, features). `decay` is δ = e^w."""
    m = k.detach()
    term = (k - m).exp()  # equals 1; present for its gradient
    first = (value[:, None] for value in past)
    tokens = (m, v * term, term)
    joined = tuple(torch.cat(both, 1) for both in zip(first, tokens, strict=True))
    return _scan((joined[0], joined[1], joined[2]), decay)


def wkv_output(sums: WKVState, k: Tensor, v: Tensor, bonus: Tensor) -> Tensor:
    """wkv of every token, given the states before it."""
    m, a, b = (value[:, : k.shape[1]] for value in sums)
    own = bonus.to(k.dtype) + k
    top = torch.maximum(m, own.detach())
    past, now = (m - top).exp(), (own - top).exp()
    return (past * a + now * v) / (past * b + now)


def _scan(sums: WKVState, decay: Tensor) -> WKVState:
    """Inclusive scan over states of equal spans (the first may differ): earlier states decay by e^{−decay} per span."""
    time = sums[0].shape[1]
    if time == 1:
        return sums
    odd = _scan(_combine(_slice(sums, slice(0, -1, 2)), _slice(sums, slice(1, None, 2)), decay), 2 * decay)
    even = _combine(_slice(odd, slice(0, (time - 1) // 2)), _slice(sums, slice(2, None, 2)), decay)
    first, half = _slice(sums, slice(0, 1)), time // 2
    interleaved = []
    for start, others, ends in zip(first, even, odd, strict=True):
        begins = torch.cat((start, others), 1)
        pairs = torch.stack((begins[:, :half], ends), 2).flatten(1, 2)
        interleaved.append(torch.cat((pairs, begins[:, half:]), 1))
    return interleaved[0], interleaved[1], interleaved[2]


def _combine(left: WKVState, right: WKVState, decay: Tensor) -> WKVState:
    (m, a, b), (n, c, d) = left, right
    top = torch.maximum(m - decay.detach(), n)
    old, new = (m - decay - top).exp(), (n - top).exp()
    return top, old * a + new * c, old * b + new * d


def _slice(sums: WKVState, which: slice) -> WKVState:
    m, a, b = sums
    return m[:, which], a[:, which], b[:, which]
