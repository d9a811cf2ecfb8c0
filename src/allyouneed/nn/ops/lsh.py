"""LSH attention over tokens sorted by bucket and cut into chunks (used by mixers/attention/lsh.py)."""

from __future__ import annotations

import torch
from torch import Tensor


def chunked_lsh_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor,
    chunk: int,
    beside: int,
    causal: bool,
    limited: bool = False,
    dropout: float = 0.0,
    same_bucket: bool = True,
) -> Tensor:
    """Attention among tokens that share an id in some round: q, k, v (batch, heads, time, head_width), ids (batch,
    heads, time, rounds).

    The softmax of a round covers the chunk of a query and `beside` chunks on each side, or only before it if `causal`
    or `limited`; they hold whole buckets unless `limited`. Rounds are merged by their shares of the total sum, in which
    a pair found in n rounds counts 1/n in each (Kitaev et al. 2020, appendix A). `same_bucket` False: all tokens of a
    chunk attend to each other.
    """
    ids = ids.transpose(2, 3)  # (batch, heads, rounds, time)
    (batch, heads, rounds, time), width = ids.shape, v.shape[-1]
    order = ids.argsort(dim=-1, stable=True)  # stable: text order within a bucket
    chunks = -(-time // chunk)
    beside = min(beside, chunks - 1)
    ahead = 0 if causal or limited else beside

    def cut(x: Tensor) -> Tensor:
        """(batch, heads, rounds, time, …) in text order to (…, chunks, chunk, …) in sorted order."""
        index = order.reshape(*order.shape, *[1] * (x.dim() - 4)).expand(*order.shape, *x.shape[4:])
        x = x.expand(-1, -1, rounds, *x.shape[3:]).gather(3, index)
        rest = x.new_full((*x.shape[:3], chunks * chunk - time, *x.shape[4:]), -1)
        return torch.cat((x, rest), 3).unflatten(3, (chunks, chunk))

    def around(x: Tensor) -> Tensor:
        """The chunks a chunk attends to, concatenated: (batch, heads, rounds, chunks, seen, …)."""
        edge = x.new_full((*x.shape[:3], 1, *x.shape[4:]), -2)
        padded = torch.cat((*[edge] * beside, x, *[edge] * ahead), 3)
        return torch.cat([padded[:, :, :, n : n + chunks] for n in range(beside + 1 + ahead)], 4)

    positions = torch.arange(time, device=q.device).expand(batch, heads, rounds, time)
    query_ids, positions = cut(ids), cut(positions)
    key_ids, key_positions = around(query_ids), around(positions)
    allowed = (
        (query_ids[..., :, None] == key_ids[..., None, :])
        if same_bucket
        else (key_ids >= 0)[..., None, :] & (query_ids >= 0)[..., :, None]
    )
    allowed = allowed & (
        positions[..., :, None] > key_positions[..., None, :]
        if causal
        else positions[..., :, None] != key_positions[..., None, :]
    )
    allowed = allowed & (key_positions >= 0)[..., None, :]
    scores = cut(q[:, :, None]) @ around(cut(k[:, :, None])).transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    back = order.argsort(-1)
    if rounds > 1:
        rounds_met = torch.zeros_like(allowed, dtype=torch.int8)  # rounds in which a pair shares a bucket
        for number in range(rounds):
            round_ids = cut(ids[:, :, number : number + 1])
            shares_bucket = round_ids[..., :, None] == around(round_ids)[..., None, :]
            if limited:
                cell = cut(back[:, :, number : number + 1] // chunk)
                far = cell[..., :, None] - around(cell)[..., None, :]
                shares_bucket = shares_bucket & (far >= 0) & (far <= 1)
            rounds_met += shares_bucket
        scores = scores - rounds_met.clamp(min=1).to(scores.dtype).log()
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = torch.nn.functional.dropout((scores.softmax(-1) * allowed).to(v.dtype), dropout, dropout > 0)
    out = weights @ around(cut(v[:, :, None]))  # (batch, heads, rounds, chunks, chunk, head_width)
    some = allowed.any(-1)
    total = scores.logsumexp(-1).masked_fill(~some, torch.finfo(scores.dtype).min)

    out = out.flatten(3, 4).gather(3, back[..., None].expand(-1, -1, -1, -1, width))
    # weight of each round: (batch, heads, rounds, time)
    shares = total.flatten(3).gather(3, back).softmax(2).to(v.dtype)
    isolated = ~some.flatten(3).gather(3, back).any(2)  # (batch, heads, time): no other token in the bucket
    return torch.where(isolated[..., None], v, (shares[..., None] * out).sum(2))


def chunks_needed(ids: Tensor, chunk: int, real: Tensor | None) -> int:
    """Neighbouring chunks needed to cover the largest bucket, padding excluded."""
    ids = ids.transpose(2, 3)  # (batch, heads, rounds, time)
    if real is not None:
        ids = ids.masked_fill(~real[:, None, None], -1)
    ordered = ids.sort(-1).values
    steps = torch.arange(ordered.shape[-1], device=ids.device).expand_as(ordered)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    run = steps - torch.where(begins, steps, 0).cummax(-1).values + 1
    largest = max(1, int(run.where(ordered >= 0, 0).max()))
    return -(-(largest - 1) // chunk)
