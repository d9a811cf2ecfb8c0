"""Lowering rules of mixers with a state of constant size: one new token of every row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.kernels.cpu.abi import Activation, Kind
from allyouneed.nn.linear.int8 import Int8Codes
from allyouneed.nn.mixers.convolution import ConvolutionModule
from allyouneed.nn.mixers.lightweight import DynamicModule, LightweightModule
from allyouneed.nn.mixers.retention import GatedRetentionModule, MultiScaleRetentionModule, RetentionModule
from allyouneed.nn.mixers.rnn import Int8RNN, ResetBeforeModule, RNNModule
from allyouneed.nn.mixers.rwkv import RWKVChannelModule, RWKVModule
from allyouneed.nn.mixers.ssru import SSRUModule
from allyouneed.nn.states.window import MAX_TRIM
from allyouneed.runtime.cpu.instructions import Instructions, Register
from allyouneed.runtime.cpu.lower import activation_number, emit_matmul, emit_norm, emit_product, lower
from allyouneed.runtime.cpu.lower_attention import emit_rotation
from allyouneed.runtime.program import StateSlot, Unsupported


def require_state(state: StateSlot | None) -> StateSlot:
    if state is None:
        raise Unsupported("a recurrence over whole sentences has no native instruction")
    return state


def commit(x: Register, memory: int, code: Instructions) -> None:
    """Store the inputs of the new token, after the carry."""
    code.emit(Kind.COMMIT, x.width, x, into=x, memory=memory)


# --- retention --------------------------------------------------------------------------------------------------------


@lower.register(MultiScaleRetentionModule, GatedRetentionModule)
def _retention(part: RetentionModule, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    slot = require_state(state)
    inner, outer = part.heads * part.keys, part.heads * part.values
    gated = isinstance(part, GatedRetentionModule)
    maps: list[Any] = [part.q, part.k, part.v, *([part.decays] if gated else []), part.gate]
    both = emit_product(maps, x, code)
    queries, keys = both.part(0, inner), both.part(inner, inner)
    scale = part.keys**-0.5
    emit_rotation(part.rotary, [(queries, part.heads), (keys, part.heads)], part.keys, code, scale)  # type: ignore[arg-type]
    stored = both.part(inner, inner + outer + part.heads * gated)
    decays, log = both.part(2 * inner + outer, part.heads), None
    if isinstance(part, GatedRetentionModule):
        code.emit(Kind.ACTIVATE, part.heads, decays, into=decays, activation=Activation.LOG_SIGMOID)
        code.emit(Kind.SCALE, part.heads, decays, into=decays, factor=1 / part.temperature)
    else:
        log = part.decay(torch.empty(0))[0, :, 0]
    memory = code.memory(slot, stored.width)
    sizes: dict[str, Any] = {"heads": part.heads, "groups": part.heads, "keys": part.keys, "values": part.values}
    sizes |= {"key_at": inner, "value_at": 2 * inner, "part": 0, "sums": 1, "normalised": not gated}
    mixed = code.emit(Kind.RETAIN, outer, both, decays if gated else None, memory=memory, decay=log, **sizes)
    commit(stored, memory, code)
    emit_norm(part.norm, mixed, code, part.heads, into=mixed)
    gate = both.part(2 * inner + outer + part.heads * gated, outer)
    return lower(part.out, code.emit(Kind.GATE, outer, gate, mixed, activation=Activation.SILU), code)


# --- RWKV -------------------------------------------------------------------------------------------------------------


def emit_shift(x: Register, before: Register, mix: Tensor, code: Instructions) -> Register:
    return code.emit(Kind.LERP, x.width, x, before, factors=mix.detach())


@lower.register(RWKVModule)
def _rwkv(part: RWKVModule, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    memory = code.memory(require_state(state), x.width)
    before = code.emit(Kind.LOAD, x.width, memory=memory, part=0)
    r, k, v = (
        lower(map_, emit_shift(x, before, mix, code), code)
        for map_, mix in ((part.r, part.mix_r), (part.k, part.mix_k), (part.v, part.mix_v))
    )
    decay = part.decay.detach().float().exp()
    sums = code.emit(Kind.WKV, part.hidden, k, v, memory=memory, weight=decay, bonus=part.bonus.detach())
    code.emit(Kind.STORE, x.width, x, into=x, memory=memory, part=0)
    commit(x, memory, code)
    return lower(part.out, code.emit(Kind.GATE, part.hidden, r, sums, activation=Activation.SIGMOID), code)


@lower.register(RWKVChannelModule)
def _rwkv_channel(part: RWKVChannelModule, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    memory = push(x, require_state(state), 1, code)
    before = code.emit(Kind.RECALL, x.width, memory=memory, part=1)
    hidden = lower(part.up, emit_shift(x, before, part.mix_k, code), code)
    code.last.linear.activation = Activation.RELU_SQUARED
    r = lower(part.r, emit_shift(x, before, part.mix_r, code), code)
    down = lower(part.down, hidden, code)
    return code.emit(Kind.GATE, down.width, r, down, activation=Activation.SIGMOID)


# --- LSTM and GRU -----------------------------------------------------------------------------------------------------


def emit_precise(
    weight: Tensor | Int8Codes, bias: Tensor | None, x: Register, code: Instructions, outputs: slice = slice(None)
) -> Register:
    """A product of float activations; with int8 weights, of activations of 16 bits. `outputs`: some rows of weights."""
    if not isinstance(weight, Int8Codes):
        return emit_matmul(weight.detach()[outputs], None, bias, x, code)
    codes, step = weight.codes[outputs], weight.step[outputs]
    count = len(codes)
    halves, half = code.register(2 * count), None if bias is None else bias / 2
    emit_matmul(codes, step, half, x, code, into=halves, digits=2)
    return code.emit(Kind.ADD, count, halves.part(0, count), halves.part(count, count))


@lower.register(RNNModule)
def _rnn(part: RNNModule, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    rnn: Any = part.rnn
    if part.bidirectional:
        raise Unsupported("a bidirectional RNN has no native instruction")
    memory = code.memory(require_state(state), x.width)
    before = code.emit(Kind.LOAD, part.hidden, memory=memory, part=0)
    of_x, of_h = (getattr(rnn, name) if rnn.bias else None for name in ("bias_ih_l0", "bias_hh_l0"))
    new = emit_precise(rnn.weight_ih_l0, of_x, x, code)
    old = emit_precise(rnn.weight_hh_l0, of_h, before, code)
    if isinstance(rnn, nn.LSTM) or (isinstance(rnn, Int8RNN) and rnn.is_lstm):
        gates = code.emit(Kind.ADD, new.width, new, old)
        found = code.emit(Kind.LSTM, part.hidden, gates, memory=memory)
    else:
        found = code.emit(Kind.GRU, part.hidden, new, old, memory=memory)
    commit(x, memory, code)
    return found


@lower.register(ResetBeforeModule)
def _gru_reset_before(part: ResetBeforeModule, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    """h ← z h + (1 − z) c; the candidate c is computed from r h."""
    if part.bidirectional:
        raise Unsupported("a bidirectional RNN has no native instruction")
    rnn: Any = part.rnn
    hidden = part.hidden
    memory = code.memory(require_state(state), x.width)
    before = code.emit(Kind.LOAD, hidden, memory=memory, part=0)
    bias = rnn.bias_ih_l0.detach().float() + rnn.bias_hh_l0.detach().float() if rnn.bias else None
    seen = emit_precise(rnn.weight_ih_l0, bias, x, code)  # r, z, c
    gates = seen.part(0, 2 * hidden)
    own = emit_precise(rnn.weight_hh_l0, None, before, code, slice(2 * hidden))
    code.emit(Kind.ADD, 2 * hidden, gates, own, into=gates)
    r, z, c = (seen.part(n * hidden, hidden) for n in range(3))
    reset = code.emit(Kind.GATE, hidden, r, before, activation=Activation.SIGMOID)
    code.emit(Kind.ADD, hidden, c, emit_precise(rnn.weight_hh_l0, None, reset, code, slice(2 * hidden, None)), into=c)
    code.emit(Kind.ACTIVATE, hidden, c, into=c, activation=Activation.TANH)
    kept = code.emit(Kind.GATE, hidden, z, before, activation=Activation.SIGMOID)
    code.emit(Kind.SCALE, hidden, z, into=z, factor=-1.0)  # 1 − σ(z) = σ(−z)
    new = code.emit(Kind.GATE, hidden, z, c, activation=Activation.SIGMOID)
    found = code.emit(Kind.ADD, hidden, kept, new)
    code.emit(Kind.STORE, hidden, found, into=found, memory=memory, part=0)
    commit(x, memory, code)
    return found


@lower.register(SSRUModule)
def _ssru(part: SSRUModule, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    """c ← σ(f) c + (1 − σ(f)) v"""
    memory = code.memory(require_state(state), x.width)
    before = code.emit(Kind.LOAD, x.width, memory=memory, part=0)
    both = emit_product([part.value, part.forget], x, code)
    value, forget = both.part(0, x.width), both.part(x.width, x.width)
    cell = code.emit(Kind.GATE, x.width, forget, before, activation=Activation.SIGMOID)
    code.emit(Kind.SCALE, x.width, forget, into=forget, factor=-1.0)  # 1 − σ(f) = σ(−f)
    new = code.emit(Kind.GATE, x.width, forget, value, activation=Activation.SIGMOID)
    code.emit(Kind.ADD, x.width, cell, new, into=cell)
    code.emit(Kind.STORE, x.width, cell, into=cell, memory=memory, part=0)
    commit(x, memory, code)
    return code.emit(Kind.ACTIVATE, x.width, cell, activation=Activation.RELU)


# --- convolutions -----------------------------------------------------------------------------------------------------


def push(x: Register, state: StateSlot, back: int, code: Instructions) -> int:
    """Append a token to the recent ones, `back` of them needed before it; the number of the memory."""
    memory = code.memory(state, x.width)
    code.emit(Kind.PUSH, x.width, x, into=x, memory=memory, size=back + MAX_TRIM)
    return memory


@lower.register(ConvolutionModule)
def _convolution(part: ConvolutionModule, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    if part.size == 1 and part.taps is None:
        seen = x
    else:
        require_past(part)
        memory = push(x, require_state(state), part.size - 1, code)
        if part.taps is not None:
            taps = part.taps.detach().float().t().contiguous()
            seen = code.emit(Kind.CONVOLVE, x.width, memory=memory, size=part.size, weight=taps)
        else:
            seen = code.emit(Kind.UNFOLD, x.width * part.size, memory=memory, size=part.size)
    y: Register = lower(part.out, seen, code)
    activation = activation_number(part.activation)
    if part.gated:
        half = y.width // 2
        return code.emit(Kind.GATE, half, y.part(half, half), y.part(0, half), activation=activation)
    return code.emit(Kind.ACTIVATE, y.width, y, into=y, activation=activation)


def require_past(part: Any) -> None:
    if part.reach[1] or part.size == 1:
        raise Unsupported("a convolution over later tokens, or one token, has no native instruction")


@lower.register(LightweightModule, DynamicModule)
def _softmax_convolution(
    part: LightweightModule | DynamicModule, x: Register, code: Instructions, state: StateSlot | None
) -> Register:
    require_past(part)
    inside = lower(part.inside, x, code)
    if part.gated:  # values, gates
        half = inside.width // 2
        values, gates = inside.part(0, half), inside.part(half, half)
        inside = code.emit(Kind.GATE, half, gates, values, activation=Activation.SIGMOID)
    memory = push(inside, require_state(state), part.size - 1, code)
    if isinstance(part, DynamicModule):
        filters = lower(part.filters, inside, code)
        code.emit(Kind.SOFTMAX, filters.width, filters, into=filters, groups=part.heads)
        seen = code.emit(Kind.CONVOLVE, inside.width, None, filters, memory=memory, size=part.size, heads=part.heads)
    else:
        taps = part.taps.detach().float().softmax(-1).repeat_interleave(inside.width // part.heads, 0)
        seen = code.emit(Kind.CONVOLVE, inside.width, memory=memory, size=part.size, weight=taps.t().contiguous())
    return lower(part.out, seen, code)
