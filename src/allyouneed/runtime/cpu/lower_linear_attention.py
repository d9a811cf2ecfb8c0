"""Lowering rules of linear attention, whose state is a sum of outer products: one new token of every row."""

from __future__ import annotations

from typing import Any

from allyouneed.kernels.cpu.abi import Features, Format, Keys, Kind
from allyouneed.nn.mixers.attention.infini import InfiniModule, kept_tokens
from allyouneed.nn.mixers.performer import PerformerModule
from allyouneed.nn.positions.rotary import RotaryModule
from allyouneed.runtime.cpu.instructions import Instructions, Register
from allyouneed.runtime.cpu.lower import lower
from allyouneed.runtime.cpu.lower_attention import PLAIN, emit_rotation
from allyouneed.runtime.cpu.lower_recurrent import commit, require_state
from allyouneed.runtime.program import StateSlot


@lower.register(PerformerModule)
def _performer(part: PerformerModule, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    memory = code.memory(require_state(state), x.width)
    heads, width, inner, count = part.heads, part.head_width, part.inner, len(part.bits)
    both = lower(part.qkv, x, code)
    features = part.features.detach()
    features = features.t() if features.is_meta else features.t() * width**-0.25  # (head_width, m)
    sizes: dict[str, Any] = {"inputs": width, "outputs": count, "groups": 2 * heads, "format": Format.FLOAT32}
    sizes |= {"input_step": width, "output_step": count, "shared": 1, "weight": features}
    products = code.emit(Kind.LINEAR, count, both, into=code.register(2 * heads * count), **sizes)  # ω·q, ω·k
    kind = Features.RECTIFIED if part.kernel == "relu" else Features.EXPONENTIAL
    sizes = {"heads": heads, "keys": count, "values": width, "width": width, "scale": width**-0.5 / 2}
    mixed = code.emit(Kind.ASSOCIATE, inner, products, both, memory=memory, features=kind, update=1, **sizes)
    commit(x, memory, code)
    return lower(part.out, mixed, code)


@lower.register(InfiniModule)
def _infini(part: InfiniModule, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    """The memory is updated between two passes, once in a segment (bindings.py)."""
    memory = code.memory(require_state(state), x.width)
    heads, width, segment = part.heads, part.head_width, part.segment
    inner = heads * width
    both = lower(part.qkv, x, code)
    new = both.part(inner, 2 * inner)
    code.emit(Kind.REMEMBER, inner, new, into=new, memory=memory, heads=heads, size=kept_tokens(segment) + 1)
    far = code.emit(Kind.COPY, inner, both)  # without positions
    if isinstance(part.rotary, RotaryModule):
        parts = [(both.part(0, inner), heads), (both.part(inner, inner), heads)]
        emit_rotation(part.rotary, parts, width, code, segment=segment)
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": heads, "head_width": width, "value_width": width}
    sizes |= {"keys": Keys.SEGMENT, "cache": memory, "segment": segment, **PLAIN}
    near = code.emit(Kind.ATTENTION, inner, both, scale=width**-0.5, **sizes)
    sizes = {"heads": heads, "keys": width, "values": width, "features": Features.ELU}
    sizes["first"] = segment if part.first == "local" else 0
    far = code.emit(Kind.ASSOCIATE, inner, far, near, memory=memory, **sizes)
    gate = part.gate.detach().float().sigmoid().repeat_interleave(width)
    return lower(part.out, code.emit(Kind.LERP, inner, far, near, factors=gate), code)
