"""Causal linear attention: sums over the keys up to each query, Σ_{j ≤ i} (q_i·k_j) v_j, without a softmax.

(Katharopoulos et al. 2020, "Transformers are RNNs", eq. 9; Choromanski et al. 2021, "Rethinking Attention with
Performers", appendix B.1.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from allyouneed.nn.ops.unpack import Restarts

CHUNK = 64  # tokens per chunk, within which pairs are computed
ALIGNED = 8  # features of half precision that matrix units read at once


def prefix_sums(
    q: Tensor, k: Tensor, v: Tensor, before: Tensor, dtype: torch.dtype | None = None, starts: Tensor | None = None,
    inclusive: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Σ_{j ≤ i} (q_i·k_j) v_j, and the sums `before` (batch, heads, m, width of v) plus those of all tokens.

    Pairs within a chunk, sums between chunks: no loop over time, and memory linear in the length. `dtype`: of the
    products; sums over chunks are in that of `before`. On a GPU chunks are longer: storing a sum costs more than a
    product. `starts` (batch, time): of packed rows, in which sums begin anew with each sentence. `inclusive`: j = i.
    """
    time, width = q.shape[2], v.shape[-1]
    size = min(2 * CHUNK if q.is_cuda else CHUNK, time)
    if dtype is not None:
        v, before = (nn.functional.pad(x, (0, -width % ALIGNED)) for x in (v, before))
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    q, k, v = (nn.functional.pad(x, (0, 0, 0, -time % size)).unflatten(2, (-1, size)) for x in (q, k, v))
    pairs = (q @ k.transpose(-1, -2)).tril(0 if inclusive else -1)
    if starts is not None:
        cut = Restarts.of(starts, size)
        pairs, k, q = pairs * cut.pairs[:, None], k * cut.kept[:, None, ..., None], q * cut.reads[:, None, ..., None]
        each = (k.transpose(-1, -2) @ v).to(before.dtype)
        # as a product: chunks whose sums reach the chunk
        past = (cut.reaches[:, None].to(each.dtype) @ each.flatten(3)).view_as(each)
        found = pairs @ v + q @ past.to(q.dtype)
        return found.to(before.dtype).flatten(2, 3)[:, :, :time, :width], before
    each = (k.transpose(-1, -2) @ v).to(before.dtype)  # (batch, heads, chunks, m, width of v)
    until = each.cumsum(2) + before[:, :, None]
    found = pairs @ v + q @ (until - each).to(q.dtype)
    # (batch, heads, chunks, size, width of v)
    return found.to(before.dtype).flatten(2, 3)[:, :, :time, :width], until[:, :, -1, :, :width]
