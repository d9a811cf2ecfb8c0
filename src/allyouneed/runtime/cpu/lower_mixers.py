"""Lowering rules of mixers built on attention (LongNet, LSH, MSSA, gated attention units, synthesizers, tensorised
attention) and of those that join two others (LSRA, branches)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allyouneed.kernels.cpu.abi import Activation, Keys, Kind
from allyouneed.nn.mixers.attention.attention import kv_window
from allyouneed.nn.mixers.attention.longnet import LongNetAttention
from allyouneed.nn.mixers.attention.lsh import LSHAttention, rotations
from allyouneed.nn.mixers.attention.synthesizer import DenseSynthesis, RandomSynthesis, SynthesizerModule
from allyouneed.nn.mixers.attention.tensorized import TensorizedModule
from allyouneed.nn.mixers.branches import BranchesModule
from allyouneed.nn.mixers.crate import ISTAModule, MSSAModule
from allyouneed.nn.mixers.gau import GAUModule, MixedChunkModule
from allyouneed.nn.mixers.lsra import LSRAModule
from allyouneed.nn.mixers.metaformer import IdentityModule
from allyouneed.nn.patterns.core import Causal
from allyouneed.nn.positions.relative import RelativeModule
from allyouneed.runtime.cpu.instructions import CacheSlot, Instructions, Register, nested
from allyouneed.runtime.cpu.lower import emit_joined, emit_matmul, emit_product, lower
from allyouneed.runtime.cpu.lower_attention import (
    PLAIN,
    distance_table,
    emit_heads,
    emit_rotation,
    emit_self_attention,
    pattern_arguments,
    score_arguments,
    score_scale,
    window_arguments,
)
from allyouneed.runtime.cpu.lower_recurrent import commit
from allyouneed.runtime.program import StateSlot, Unsupported

MAX_PRODUCT = 1 << 24  # numbers of a table that a synthesizer stores as two factors


def require_state(state: StateSlot | None) -> StateSlot:
    if state is None:
        raise Unsupported("attention of chosen tokens in whole sentences has no native instruction")
    return state


# --- attention to chosen keys -----------------------------------------------------------------------------------------


@lower.register(LongNetAttention)
def _longnet(part: LongNetAttention, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    """A key that several branches reach is seen once in each: one softmax over all."""
    slot = require_state(state)
    branches: list[Any] = [None] * part.heads
    for patterns, heads in part.groups:
        for head in heads:
            branches[head] = [one.right for one in patterns]  # type: ignore[attr-defined]  # causal & segment-dilated
    sizes = [[(one.segment, one.dilation, one.offset % one.dilation) for one in of_head] for of_head in branches]
    segments = torch.tensor(sizes, dtype=torch.int32).transpose(0, 1)  # (branches, heads, 3)
    window = window_arguments(kv_window(part.pattern, part.relative.visible()))
    chosen = {"branches": len(segments), "segments": segments, **window}
    return emit_self_attention(part, x, code, slot, Causal(), **chosen)


@lower.register(LSHAttention)
def _lsh(part: LSHAttention, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    slot, c = require_state(state), part.config
    heads, width = part.heads, part.head_width
    inner, half = heads * width, c.buckets // 2
    both = emit_product([part.qk, part.v], x, code)
    queries, values = both.part(0, inner), both.part(inner, inner)
    keys = code.emit(Kind.NORM, inner, queries, groups=heads, centred=0, eps=1e-6)
    code.emit(Kind.SCALE, inner, keys, into=keys, factor=width**-0.5)
    products = None
    if half:
        directions = rotations(c.seed, (heads, width, c.rounds, half), torch.device("cpu"))
        products = emit_heads(directions.flatten(2).transpose(1, 2).contiguous(), keys, width, code)
    arguments: dict[str, Any] = {"keys": Keys.CACHED, "cache": len(code.caches), **PLAIN}
    arguments |= {"rounds": c.rounds, "buckets": c.buckets, "whole": c.whole, "scale": 1.0}
    arguments |= {"heads": heads, "kv_heads": heads, "head_width": width, "value_width": width}
    code.caches.append(CacheSlot(slot, heads, width, width, rounds=c.rounds))
    joint = emit_joined([queries, keys, values], code)
    return lower(part.out, code.emit(Kind.ATTENTION, inner, joint, products, **arguments), code)


# --- other projections ------------------------------------------------------------------------------------------------


@lower.register(MSSAModule)
def _mssa(part: MSSAModule, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    """Queries, keys and values are the same."""
    z = lower(part.subspaces, x, code)
    heads, width, scale = part.heads, z.width // part.heads, score_scale(part)
    arguments = score_arguments(part, code)
    arguments |= pattern_arguments(part.pattern, part.relative, heads, scale, code, state is not None)
    arguments |= {"heads": heads, "kv_heads": heads, "head_width": width, "value_width": width}
    if state is None:
        arguments["keys"] = Keys.SELF
    else:
        arguments |= {"keys": Keys.CACHED, "cache": len(code.caches)}
        code.caches.append(CacheSlot(state, heads, width, 0, "ring" in arguments))
    seen = code.emit(Kind.ATTENTION, z.width, emit_joined([z] * (3 if state is None else 2), code), **arguments)
    if part.out is None:
        return emit_matmul(part.subspaces.weight.detach().T.contiguous(), None, None, seen, code)  # type: ignore[operator]
    return lower(part.out, seen, code)


@lower.register(ISTAModule)
def _ista(part: ISTAModule, x: Register, code: Instructions, state: StateSlot | None = None) -> Register:
    """One product: x + η (x − x Dᵀ) D = x (1 + η (D − Dᵀ D))."""
    weight = part.dictionary.detach()
    if not weight.is_meta:
        d = weight.double()
        weight = (torch.eye(len(d), dtype=d.dtype) + part.step * (d - d.T @ d)).T.float().contiguous()
    bias = torch.full((len(weight),), -part.step * part.sparsity)
    return emit_matmul(weight, None, bias, x, code, activation=Activation.RELU)


@lower.register(GAUModule)
def _gated_attention_unit(part: GAUModule, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    slot = require_state(state)
    up, values, keys = lower(part.up, x, code), part.values, part.keys
    code.last.linear.activation = Activation.SILU
    u, v, z = up.part(0, values), up.part(values, values), up.part(2 * values, keys)
    both = code.register(2 * keys + values)  # query, key, value
    pair = both.part(0, keys), both.part(keys, keys)
    for gains, offsets, target in zip(part.gains.detach(), part.offsets.detach(), pair, strict=True):
        code.emit(Kind.SCALE, keys, z, into=target, factors=gains, added=offsets)
    if part.rotary is not None:
        emit_rotation(part.rotary, [(one, 1) for one in pair], keys, code)
    code.emit(Kind.COPY, values, v, into=both.part(2 * keys, values))
    bias = RelativeModule() if part.bias is None else part.bias
    arguments = PLAIN | pattern_arguments(part.pattern, bias, 1, 1.0, code, True)
    arguments |= {"heads": 1, "kv_heads": 1, "head_width": keys, "value_width": values}
    arguments |= {"squared": 1, "scale": 0.0 if part.length is None else 1 / part.length}
    arguments |= {"keys": Keys.CACHED, "cache": len(code.caches)}
    code.caches.append(CacheSlot(slot, 1, keys, values, "ring" in arguments))
    seen = code.emit(Kind.ATTENTION, values, both, **arguments)
    return lower(part.out, code.emit(Kind.GATE, values, u, seen, activation=Activation.IDENTITY), code)


@lower.register(MixedChunkModule)
def _mixed_chunk(part: MixedChunkModule, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    memory = code.memory(require_state(state), x.width)
    up, values, keys = lower(part.up, x, code), part.values, part.keys
    code.last.linear.activation = Activation.SILU
    u, z = up.part(0, values), up.part(2 * values, keys)
    gains, offsets = part.gains.detach(), part.offsets.detach()
    queries = code.register(2 * keys)
    near, far = queries.part(0, keys), queries.part(keys, keys)
    for number, target in ((0, near), (2, far)):
        code.emit(Kind.SCALE, keys, z, into=target, factors=gains[number], added=offsets[number])
    sizes: dict[str, Any] = {"memory": memory, "size": part.chunk, "keys": keys, "values": values, "table": -1}
    sizes |= {"scale": 0.0 if part.length is None else 1 / part.length, "bias": -1}
    if part.rotary is not None:
        sizes |= {"table": len(code.tables), "planes": part.rotary.width // 2}
        sizes["interleaved"] = part.rotary.config.order == "interleaved"
        emit_rotation(part.rotary, [(queries, 2)], keys, code)
    if (bias := part.bias) is not None:
        sizes["bias"] = len(code.tables)
        code.tables.append(lambda count: distance_table(None, bias, 1, 1.0, part.chunk))
    new = up.part(values, values + keys)
    seen = code.emit(Kind.CHUNK_ATTENTION, values, near, new, gains=gains[1], offsets=offsets[1], **sizes)
    seen = code.emit(Kind.CHUNK_SUMS, values, far, seen, gains=gains[3], offsets=offsets[3], **sizes)
    commit(x, memory, code)
    return lower(part.out, code.emit(Kind.GATE, values, u, seen, activation=Activation.IDENTITY), code)


# --- scores of positions ----------------------------------------------------------------------------------------------


@lower.register(SynthesizerModule)
def _synthesizer(part: SynthesizerModule, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    """A dense one multiplies a query with a vector of each position, a random one has a bias of each two. The features
    that are multiplied with keys, if any, follow those of the first kind."""
    scores: Any = part.scores
    synthesis, mixture, length = scores.synthesis, scores.mixture, part.length
    heads, width = part.heads, part.head_width
    shares = [1.0, 0.0] if mixture is None else [0.5, 0.5] if mixture.is_meta else mixture.float().softmax(0).tolist()

    def share_of(table: Tensor) -> Tensor:
        table = table.detach().float()
        return table if table.is_meta or mixture is None else table * shares[0]

    arguments: dict[str, Any] = {"length": length, "scale": shares[1] * width**-0.5}
    factorised = isinstance(synthesis, DenseSynthesis) and len(synthesis.maps) > 1
    if factorised:
        arguments |= {"factors": synthesis.outputs[0], "columns": synthesis.outputs[1]}
    elif isinstance(synthesis, DenseSynthesis):
        arguments |= {"ahead": width, "placed": share_of(synthesis.maps[0]).transpose(1, 2).contiguous()}
        if len(synthesis.shifts):
            arguments |= {"place_bias": share_of(synthesis.shifts[0]), "place_head": length}
    else:
        assert isinstance(synthesis, RandomSynthesis)
        if synthesis.factorised and heads * length**2 > MAX_PRODUCT:
            raise Unsupported("factorised scores of this many positions have no native instruction")
        table = synthesis.left @ synthesis.right.mT if synthesis.factorised else synthesis.table
        arguments |= {"place_bias": share_of(table), "place_head": length**2, "place_query": length}
    dense, dot = part.hidden is not None, mixture is not None
    both = emit_product([one for one in (part.hidden, part.q, part.k, part.v) if one is not None], x, code)
    inner = heads * width
    if dense:
        code.emit(Kind.ACTIVATE, inner, both.part(0, inner), into=both.part(0, inner), activation=Activation.RELU)
    products = None
    if factorised:  # of each head, instead of the features that they are computed from
        products = emit_factors(synthesis, both.part(0, inner), shares[0], code)
        both, dense = both.part(inner, both.width - inner), False
    if dense and dot:  # both kinds of features of each head, side by side
        starts = [at + head * width for head in range(heads) for at in (0, inner)]
        both = emit_joined([*(both.part(at, width) for at in starts), both.part(2 * inner, 2 * inner)], code)
    decoding = state is not None
    arguments |= PLAIN | pattern_arguments(part.pattern, part.relative, heads, 1.0, code, decoding)
    arguments |= {"heads": heads, "kv_heads": heads, "head_width": (dense + dot) * width, "value_width": width}
    if state is None:
        arguments["keys"] = Keys.SELF
    else:
        arguments |= {"keys": Keys.CACHED, "cache": len(code.caches)}
        code.caches.append(CacheSlot(state, heads, dot * width, width, "ring" in arguments))
    code.limit_positions(length)
    return lower(part.out, code.emit(Kind.ATTENTION, inner, both, products, **arguments), code)


def emit_factors(synthesis: DenseSynthesis, hidden: Register, share: float, code: Instructions) -> Register:
    """Both factors of each head's scores, side by side; the first ones are multiplied by `share`."""
    heads, width, size = len(synthesis.maps[0]), synthesis.maps[0].shape[1], sum(synthesis.outputs)
    found, at = code.register(heads * size), 0
    for number, (table, outputs) in enumerate(zip(synthesis.maps, synthesis.outputs, strict=True)):
        factor = 1.0 if number else share
        shift = synthesis.shifts[number].detach().float().flatten() * factor if len(synthesis.shifts) else None
        weight = (table.detach().float() * factor).transpose(1, 2).contiguous()  # (heads, outputs, head_width)
        into = found.part(at, found.width - at)
        emit_heads(weight, hidden, width, code, into=into, output_step=size, bias=shift)
        at += outputs
    return found


@lower.register(TensorizedModule)
def _tensorized(part: TensorizedModule, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    slot, both, rank = require_state(state), lower(part.qkv, x, code), part.rank
    query, cores = both.part(0, rank), part.cores.detach()
    core = cores[0] if cores.is_meta else cores.float().mean(0)
    code.emit(Kind.SCALE, rank, query, into=query, factors=core)
    arguments = PLAIN | pattern_arguments(part.pattern, RelativeModule(), 1, 1.0, code, True)
    arguments.pop("ring", None)  # its cache has all keys, and a window sees the recent ones
    arguments |= {"heads": 1, "kv_heads": 1, "head_width": rank, "value_width": rank, "scale": 1.0}
    arguments |= {"keys": Keys.CACHED, "cache": len(code.caches), "pairs": 1, "length": part.length}
    code.caches.append(CacheSlot(slot, 1, rank, rank))
    code.limit_positions(part.length)
    return lower(part.out, code.emit(Kind.ATTENTION, part.length**2, both, **arguments), code)


@lower.register(IdentityModule)
def _identity(part: IdentityModule, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    return code.emit(Kind.COPY, x.width, x)


# --- two mixers side by side ------------------------------------------------------------------------------------------


@lower.register(LSRAModule)
def _lsra(part: LSRAModule, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    far, near = part.widths
    left = lower(part.far, x.part(0, far), code, nested(state, "far"))
    return emit_joined([left, lower(part.near, x.part(far, near), code, nested(state, "near"))], code)


@lower.register(BranchesModule)
def _branches(part: BranchesModule, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    names = [name for name in ("left", "right") if name in part.pieces]
    found = emit_join(part.join, [lower(part.pieces[name], x, code, nested(state, name)) for name in names], code)
    if part.norm is not None:
        found = lower(part.norm, found, code)
    if "then" in part.pieces:
        found = lower(part.pieces["then"], found, code, nested(state, "then"))
    missing = part.width - found.width
    if missing:
        zeros = code.emit(Kind.SCALE, missing, x.part(0, missing), factor=0.0)
        found = emit_joined([found, zeros], code)
    return found


def emit_join(how: str, parts: list[Register], code: Instructions) -> Register:
    """The narrower one is padded, so that features which it lacks stay as they are."""
    if how == "concat":
        return emit_joined(parts, code)
    widest, *others = sorted(parts, key=lambda part: -part.width)
    wide = code.emit(Kind.COPY, widest.width, widest)
    for other in others:
        into = wide.part(0, other.width)
        if how == "sum":
            code.emit(Kind.ADD, other.width, into, other, into=into)
        else:
            code.emit(Kind.GATE, other.width, into, other, into=into, activation=Activation.IDENTITY)
    return wide
