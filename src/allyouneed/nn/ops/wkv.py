"""The WKV recurrence of RWKV-4 over whole sentences (Peng et al. 2023, eq. 16; numerically stable: appendix D).

    wkv_t = (Σ_{j<t} e^{k_j − (t−1−j) δ} v_j + e^{u + k_t} v_t) / (the same without v)

Numerator and denominator are one linear recurrence, S_t = e^{−δ} S_{t−1} + e^{k_t} (v_t, 1), evaluated by a parallel
scan: work linear in the length, depth logarithmic. A state (m, a, b) stands for e^m a and e^m b with m the largest
exponent, so keys may be of any size; m carries no gradient. `starts` (batch, time) of packed rows (ops/unpack.py): S is
dropped at the first token of each sentence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from allyouneed.kernels import usable
from allyouneed.nn.ops.unpack import first_tokens

WKVState = tuple[Tensor, Tensor, Tensor]  # m, a, b: (batch, time, features) each, or (batch, features) for one position
SEGMENT = 1024  # tokens per scan: its saved activations fit into the cache
LEAST = -1e38  # m of an empty sum: finite, so that differences are defined


def initial_state(batch: int, features: int, like: Tensor) -> WKVState:
    """The state before the first token, in at least single precision."""
    zeros = like.new_zeros(batch, features, dtype=torch.promote_types(like.dtype, torch.float32))
    return zeros + LEAST, zeros, zeros


def run_wkv(
    past: WKVState, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, real: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, WKVState]:  # fmt: skip
    """wkv of every token, and the state after each row's last real one. `real` (batch, time) bool is left-aligned;
    results after it are undefined."""
    if usable(k):
        from allyouneed.kernels.triton.wkv import wkv

        return wkv(past, k, v, decay, bonus, None if real is None else real.sum(1), LEAST, starts)
    k, v = k.to(past[0].dtype), v.to(past[0].dtype)
    return _in_segments(past, k, v, decay, bonus, real, None if starts is None else first_tokens(starts))


def _in_segments(
    past: WKVState, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, real: Tensor | None, first: Tensor | None
) -> tuple[Tensor, WKVState]:
    """`first` (batch, time) bool: tokens that begin a sentence."""
    # split, because the gradient of a slice has the size of the whole
    keys, values = k.split(SEGMENT, 1), v.split(SEGMENT, 1)
    reals, firsts = (
        [None] * len(keys) if mask is None else mask.split(SEGMENT, 1) for mask in (real, first)
    )  # of each segment
    found = []
    for some_keys, some_values, some_real, some_first in zip(keys, values, reals, firsts, strict=True):
        sums = prefix_states(past, some_keys, some_values, decay, some_first)
        m, a, b = (value[:, -1] if some_real is None else after_last_real(value, some_real) for value in sums)
        found.append(wkv_output(sums, some_keys, some_values, bonus, some_first))
        past = m, a, b
    return found[0] if len(found) == 1 else torch.cat(found, 1), past


def after_last_real(values: Tensor, real: Tensor) -> Tensor:
    """Select from values (batch, time + 1, features), before the first and after each token, those after the last real
    one."""
    last = real.sum(1)[:, None, None]
    return values.gather(1, last.expand(-1, 1, values.shape[2]))[:, 0]


def prefix_states(past: WKVState, k: Tensor, v: Tensor, decay: Tensor, first: Tensor | None = None) -> WKVState:
    """S before the first token, …, S after the last: (batch, time + 1, features). `decay` is δ = e^w."""
    m = k.detach()
    term = (k - m).exp()  # equals 1; present for its gradient
    initial = (value[:, None] for value in past)
    tokens = (m, v * term, term)
    joined = tuple(torch.cat(both, 1) for both in zip(initial, tokens, strict=True))
    drops = None if first is None else nn.functional.pad(first, (1, 0))[..., None]
    return _scan((joined[0], joined[1], joined[2]), decay, drops)


def wkv_output(sums: WKVState, k: Tensor, v: Tensor, bonus: Tensor, first: Tensor | None = None) -> Tensor:
    """wkv of every token, given the states before it."""
    m, a, b = (value[:, : k.shape[1]] for value in sums)
    m = m if first is None else m.masked_fill(first[..., None], LEAST)
    own = bonus.to(k.dtype) + k
    top = torch.maximum(m, own.detach())
    past, now = (m - top).exp(), (own - top).exp()
    return (past * a + now * v) / (past * b + now)


def _scan(sums: WKVState, decay: Tensor, drops: Tensor | None) -> WKVState:
    """Inclusive scan over states of equal spans (the first may differ): earlier states decay by e^{−decay} per span.
    `drops` (batch, spans, 1) bool: spans in which a sentence begins, so that no earlier state counts after them."""
    time = sums[0].shape[1]
    if time == 1:
        return sums
    left, right = slice(0, -1, 2), slice(1, None, 2)
    at_odd, at_even, pairs = None, None, None
    if drops is not None:
        at_odd, at_even = drops[:, right], drops[:, 2::2]
        pairs = drops[:, left] | at_odd
    odd = _scan(_combine(_slice(sums, left), _slice(sums, right), decay, at_odd), 2 * decay, pairs)
    even = _combine(_slice(odd, slice(0, (time - 1) // 2)), _slice(sums, slice(2, None, 2)), decay, at_even)
    first, half = _slice(sums, slice(0, 1)), time // 2
    interleaved = []
    for start, others, ends in zip(first, even, odd, strict=True):
        begins = torch.cat((start, others), 1)
        pairs = torch.stack((begins[:, :half], ends), 2).flatten(1, 2)
        interleaved.append(torch.cat((pairs, begins[:, half:]), 1))
    return interleaved[0], interleaved[1], interleaved[2]


def _combine(left: WKVState, right: WKVState, decay: Tensor, drops: Tensor | None) -> WKVState:
    (m, a, b), (n, c, d) = left, right
    m = m if drops is None else m.masked_fill(drops, LEAST)
    top = torch.maximum(m - decay.detach(), n)
    old, new = (m - decay - top).exp(), (n - top).exp()
    return top, old * a + new * c, old * b + new * d


def _slice(sums: WKVState, which: slice) -> WKVState:
    m, a, b = sums
    return m[:, which], a[:, which], b[:, which]
