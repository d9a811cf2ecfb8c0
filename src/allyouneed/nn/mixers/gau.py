"""FLASH: the gated attention unit, quadratic and in mixed chunks (Hua, Dai, Liu, Le 2022, "Transformer Quality in
Linear Time", arXiv:2202.10447, sections 2.2 and 3.2)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import cache_cost
from allyouneed.nn.observe import observe
from allyouneed.nn.ops.attention.dense import dense_mask
from allyouneed.nn.ops.linear_attention import prefix_sums
from allyouneed.nn.ops.pieces import Pieces
from allyouneed.nn.ops.retention import accumulator_dtype
from allyouneed.nn.ops.unpack import flip_starts, unpack_rows
from allyouneed.nn.patterns.core import Causal, Full, Pattern
from allyouneed.nn.patterns.sparse import BlockDiagonal
from allyouneed.nn.positions.relative import Heads
from allyouneed.nn.positions.rotary import Rotary, RotaryModule
from allyouneed.nn.positions.t5_bias import Buckets
from allyouneed.nn.states.base import State
from allyouneed.nn.states.kv_cache import KVCache, KVState
from allyouneed.nn.states.recurrent import Carry, Recurrent, recurrent_cost
from allyouneed.nn.states.window import WindowKVCache
from allyouneed.nn.sublayer import AttendsByPattern, Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]


class _Gated(Mixer):
    branches: ClassVar[int]  # pairs of queries and keys

    hidden: Size | None = None
    """Width of gate and values (e); default: twice the model width."""
    key_width: Annotated[int, Field(gt=0, multiple_of=2)] = 128
    """Features of queries and keys (s)."""
    positions: Literal["both", "rotary", "bias"] = "both"
    """Rotate queries and keys (RoPE), add T5's bias to the scores, or both, as in the paper's code."""
    length: Size | None = None
    """Divide scores by this length (n in the paper, where all texts have one); default: by the number of keys."""

    def values(self, common: Common) -> int:
        return self.hidden or 2 * common.width

    @property
    def head(self) -> Heads:
        return Heads(1, 1, self.key_width, self.causal)

    @property
    def bias(self) -> Buckets | None:
        return None if self.positions == "rotary" else Buckets(untied=True)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        values, linear = self.values(common), common.linear
        total = linear.cost(common.width, 2 * values + self.key_width, True) + linear.cost(values, common.width, True)
        total += Cost(parameters=4 * self.branches * self.key_width)
        return total if self.bias is None else total + self.bias.cost(self.head, common, length)


class GAU(AttendsByPattern, _Gated):
    """U, V, Z = silu(W x); Q = γ_q ⊙ Z + β_q, K = γ_k ⊙ Z + β_k; out = W_o (U ⊙ (A V)), A = relu(Q Kᵀ / n + bias)²: one
    head, no softmax (eq. 3, 4). It replaces attention and feed-forward network: a layer needs no channel mixer."""

    branches: ClassVar[int] = 1

    kind: Literal["gau"] = "gau"
    pattern: Pattern = Full()
    """Which keys each query may attend to, as text: `causal & window(256)`."""

    def build(self, common: Common) -> SubLayer:
        return GAUModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        both = self.key_width + self.values(common)
        total = super().cost(common, length) + Cost(flops=2 * both * self.pattern.mean_keys(length))
        return total + cache_cost(self.pattern, both, length)


class MixedChunk(_Gated):
    """GAU in linear time: a sentence is cut into chunks of `chunk` tokens. Within a chunk, attention as in GAU; between
    chunks, linear attention with queries and keys of its own, V_lin = Q_lin (Σ K_linᵀ V) / n, over all earlier chunks,
    or over all tokens (`sees: around`) (eq. 5-7). out = W_o (U ⊙ (V_quad + V_lin))."""

    branches: ClassVar[int] = 2

    kind: Literal["mixed-chunk"] = "mixed-chunk"
    chunk: Size
    """Tokens of a chunk (C); 256 in the paper."""
    sees: Literal["past", "around"] = "past"
    """`past`: causal; `around`: bidirectional."""

    @property
    def causal(self) -> bool:
        return self.sees == "past"

    def leak(self) -> str | None:
        return None if self.causal else "its sums cover all tokens; set sees: past"

    def build(self, common: Common) -> SubLayer:
        return MixedChunkModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        values, block = self.values(common), BlockDiagonal(size=self.chunk)
        both, near = self.key_width + values, (Causal() & block if self.causal else block).mean_keys(length)
        total = super().cost(common, length) + Cost(flops=2 * both * near + 4 * self.key_width * values)
        wide = 1 + self.key_width * values  # how many tokens the chunk has, and the sums
        return total + recurrent_cost(self.chunk * both + wide, common.width, wide)


class _GatedModule(SubLayer):
    def __init__(self, config: _Gated, common: Common) -> None:
        super().__init__()
        self.values, self.keys, self.length = config.values(common), config.key_width, config.length
        self.parts = [self.values, self.values, self.keys]  # U, V, Z
        self.up = common.linear.build(common.width, self.parts, True)
        self.gains = nn.Parameter(torch.empty(2 * config.branches, self.keys))  # γ of a query, of its key, …
        self.offsets = nn.Parameter(torch.empty(2 * config.branches, self.keys))  # β
        rotary = Rotary().build(config.head, common) if config.positions != "bias" else None
        self.rotary = rotary if isinstance(rotary, RotaryModule) else None
        self.bias = None if config.bias is None else config.bias.build(config.head, common)
        self.out = common.linear.build(self.values, common.width, True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """γ around 1, so that scores are not zero at first; the paper draws γ with deviation 0.02."""
        nn.init.normal_(self.gains, mean=1.0, std=0.02)
        nn.init.zeros_(self.offsets)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """U, V (batch, time, e), Z (batch, time, s)."""
        u, v, z = silu(self.up(x)).split(self.parts, -1)
        return u, v, z

    def scaled(self, z: Tensor, number: int) -> Tensor:
        return z * self.gains[number].to(z.dtype) + self.offsets[number].to(z.dtype)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (batch, time, s) rotated by its positions (batch or 1, time)."""
        if self.rotary is None:
            return x
        table, _ = self.rotary.tables(positions, accumulator_dtype(x.dtype))
        return self.rotary.rotate(x[:, None], table)[:, 0]

    def weights(
        self, scores: Tensor, mask: Tensor, n: Tensor | int, queries: Tensor, keys: Tensor, in_order: bool = False
    ) -> Tensor:
        """relu(scores / n + bias)², 0 where masked; scores (batch, 1, queries, keys). `in_order`: distances are those
        of the columns, where they count."""
        scores = scores / n
        if self.bias is not None and in_order:
            scores = scores + diagonals(self.bias.distance_bias(scores.shape[-1])).to(scores.dtype)
        elif self.bias is not None:
            scores = scores + self.bias.bias(scores, queries, keys, 1.0).to(scores.dtype)
        return scores.relu().square() * mask


def diagonals(values: Tensor) -> Tensor:
    """Values by distance (heads, 2 · time − 1), from 1 − time on, at their pairs (heads, time, time). Rows of the
    values, one element longer than what is read at a time, so that each begins one further to the left."""
    time = (values.shape[1] + 1) // 2
    rows = pad(values.flip(1), (0, 1))[:, None].expand(-1, time, -1).flatten(1)
    return rows[:, :-time].unflatten(1, (time, -1))[..., time - 1 :]


class GAUModule(_GatedModule):
    traceable = True

    def __init__(self, config: GAU, common: Common) -> None:
        super().__init__(config, common)
        self.pattern, self.pattern_text = config.pattern, str(config.pattern)

    def prepare(self, context: Context, rows: int) -> None:
        self.mask(context)

    def mask(self, context: Context) -> tuple[Tensor, Tensor]:
        """Which tokens each sees, and how many: the same for all layers."""

        def make() -> tuple[Tensor, Tensor]:
            found = dense_mask(self.pattern, context.queries, context.queries)
            return found, found.sum(-1, keepdim=True).clamp(min=1)

        return context.memoize(GAUModule, self.pattern_text, make)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        u, v, z = self.project(x)
        positions, layout = context.queries.positions, context.queries
        q, k = (self.rotate(self.scaled(z, number), positions)[:, None] for number in (0, 1))  # (batch, 1, time, s)
        v = v[:, None]
        if isinstance(state, KVState):
            k, v, layout = state.append(k, v, context)
            mask = dense_mask(self.pattern, context.queries, layout)
            count = mask.sum(-1, keepdim=True).clamp(min=1)
        else:
            mask, count = self.mask(context)
        n, in_order = self.length or count, layout is context.queries and layout.consecutive
        q, k, v = observe(self, "q", q), observe(self, "k", k), observe(self, "v", v)
        weights = self.weights(q @ k.transpose(-1, -2), mask, n, positions, layout.positions, in_order)
        weights = observe(self, "weights", weights)
        seen = observe(self, "heads", weights @ v)
        return self.out(u * seen[:, 0])

    def new_state(self) -> State:
        if (why := self.pattern.leak()) is not None:
            raise ValueError(f"a gated attention unit with pattern '{self.pattern}' cannot decode: {why}")
        kept = self.pattern.kv_window
        return KVCache() if kept is None else WindowKVCache(kept)


class MixedChunkModule(_GatedModule):
    """The carry: tokens so far (batch, 1); Z and V of the current chunk (batch, C, s + e), from its first token on; and
    Σ K_linᵀ V of the chunks before it (batch, s, e)."""

    traceable = unpacks = True

    def __init__(self, config: MixedChunk, common: Common) -> None:
        super().__init__(config, common)
        self.chunk, self.past = config.chunk, config.sees == "past"

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        if isinstance(state, Recurrent):
            return state.advance(self.continued, x, context)
        unpacked = unpack_rows(context, restarts=True)
        u, v, z = self.project(unpacked.gather(x))
        if unpacked.real is not None:
            v = v * unpacked.real[..., None]
        v = observe(self, "v", v[:, None])[:, 0]
        count, _, sums = self.begin(len(v), v)
        if unpacked.starts is not None:
            seen = self.mix_packed(z, v, self.pieces(unpacked.starts, context), unpacked.starts, sums)
        else:
            seen = self.mix(z, v, count, sums, unpacked.real)[0] if v.shape[1] else v
        seen = observe(self, "heads", seen[:, None])[:, 0]
        return self.out(unpacked.scatter(u * seen, x))

    def prepare(self, context: Context, rows: int) -> None:
        if (starts := unpack_rows(context, restarts=True).starts) is not None:
            self.pieces(starts, context)

    def pieces(self, starts: Tensor, context: Context) -> Pieces:
        """Chunks of the sentences of packed rows."""
        return context.memoize(Pieces, self.chunk, lambda: Pieces.of(starts, self.chunk, context.queries))

    def mix_packed(self, z: Tensor, v: Tensor, pieces: Pieces, starts: Tensor, zeros: Tensor) -> Tensor:
        """`mix` of packed rows, whose sentences begin anywhere. Rows are cut into blocks of a chunk's size: a chunk
        reaches from one block into the next."""
        (_, time, _), device = z.shape, z.device
        size, at = self.chunk, torch.arange(time, device=device)
        positions = at - starts
        q, k, lin_q, lin_k = (self.rotate(self.scaled(z, number), positions) for number in range(4))
        local, around = pieces.layout.positions, () if self.past else (-1,)

        def cut(part: Tensor) -> Tensor:
            return pad(part, (0, 0, 0, -time % size)).unflatten(1, (-1, size))  # (batch, blocks, size, …)

        def near(part: Tensor) -> Tensor:
            """Each block with its neighbours: (batch, blocks, 2 · size or 3 · size, …)."""
            blocks = cut(part)
            return torch.cat([pad(blocks, (0, 0, 0, 0, by, -by)) for by in (1, 0, *around)], 2)

        numbers = (at - local + 1)[..., None]  # of each token's chunk; 0: outside the row
        mask = cut(numbers) == near(numbers)[..., 0][:, :, None]  # (batch, blocks, size, keys)
        here, there = torch.arange(size, 2 * size, device=device), torch.arange(mask.shape[-1], device=device)
        mask = mask & (here[:, None] >= there) if self.past else mask
        count = self.length or mask.sum(-1, keepdim=True).clamp(min=1)
        weights = self.weights(cut(q) @ near(k).mT, mask, count, here[None], there[None])
        seen = (weights @ near(v)).flatten(1, 2)[:, :time]
        q, k, v = lin_q[:, None], lin_k[:, None], v[:, None]  # one head
        if self.past:
            tokens, readers = pieces.tokens, pieces.readers
            each = (pieces.gather(k, tokens) * pieces.real[:, None, ..., None]).mT @ pieces.gather(v, tokens)
            sums = pieces.sums(each.to(zeros.dtype))
            before = pieces.gather((positions - local)[:, None, :, None], readers)
            sums = sums / (self.length or before[..., :1, :].clamp(min=1))
            far = pieces.scatter((pieces.gather(q, readers) @ sums.to(q.dtype)).flatten(2, 3), time)[:, 0]
        else:
            ends = time - 1 - flip_starts(starts).flip(1)
            until, _ = prefix_sums(q, k, v, zeros[:, None], None, starts)
            after, _ = prefix_sums(
                q.flip(2), k.flip(2), v.flip(2), zeros[:, None], None, flip_starts(starts), inclusive=False
            )
            far = (until + after.flip(2))[:, 0] / (self.length or (ends - starts + 1)[..., None])
        return seen + far.to(seen.dtype)

    def continued(self, x: Tensor, carry: Carry, real: Tensor | None) -> tuple[Tensor, Carry]:
        """Outputs of new tokens (batch, time, width), and the carry after each row's last real one."""
        u, v, z = self.project(x)
        seen, carry = self.run(z, v, carry, real)
        return self.out(u * seen), carry

    def mix(
        self, z: Tensor, v: Tensor, before: Tensor, sums: Tensor, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """V_quad + V_lin (batch, time, e) of tokens from the start of a chunk on, after `before` (batch, 1) tokens with
        these sums; and Σ K_linᵀ V of each chunk (batch, chunks, s, e). V of padding is 0."""
        time, device = z.shape[1], z.device
        size = min(self.chunk, time)

        def cut(part: Tensor) -> Tensor:
            return pad(part, (0, 0, 0, -time % size)).unflatten(1, (-1, size))  # (batch, chunks, size, …)

        positions = before + torch.arange(time, device=device)
        q, k, lin_q, lin_k = (cut(self.rotate(self.scaled(z, number), positions)) for number in range(4))
        v, local = cut(v), torch.arange(size, device=device)[None]
        each = (lin_k.mT @ v).to(sums.dtype)
        if self.past:
            mask = local.mT >= local
            near_count, far_sums = mask.sum(-1, keepdim=True), sums[:, None] + each.cumsum(1) - each
            starts = torch.arange(each.shape[1], device=device) * size
            far_count = (before + starts)[..., None, None]
        else:
            filled = torch.ones(1, time, dtype=torch.long, device=device) if real is None else real.long()
            mask = torch.ones(size, size, dtype=torch.bool, device=device)
            near_count, far_sums = cut(filled[..., None]).sum(2, keepdim=True), each.sum(1, keepdim=True)
            far_count = filled.sum(1)[:, None, None, None]  # near: (batch or 1, chunks, 1, 1)
        weights = self.weights(q @ k.mT, mask, self.length or near_count.clamp(min=1), local, local)
        far = lin_q @ (far_sums / (self.length or far_count.clamp(min=1))).to(lin_q.dtype)
        return (weights @ v + far).flatten(1, 2)[:, :time], each

    def run(self, z: Tensor, v: Tensor, carry: Carry, real: Tensor | None) -> tuple[Tensor, Carry]:
        """V_quad + V_lin of new tokens, and the carry after each row's last real one."""
        (count, current, sums), (batch, time, _) = carry, z.shape
        if real is not None:
            v = v * real[..., None]
        inside = count % self.chunk  # (batch, 1): tokens of the current chunk
        slots = inside + torch.arange(time, device=z.device)  # (batch, time)
        chunks = -(-(time + self.chunk - 1) // self.chunk)
        rows = torch.arange(batch, device=z.device)[:, None]
        # the current chunk, the new tokens behind its own, and room for an empty chunk
        joint = pad(current, (0, 0, 0, chunks * self.chunk))
        joint[rows, slots] = torch.cat((z, v), -1)
        if time == 1:
            seen, each = self.step(joint, inside, count, sums)
        else:
            known, values = joint[:, : chunks * self.chunk].split([self.keys, self.values], -1)
            every, each = self.mix(known, values, count - inside, sums)
            seen = every.gather(1, slots[..., None].expand(-1, -1, self.values))
        new = time if real is None else real.sum(1, keepdim=True)
        done = (inside + new) // self.chunk  # (batch, 1): chunks that are complete now
        complete = torch.arange(each.shape[1], device=z.device) < done
        sums = sums + (each * complete[..., None, None]).sum(1)
        kept = done * self.chunk + torch.arange(self.chunk, device=z.device)  # (batch, C)
        filled = kept < inside + new
        current = joint[rows, kept] * filled[..., None]
        return seen, ((count + new).to(count.dtype), current, sums)

    def step(self, joint: Tensor, inside: Tensor, count: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """`mix` of one new token per row: only its own scores; Σ K_linᵀ V of the chunk, if it is complete."""
        z, v = joint[:, : self.chunk].split([self.keys, self.values], -1)
        local = torch.arange(self.chunk, device=z.device)[None]
        positions = count - inside + local
        newest = z.gather(1, inside[..., None].long().expand(-1, -1, self.keys))
        q, lin_q = (self.rotate(self.scaled(newest, number), count) for number in (0, 2))
        k, lin_k = (self.rotate(self.scaled(z, number), positions) for number in (1, 3))
        mask = (local <= inside)[:, None, None]  # (batch, 1, 1, C)
        n = self.length or (inside + 1)[:, None, None]
        weights = self.weights((q @ k.mT)[:, None], mask, n, inside, local)[:, 0]
        far = lin_q @ (sums / (self.length or (count - inside).clamp(min=1)[..., None])).to(lin_q.dtype)
        return weights @ v + far, (lin_k.mT @ v).to(sums.dtype)[:, None]

    def begin(self, batch: int, like: Tensor) -> Carry:
        count = torch.zeros(batch, 1, dtype=torch.int32, device=like.device)
        sums = like.new_zeros(batch, self.keys, self.values, dtype=accumulator_dtype(like.dtype))
        return count, like.new_zeros(batch, self.chunk, self.keys + self.values), sums

    def fold(self, carry: Carry, x: Tensor, real: Tensor | None) -> Carry:
        _, v, z = self.project(x)
        return self.run(z, v, carry, real)[1]

    def new_state(self) -> State:
        if not self.past:
            raise ValueError("mixed chunk attention that sees later tokens cannot decode; set sees: past")
        return Recurrent(self.begin, self.fold)
