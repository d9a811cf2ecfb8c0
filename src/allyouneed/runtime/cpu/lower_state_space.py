"""Lowering rules of state spaces: one new token of every row."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from allyouneed.kernels.cpu.abi import Activation, Kind
from allyouneed.nn.mixers.state_space.convolution import ShortConvolution
from allyouneed.nn.mixers.state_space.mamba import MambaModule
from allyouneed.nn.mixers.state_space.mamba2 import Mamba2Module
from allyouneed.nn.mixers.state_space.s4 import S4Module
from allyouneed.runtime.cpu.instructions import Instructions, Register
from allyouneed.runtime.cpu.lower import emit_matmul, lower
from allyouneed.runtime.cpu.lower_recurrent import commit, require_state
from allyouneed.runtime.program import StateSlot


def emit_short_convolution(
    part: ShortConvolution, x: Register, memory: int, code: Instructions, into: Register | None = None
) -> Register:
    """The last inputs are the first part of the carry."""
    taps = part.taps.detach().float().t().contiguous()
    arguments: dict[str, Any] = {"size": part.size, "weight": taps, "bias": part.shift, "activation": Activation.SILU}
    return code.emit(Kind.SLIDE, x.width, x, into=into, memory=memory, part=0, **arguments)


@lower.register(MambaModule)
def _mamba(part: MambaModule, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    hidden, rank = part.hidden, part.rank
    memory = code.memory(require_state(state), x.width)
    both = lower(part.up, x, code)  # x, z
    inputs = code.register(2 * hidden)  # x, Δ before its softplus
    seen = emit_short_convolution(part.convolution, both.part(0, hidden), memory, code, into=inputs.part(0, hidden))
    selected = lower(part.select, seen, code)  # Δ of fewer features, B, C
    steps = inputs.part(hidden, hidden)
    emit_matmul(part.step_map.detach(), None, part.step_bias, selected.part(0, rank), code, into=steps)
    decay = negative_exp(part.a_log).t().contiguous()  # (N, hidden)
    chosen = selected.part(rank, 2 * part.states)
    arguments: dict[str, Any] = {"part": 1, "states": part.states, "decay": decay, "skip": part.skip}
    y = code.emit(Kind.SCAN, hidden, inputs, chosen, memory=memory, **arguments)
    commit(x, memory, code)
    gates = both.part(hidden, hidden)
    return lower(part.out, code.emit(Kind.GATE, hidden, gates, y, activation=Activation.SILU), code)


@lower.register(Mamba2Module)
def _mamba2(part: Mamba2Module, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    """Retention with the keys B, the queries C and the values Δ x."""
    hidden, heads, keys = part.hidden, part.heads, part.groups * part.states
    memory = code.memory(require_state(state), x.width)
    both = lower(part.up, x, code)  # z; x, B, C; Δ
    gates, steps = both.part(0, hidden), both.part(2 * hidden + 2 * keys, heads)
    mixed = emit_short_convolution(part.convolution, both.part(hidden, hidden + 2 * keys), memory, code)
    factors = code.register(2 * heads)  # logarithms of the decays, Δ
    log, dt = factors.part(0, heads), factors.part(heads, heads)
    code.emit(Kind.SCALE, heads, steps, into=dt, factor=1.0, added=part.step_bias)
    code.emit(Kind.ACTIVATE, heads, dt, into=dt, activation=Activation.SOFTPLUS)
    code.emit(Kind.SCALE, heads, dt, into=log, factors=negative_exp(part.a_log))
    sizes: dict[str, Any] = {"heads": heads, "groups": part.groups, "keys": part.states, "values": part.head_width}
    sizes |= {"query_at": hidden + keys, "key_at": hidden, "part": 1, "sums": -1, "weighted": 1, "skip": part.skip}
    y = code.emit(Kind.RETAIN, hidden, mixed, factors, memory=memory, **sizes)
    commit(x, memory, code)
    gated = code.emit(Kind.GATE, hidden, gates, y, activation=Activation.SILU)
    return lower(part.out, lower(part.norm, gated, code), code)


def negative_exp(logarithms: Tensor) -> Tensor:
    return -logarithms.detach().float().exp()


# --- S4 ---------------------------------------------------------------------------------------------------------------


@lower.register(S4Module)
def _s4(part: S4Module, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    width = part.width
    memory = code.memory(require_state(state), x.width)
    sizes: dict[str, Any] = {"part": 0, "pairs": part.states // 2, "low_rank": part.p is not None}
    y = code.emit(Kind.STATE_SPACE, width, x, memory=memory, weight=part.step_weights(), skip=part.skip, **sizes)
    commit(x, memory, code)
    code.emit(Kind.ACTIVATE, width, y, into=y, activation=Activation.GELU)
    both = lower(part.out, y, code)  # values, gates
    values, gates = both.part(0, width), both.part(width, width)
    return code.emit(Kind.GATE, width, gates, values, activation=Activation.SIGMOID)
