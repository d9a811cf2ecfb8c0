"""Lowering rules of attention: scores, relative positions, patterns, and the latents of MLA."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.kernels.cpu.abi import CONSTANTS, Keys, Kind
from allyouneed.nn.mixers.attention.attention import CrossAttention, SelfAttention, SoftmaxAttention, kv_window
from allyouneed.nn.mixers.attention.scores import AdditiveModule, GeneralModule, LocationModule, ScoresModule
from allyouneed.nn.patterns.core import And, Causal, Full, KVWindow, Not, Or, Pattern, TokenFields, Window
from allyouneed.nn.patterns.sparse import Dilated, Self, Strided
from allyouneed.nn.positions.alibi import AlibiModule
from allyouneed.nn.positions.relative import RelativeModule
from allyouneed.nn.positions.rotary import RotaryModule
from allyouneed.nn.positions.shaw import ShawModule
from allyouneed.nn.positions.t5_bias import BucketsModule
from allyouneed.nn.positions.transformer_xl import TransformerXLModule
from allyouneed.nn.states.window import MAX_TRIM
from allyouneed.runtime.cpu.instructions import CacheSlot, Instructions, Register
from allyouneed.runtime.cpu.lower import emit_joined, emit_norm, emit_product, lower, weight_format
from allyouneed.runtime.program import StateSlot, Unsupported

BIASES = (AlibiModule, BucketsModule, TransformerXLModule)  # that depend on head and distance; of the last one, a part


# --- scores -----------------------------------------------------------------------------------------------------------


PLAIN: dict[str, Any] = {"bias": -1, "mask": -1, "vectors": -1}  # ATTENTION without the tables that these number


def score_scale(part: SoftmaxAttention) -> float:
    return part.scores.scale * part.relative.score_scale


def score_arguments(part: SoftmaxAttention, code: Instructions) -> dict[str, Any]:
    """What ATTENTION adds to q·k · scale, apart from the pattern. Queries and keys are rotated before."""
    relative = part.relative
    if type(part.scores) not in (ScoresModule, GeneralModule, AdditiveModule, LocationModule):
        raise Unsupported(f"{type(part.scores).__name__} has no native instruction")
    if type(relative) not in (RelativeModule, RotaryModule, ShawModule, *BIASES):
        raise Unsupported(f"{type(relative).__name__} has no native instruction")
    found: dict[str, Any] = {"scale": score_scale(part), "cap": part.soft_cap or 0.0, "vectors": -1}
    if isinstance(part.scores, AdditiveModule):
        found |= {"scale": 1.0, "additive": part.scores.weight.detach().float()}
    if isinstance(part.scores, LocationModule):  # a vector of each position, which is multiplied with the query
        if type(relative) is not RelativeModule:
            raise Unsupported("location scores with relative positions have no native instruction")
        placed = part.scores.weight.detach().float().transpose(1, 2).contiguous()  # (heads, length, head_width)
        found |= {"placed": placed, "length": placed.shape[1], "ahead": placed.shape[2]}
    if isinstance(relative, ShawModule):
        if relative.adds_key_bias or relative.distance > CONSTANTS["MAX_DISTANCE"]:
            raise Unsupported("relative vectors of keys, or of large distances, have no native instruction")
        values = relative.values_table
        found |= {"distance": relative.distance, "relative_keys": relative.keys_table.weight.float()}
        found |= {} if values is None else {"relative_values": values.weight.float()}
    if isinstance(relative, TransformerXLModule):
        found["vectors"] = len(code.tables)
        code.tables.append(partial(distance_vectors, relative))
    return found


def distance_vectors(relative: TransformerXLModule, count: int) -> Tensor:
    """W_R R of Transformer-XL: (heads, count, head_width) by query position − key position."""
    away = torch.arange(count).clamp(max=count if relative.clamp is None else relative.clamp)
    every, far = relative.sinusoids(away).float(), relative.far
    found = every @ far.weight.detach().float().T if type(far) is nn.Linear else far(every).float()
    return found.unflatten(-1, (len(relative.biases.content), -1)).transpose(0, 1).contiguous()


def window_arguments(kept: KVWindow | None) -> dict[str, Any]:
    """Arguments of an instruction whose cache keeps some keys only."""
    if kept is None:
        return {}
    if not kept.recent:
        raise Unsupported("attention to the first tokens only has no native instruction")
    return {"first": kept.first, "recent": kept.recent, "ring": kept.recent + MAX_TRIM}


def pattern_arguments(
    pattern: Pattern, relative: RelativeModule, heads: int, scale: float, code: Instructions, decoding: bool
) -> dict[str, Any]:
    """Which keys a query sees, and what is added to their scores by distance: pattern and bias in one table."""
    found: dict[str, Any] = {"bias": -1, "mask": -1}
    if decoding and pattern.reach[1] > 0:
        raise Unsupported(f"attention with pattern '{pattern}' has no native instruction")
    if decoding:
        found |= window_arguments(kv_window(pattern, relative.visible()))
    by_distance = depends_on_distance(pattern)
    if not by_distance:
        if not decoding:
            raise Unsupported(f"attention with pattern '{pattern}' has no native instruction")
        found["mask"] = code.masks.index(pattern) if pattern in code.masks else len(code.masks)
        code.masks += [pattern] if found["mask"] == len(code.masks) else []
    # while decoding, `first` and `recent` say all of a window
    seen = type(pattern) is Full or (decoding and (type(pattern) is Causal or is_window(pattern)))
    if type(relative) in BIASES or (by_distance and not seen):
        found["bias"] = len(code.tables)
        code.tables.append(partial(distance_table, pattern if by_distance else None, relative, heads, scale))
    return found


def depends_on_distance(pattern: Pattern) -> bool:
    """Whether a pattern depends on the distance of query and key only."""
    if isinstance(pattern, And | Or):
        return depends_on_distance(pattern.left) and depends_on_distance(pattern.right)
    if isinstance(pattern, Not):
        return depends_on_distance(pattern.inner)
    return type(pattern) in (Causal, Full, Window, Self, Strided, Dilated)


def is_window(pattern: Pattern) -> bool:
    """`causal & window(n)`"""
    return type(pattern) is And and {type(pattern.left), type(pattern.right)} == {Causal, Window}


def distance_table(pattern: Pattern | None, relative: RelativeModule, heads: int, scale: float, count: int) -> Tensor:
    """(heads, 2 · count − 1) by key position − query position, from 1 − count on; −∞ where the pattern forbids it."""
    ahead = torch.arange(1 - count, count)
    query, key = (-ahead).clamp(min=0)[None], ahead.clamp(min=0)[None]  # pairs at each distance, position 0 in each
    table = torch.zeros(heads, 2 * count - 1)
    if isinstance(relative, TransformerXLModule):  # (v − u) · W_R R of earlier keys; the rest are `distance_vectors`
        extra = (relative.biases.place - relative.biases.content).detach().float()  # (heads, 1, head_width)
        table[:, :count] = (distance_vectors(relative, count) @ extra.mT)[..., 0].flip(1) * scale
    elif type(relative) in BIASES:
        like = torch.empty(0, dtype=torch.float32)
        pairs = relative.bias(like, query.T, key.T, 1.0)  # (distances, heads, 1, 1)
        table += pairs.float().reshape(2 * count - 1, heads).T
    if pattern is not None and type(pattern) is not Full:
        one = torch.ones((), dtype=torch.long)
        allowed = pattern.allowed(TokenFields(query[0], one), TokenFields(key[0], one))
        table = table.masked_fill(~allowed, -torch.inf)
    return table.contiguous()


def emit_positions(part: Any, both: Register, code: Instructions) -> None:
    """Norms, general scores and rotations of the queries and keys that stand in a register, in place."""
    queries, keys = both.part(0, part.inner), both.part(part.inner, part.kv_width)
    if part.q_norm is not None:
        emit_norm(part.q_norm, queries, code, part.heads, into=queries)
        emit_norm(part.k_norm, keys, code, part.kv_heads, into=keys)
    if type(part.scores) is GeneralModule:
        weight = part.scores.weight.detach().transpose(1, 2).contiguous()  # q @ W
        emit_heads(weight, queries, part.head_width, code, into=queries)
    if isinstance(part.relative, TransformerXLModule):  # q + u
        vectors = part.relative.biases.content.detach().flatten()
        code.emit(Kind.SCALE, part.inner, queries, into=queries, factor=1.0, added=vectors)
    if type(part.relative) is RotaryModule:
        emit_rotation(part.relative, [(queries, part.heads), (keys, part.kv_heads)], part.head_width, code)


def emit_rotation(
    rotary: RotaryModule,
    parts: list[tuple[Register, int]],
    head_width: int,
    code: Instructions,
    scale: float = 1.0,
    segment: int | None = None,
) -> None:
    """Rotate heads of queries, then of keys, which are also multiplied by `scale`, in place. `segment`: positions are
    counted from the start of segments of this length."""
    if rotary.config.values:
        raise Unsupported("rotary positions of values have no native instruction")
    interleaved = rotary.config.order == "interleaved"

    def table(which: int, factor: float, count: int) -> Tensor:
        positions = torch.arange(count)[None]
        positions = positions if segment is None else positions % segment
        found = rotary.tables(positions, torch.float32)[which]  # (2, 1, 1, positions, planes)
        return (found[:, 0, 0].transpose(0, 1) * factor).contiguous()

    for which, (x, heads) in enumerate(parts):
        sizes: dict[str, Any] = {"heads": heads, "head_width": head_width, "planes": rotary.width // 2}
        code.emit(Kind.ROTATE, x.width, x, into=x, table=len(code.tables), interleaved=interleaved, **sizes)
        code.tables.append(partial(table, which, scale if which else 1.0))


def emit_heads(
    weight: Tensor,
    x: Register,
    step: int,
    code: Instructions,
    into: Register | None = None,
    output_step: int | None = None,
    bias: Tensor | None = None,
) -> Register:
    """A linear map of each head: weight (heads, outputs, inputs), bias (heads · outputs). The inputs of a head stand
    `step` features after those of the one before."""
    heads, outputs, inputs = weight.shape
    after = outputs if output_step is None else output_step
    sizes: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "format": weight_format(weight, None)}
    sizes |= {"groups": heads, "bias": bias}
    source = x
    if into is not None and into.number == x.number:  # a product does not work in place
        source = code.emit(Kind.COPY, x.width, x)
    out = code.register(heads * outputs) if into is None else into
    return code.emit(Kind.LINEAR, outputs, source, into=out, weight=weight, input_step=step, output_step=after, **sizes)


# --- attention --------------------------------------------------------------------------------------------------------


@lower.register(SelfAttention)
def _self_attention(part: SelfAttention, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    """Each token sees those before it in the cache; without a state, those of the pass."""
    if state is None and type(part.relative) is TransformerXLModule:
        raise Unsupported("Transformer-XL positions of later tokens have no native instruction")
    return emit_self_attention(part, x, code, state, part.pattern)


def emit_self_attention(
    part: SelfAttention, x: Register, code: Instructions, state: StateSlot | None, pattern: Pattern, **chosen: Any
) -> Register:
    """`chosen`: arguments that say which keys are seen, besides the pattern."""
    if part.caches_hidden:
        raise Unsupported("a cache of hidden states has no native instruction")
    arguments = score_arguments(part, code)
    both = emit_product([part.qkv] if part.qkv is not None else [part.q, part.k, part.v], x, code)
    emit_positions(part, both, code)
    scale, decoding = score_scale(part), state is not None
    arguments |= pattern_arguments(pattern, part.relative, part.heads, scale, code, decoding) | chosen
    if isinstance(part.scores, LocationModule):  # keys are not read
        code.limit_positions(part.scores.position_limit)
        both = emit_joined([both.part(0, part.inner), both.part(part.inner + part.kv_width, part.kv_width)], code)
    if state is None:
        return emit_attention(part, both, code, keys=Keys.SELF, **arguments)
    arguments |= {"keys": Keys.CACHED, "cache": len(code.caches)}
    window = "ring" in arguments
    code.caches.append(CacheSlot(state, part.kv_heads, part.head_width, part.head_width, window))
    return emit_attention(part, both, code, **arguments)


def emit_attention(part: SelfAttention | CrossAttention, x: Register, code: Instructions, **arguments: Any) -> Register:
    sizes: dict[str, Any] = {"heads": part.heads, "kv_heads": part.kv_heads, "head_width": part.head_width}
    seen = code.emit(Kind.ATTENTION, part.inner, x, value_width=part.head_width, **sizes, **arguments)
    return lower(part.out, seen if part.sub_norm is None else lower(part.sub_norm, seen, code), code)


@lower.register(CrossAttention)
def _cross_attention(part: CrossAttention, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    arguments = score_arguments(part, code)
    if type(part.relative) is not RelativeModule or type(part.pattern) is not Full:
        raise Unsupported("cross-attention with positions or a pattern has no native instruction")
    if state is None:
        raise Unsupported("cross-attention without a state has no native instruction")
    q = lower(part.q, x, code)
    if part.q_norm is not None:
        emit_norm(part.q_norm, q, code, part.heads, into=q)
    if type(part.scores) is GeneralModule:
        emit_heads(part.scores.weight.detach().transpose(1, 2).contiguous(), q, part.head_width, code, into=q)
    if isinstance(part.scores, LocationModule):
        code.limit_sources(part.scores.position_limit)
    code.caches.append(CacheSlot(state, part.kv_heads, part.head_width, part.head_width))
    return emit_attention(part, q, code, keys=Keys.SOURCE, cache=len(code.caches) - 1, **(PLAIN | arguments))


def lower_source(part: CrossAttention, hidden: Register, code: Instructions) -> Register:
    """Keys and values that a cross-attention makes of a source, side by side."""
    both = emit_product([part.kv] if part.kv is not None else [part.k, part.v], hidden, code)
    if part.k_norm is not None:
        keys = both.part(0, part.kv_width)
        emit_norm(part.k_norm, keys, code, part.kv_heads, into=keys)
    return both
