"""Block-sparse attention (blocks: block_mask.py): query blocks attend only to the key blocks they may reach.

Parts with different token orders are merged by their log-sum-exp: with lse_i that of part i, the softmax over all is Σ
exp(lse_i − lse) out_i, lse = log Σ exp(lse_i).

`FusedBlockSparse` handles plain scores on CPU and saves only q, k, v, out and lse for backward; `gathered` handles all
other scores through autograd and `DenseAttention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from allyouneed.nn.ops.attention.block_mask import BlockedTokens, BlockGroup, BlockLayout
from allyouneed.nn.ops.attention.dense import DenseAttention, ScoreMod, masked_scores, repeat_kv
from allyouneed.torch_private import cpu_flash_attention, cpu_flash_attention_backward

KEYS_PER_CALL = 8192  # small enough for a CPU cache


class BlockSparse:
    """Block-sparse attention for given block layouts, called by all layers."""

    def __init__(self, parts: Sequence[BlockLayout]) -> None:
        self.parts = list(parts)
        cuda = parts[0].query.tokens.device.type == "cuda"
        self.chunks = [list(part.chunks(KEYS_PER_CALL * (32 if cuda else 1))) for part in parts]
        self.dense: dict[tuple[int, int], DenseAttention] = {}
        self.slots: dict[int, Tensor] = {}

    @property
    def area(self) -> int:
        return sum(part.area for part in self.parts)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
        if score_mod.plain and not dropout and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
            return fused(q, k, v, self, score_mod.scale)
        if self.parts[0].rows == 1 and q.shape[0] > 1:
            rows = zip(q.split(1), k.split(1), v.split(1), strict=True)
            return torch.cat([self.gathered(*row, dropout, score_mod) for row in rows])
        return self.gathered(q, k, v, dropout, score_mod)

    def gathered(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod) -> Tensor:
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # (rows · time, heads, head_width)
        shape = (q.shape[0], q.shape[2], q.shape[1], -1)
        if len(self.parts) == 1:
            return self._part(0, flat, dropout, score_mod, with_lse=False)[0].view(shape).transpose(1, 2)
        outs, sums = zip(*(self._part(n, flat, dropout, score_mod) for n in range(len(self.parts))), strict=True)
        return merge_softmax(outs, sums).view(shape).transpose(1, 2)

    def _part(
        self, number: int, flat: list[Tensor], dropout: float, score_mod: ScoreMod, with_lse: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Output (tokens, heads, head_width) and lse (tokens, heads) of one part."""
        part, chunks = self.parts[number], self.chunks[number]
        q, k, v = flat
        if not chunks:
            nothing = 0 * (q.sum() + k.sum() + v.sum())  # zeros with a gradient, as a mask would give
            return nothing.expand(len(q), q.shape[1], v.shape[2]), q.new_full(q.shape[:2], float("-inf"))
        gathered = zip(
            chunks,
            _Blocks.apply(q, part.query, *(chunk.queries for chunk in chunks)),
            _Blocks.apply(k, part.key, *(chunk.keys for chunk in chunks)),
            _Blocks.apply(v, part.key, *(chunk.keys for chunk in chunks)),
            strict=True,
        )
        outs, sums = [], []
        for index, (chunk, *tile) in enumerate(gathered):
            execute = self.dense.setdefault((number, index), _dense(chunk))
            a, b, c = (x.flatten(1, -3).transpose(1, 2) for x in tile)  # (n, heads, tokens, head_width)
            if with_lse:
                out, lse = attend_with_lse(execute, a, b, c, dropout, score_mod)
                sums.append(lse.transpose(1, 2).flatten(0, 1))
            else:
                out = execute(a, b, c, dropout, score_mod)
            outs.append(out.transpose(1, 2).flatten(0, 1))  # (n · block, heads, head_width)
        if number not in self.slots:
            self.slots[number] = self._slots(number)
        slots = self.slots[number]
        out = _Pick.apply(torch.cat(outs), slots, 0.0)
        return out, _Pick.apply(torch.cat(sums), slots, float("-inf")) if with_lse else out

    def _slots(self, number: int) -> Tensor:
        """Index of each token in the concatenated group outputs; -1 if no group contains it."""
        part, blocks = self.parts[number], torch.cat([chunk.queries for chunk in self.chunks[number]])
        where = torch.full((len(part.query.tokens),), -1, device=blocks.device)
        where[blocks] = torch.arange(len(blocks), device=blocks.device)
        block, inner = part.query.slots // part.block, part.query.slots % part.block
        return torch.where(where[block] < 0, -1, where[block] * part.block + inner)


def _dense(chunk: BlockGroup) -> DenseAttention:
    mask = chunk.mask
    if mask is None:
        mask = torch.ones(1, 1, 1, chunk.key_positions.shape[1], dtype=torch.bool, device=chunk.keys.device)
    return DenseAttention(mask, chunk.query_positions, chunk.key_positions)


def attend_with_lse(
    dense: DenseAttention, q: Tensor, k: Tensor, v: Tensor, dropout: float, score_mod: ScoreMod
) -> tuple[Tensor, Tensor]:
    """(out, lse) by the definition, both differentiable."""
    scores = masked_scores(q, k, dense.mask, dense.queries, dense.keys, score_mod)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None]).exp() * dense.mask
    weights = torch.nn.functional.dropout(weights.to(v.dtype), dropout, dropout > 0)
    out = weights @ repeat_kv(v, q.shape[1])
    if score_mod.values is not None:
        out = out + score_mod.values(weights, dense.queries, dense.keys).to(out.dtype)
    return out, lse.masked_fill(~dense.mask.any(-1), float("-inf"))


def merge_softmax(outs: Sequence[Tensor], sums: Sequence[Tensor]) -> Tensor:
    """Merge the softmaxes of parts: outs (…, width) and lse (…). Zeros where no part has a key."""
    lse = torch.stack(list(sums))
    lse = lse.clamp(min=torch.finfo(lse.dtype).min / 2)  # finite, so that rows without keys get no NaN gradient
    shares = (lse - lse.logsumexp(0)).exp()[..., None].to(outs[0].dtype)
    return sum((out * share for out, share in zip(outs, shares, strict=True)), start=torch.zeros_like(outs[0]))


class _Blocks(torch.autograd.Function):
    """Gather blocks of tokens for several groups; backward adds whole blocks, then restores the token order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, side: BlockedTokens, *blocks: Tensor) -> tuple[Tensor, ...]:
        ctx.side, ctx.blocks, ctx.shape = side, blocks, x.shape
        return tuple(x[side.tokens[index]] for index in blocks)  # (n, …, block, heads, head_width)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        side: BlockedTokens = ctx.side
        home = gradients[0].new_zeros(len(side.tokens), side.block, *ctx.shape[1:])
        for index, gradient in zip(ctx.blocks, gradients, strict=True):
            home.index_add_(0, index.flatten(), gradient.reshape(-1, *home.shape[1:]))
        return side.unblock(home), None, *(None for _ in ctx.blocks)


class _Pick(torch.autograd.Function):
    """Select rows by unique index; `empty` where the index is -1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, empty: float) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = len(x)
        found = x.index_select(0, index.clamp(min=0))
        return found.masked_fill(_like(index < 0, found), empty)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), (index,) = gradients, ctx.saved_tensors
        back = torch.full((ctx.size,), -1, device=index.device)
        back[index[index >= 0]] = (index >= 0).nonzero().flatten()
        found = gradient.index_select(0, back.clamp(min=0))
        return found.masked_fill(_like(back < 0, found), 0.0), None, None


def _like(flags: Tensor, x: Tensor) -> Tensor:
    return flags.view(-1, *[1] * (x.dim() - 1))


# --- plain scores on CPU --------------------------------------------------------------------------------------------


def fused(q: Tensor, k: Tensor, v: Tensor, plan: BlockSparse, scale: float) -> Tensor:
    """`FusedBlockSparse` on (batch, heads, time, head_width)."""
    batch, heads, time, _ = q.shape
    out: Tensor
    if plan.parts[0].rows == 1:  # rows with equal layouts become extra heads
        flat = [x.permute(2, 0, 1, 3).flatten(1, 2) for x in (q, k, v)]
        out = FusedBlockSparse.apply(*flat, plan, scale).unflatten(1, (batch, heads)).permute(1, 2, 0, 3)
    else:
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        out = FusedBlockSparse.apply(*flat, plan, scale).unflatten(0, (batch, time)).transpose(1, 2)
    return out


class FusedBlockSparse(torch.autograd.Function):
    """Attention over (tokens, heads, head_width). The gradient of a part follows from the merged out and lse (Dao et
    al. 2022, B.2: dS = P ∘ (dP − rowsum(dO ∘ O)), P = exp(S − lse))."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: BlockSparse, scale: float) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], float("-inf"), dtype=_wide(q))
        for number, (part, chunks) in enumerate(zip(plan.parts, plan.chunks, strict=True)):
            for chunk in chunks:
                tokens = part.query.tokens[chunk.queries].flatten()
                mask = _additive_mask(chunk.mask, q)
                a, b, c = _gather(part, chunk, q, k, v)
                new, sums = cpu_flash_attention(a, b, c, mask, scale)
                if chunk.empty_queries is not None:
                    sums = sums.masked_fill(chunk.empty_queries, float("-inf"))
                new, sums = new.transpose(1, 2).flatten(0, 1), sums.transpose(1, 2).flatten(0, 1)
                if number:
                    old = lse[tokens]
                    both = torch.logaddexp(old, sums)
                    floor = both.clamp(min=torch.finfo(both.dtype).min)
                    shares = [(x - floor).exp()[..., None].to(q.dtype) for x in (old, sums)]
                    new, sums = out[tokens] * shares[0] + new * shares[1], both
                out.index_copy_(0, tokens, new)
                lse.index_copy_(0, tokens, sums)
        ctx.save_for_backward(q, k, v, out, lse.masked_fill(lse.isinf(), 0.0))
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        (gradient,) = gradients
        gradient = gradient.contiguous()
        groups = q.shape[1] // k.shape[1]
        found: list[Tensor | None] = [None, None, None]
        for part, chunks in zip(ctx.plan.parts, ctx.plan.chunks, strict=True):
            homes = [x.new_zeros(len(s.tokens), s.block, *x.shape[1:]) for x, s in _sides(part, q, k, v)]
            for chunk in chunks:
                tokens = part.query.tokens[chunk.queries]
                inside = part.query.valid[chunk.queries][..., None, None]
                a, b, c = _gather(part, chunk, q, k, v)
                g, o = (x.transpose(1, 2) for x in (gradient[tokens] * inside, out[tokens]))
                b, c = repeat_kv(b, q.shape[1]), repeat_kv(c, q.shape[1])
                mask, sums = _additive_mask(chunk.mask, q), lse[tokens].transpose(1, 2).contiguous()
                grads = cpu_flash_attention_backward(g, a, b, c, o, sums, mask, ctx.scale)
                for home, grad, blocks in zip(homes, grads, (chunk.queries, chunk.keys, chunk.keys), strict=True):
                    grad = grad.transpose(1, 2)
                    if home.shape[2] != grad.shape[2]:  # sum over query heads that share a key head
                        grad = grad.unflatten(2, (-1, groups)).sum(3)
                    home.index_add_(0, blocks.flatten(), grad.reshape(-1, *home.shape[1:]))
            for number, (_, side) in enumerate(_sides(part, q, k, v)):
                moved, before = side.unblock(homes[number]), found[number]
                homes[number] = moved  # frees the blocks
                found[number] = moved if before is None else before.add_(moved)
        return *found, None, None


def _sides(part: BlockLayout, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, BlockedTokens]]:
    return [(q, part.query), (k, part.key), (v, part.key)]


def _gather(part: BlockLayout, chunk: BlockGroup, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Queries, keys and values of a group: (n, heads, tokens, head_width) each."""
    queries, keys = part.query.tokens[chunk.queries], part.key.tokens[chunk.keys].flatten(1)
    return [x[index].transpose(1, 2) for x, index in ((q, queries), (k, keys), (v, keys))]


def _additive_mask(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """The mask as an additive bias, which the kernel requires."""
    return None if mask is None else q.new_zeros(mask.shape).masked_fill_(~mask, float("-inf"))


def _wide(q: Tensor) -> torch.dtype:
    return torch.float32 if q.dtype in (torch.bfloat16, torch.float16) else q.dtype
