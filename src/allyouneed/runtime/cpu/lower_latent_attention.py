"""Lowering rule of multi-head latent attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from allyouneed.kernels.cpu.abi import Keys, Kind
from allyouneed.nn.linear.dense import MergedLinear
from allyouneed.nn.linear.int8 import Int8Linear
from allyouneed.nn.mixers.attention.mla import LatentAttentionModule
from allyouneed.nn.mixers.attention.scores import ScoresModule
from allyouneed.nn.positions.rotary import RotaryModule
from allyouneed.runtime.cpu.instructions import CacheSlot, Instructions, Register
from allyouneed.runtime.cpu.lower import emit_norm, lower
from allyouneed.runtime.cpu.lower_attention import (
    emit_heads,
    emit_rotation,
    pattern_arguments,
    score_arguments,
    score_scale,
)
from allyouneed.runtime.program import StateSlot, Unsupported


@lower.register(LatentAttentionModule)
def _latent_attention(
    part: LatentAttentionModule, x: Register, code: Instructions, state: StateSlot | None
) -> Register:
    """The absorbed form: queries are projected into the space of the latents, which are keys and values of one head."""
    c = part.config
    if state is None:
        raise Unsupported("latent attention without a causal state has no native instruction")
    if type(part.scores) is not ScoresModule:
        raise Unsupported(f"{type(part.scores).__name__} has no native instruction")
    heads, rank, nope, rope = c.heads, c.kv_rank, c.nope_width, c.rope_width
    arguments = score_arguments(part, code)
    arguments |= pattern_arguments(part.pattern, part.relative, heads, score_scale(part), code, True)
    h = x if part.q_latent is None else lower(part.q_latent, x, code)
    q = lower(part.q, h if part.q_norm is None else lower(part.q_norm, h, code), code)
    both = code.register(heads * (rank + rope) + rank + rope)  # queries, then the key
    key = both.part(heads * (rank + rope), rank + rope)
    latent = lower(part.latent, x, code)
    code.emit(Kind.COPY, rank + rope, latent, into=key)
    if part.latent_norm is not None:
        emit_norm(part.latent_norm, key.part(0, rank), code, into=key.part(0, rank))
    for head in range(heads):
        source, target = q.part(head * (nope + rope) + nope, rope), both.part(head * (rank + rope) + rank, rope)
        code.emit(Kind.COPY, rope, source, into=target)
    if type(part.relative) is RotaryModule:
        turned = [(both.part(rank, heads * (rank + rope) - rank), heads), (key.part(rank, rope), 1)]
        emit_rotation(part.relative, turned, rank + rope, code)
    to_key = float_weight(part.k).unflatten(0, (heads, -1)).transpose(1, 2).contiguous()  # (heads, rank, nope)
    emit_heads(to_key, q, nope + rope, code, into=both, output_step=rank + rope)
    arguments |= {"keys": Keys.CACHED, "cache": len(code.caches)}
    code.caches.append(CacheSlot(state, 1, rank + rope, 0, "ring" in arguments))
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": 1, "head_width": rank + rope, "value_width": rank}
    seen = code.emit(Kind.ATTENTION, heads * rank, both, **sizes, **arguments)
    to_value = float_weight(part.v).unflatten(0, (heads, -1)).contiguous()  # (heads, value, rank)
    return lower(part.out, emit_heads(to_value, seen, rank, code), code)


def float_weight(part: nn.Module) -> Tensor:
    """The weight of a linear map without bias; of an int8 one, the numbers that its codes stand for."""
    if isinstance(part, Int8Linear):
        return part.weight
    if not isinstance(part, nn.Linear) or type(part) not in (nn.Linear, MergedLinear):
        raise Unsupported(f"{type(part).__name__} cannot be absorbed into queries and values")
    return part.weight.detach()
