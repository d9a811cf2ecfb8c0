"""Decode kernels of mixers other than attention: one launch projects a token, one runs the mixer over its
state in place, one projects the result. On a CPU, or in a form that they do not cover, the parts themselves run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from allyouneed.kernels import usable
from allyouneed.nn.context import Context
from allyouneed.nn.mixers.attention.infini import MIN_WEIGHT, InfiniModule
from allyouneed.nn.mixers.attention.mla import LatentAttentionModule
from allyouneed.nn.mixers.attention.scores import ScoresModule
from allyouneed.nn.mixers.crate import MSSAModule
from allyouneed.nn.mixers.performer import MIN_WEIGHT as LEAST
from allyouneed.nn.mixers.performer import RELU_FLOOR, PerformerModule
from allyouneed.nn.mixers.retention import GatedRetentionModule, MultiScaleRetentionModule, RetentionModule
from allyouneed.nn.mixers.rnn import RNNModule
from allyouneed.nn.mixers.rwkv import RWKVChannelModule, RWKVModule, token_shift
from allyouneed.nn.norms import RMSNormModule
from allyouneed.nn.ops.attention.decode import decode_attention
from allyouneed.nn.positions.relative import RelativeModule
from allyouneed.nn.positions.rotary import RotaryModule
from allyouneed.runtime.cuda.kernels import (
    Kernel,
    StepSetup,
    add_rotation,
    check_rotary,
    is_narrow,
    linear,
    make_kernel,
    row_rotation,
    sees_all,
)
from allyouneed.runtime.program import Unsupported


def joint(
    x: Tensor,
    maps: Sequence[Any],
    activations: Sequence[str] = (),
    before: Tensor | None = None,
    mixes: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Several linear maps of x (rows, width), each of x mixed with `before` if there are `mixes` (kernels/triton/
    joint_linear.py); `activations` as there."""
    same = len({one.bias is None for one in maps if type(one) is nn.Linear}) == 1
    if same and all(type(one) is nn.Linear and is_narrow(x, one.weight) for one in maps):
        from allyouneed.kernels.triton.joint_linear import joint_linear

        return joint_linear(x, [m.weight for m in maps], [m.bias for m in maps], activations, before, mixes)
    found = []
    for number, one in enumerate(maps):
        y = linear(x if before is None else token_shift(x, before, mixes[number]), one)
        name = activations[number] if activations else ""
        found.append({"sigmoid": torch.sigmoid, "relu-squared": lambda y: y.relu().square()}.get(name, _same)(y))
    return found


def _same(x: Tensor) -> Tensor:
    return x


def require_kernels(setup: StepSetup) -> None:
    if setup.states.device.type != "meta" and not usable(setup.states.row_ids.to(setup.states.dtype)):
        raise Unsupported("there are no kernels for this device and precision")


def head_norm(norm: Any) -> Any:
    if type(norm) is not RMSNormModule:
        raise Unsupported(f"{type(norm).__name__} has no fused kernel")
    from allyouneed.kernels.triton.recurrent_step import HeadNorm

    return HeadNorm(norm.weight, norm.eps, float(norm.offset))


# --- retention --------------------------------------------------------------------------------------------------------


@make_kernel.register(MultiScaleRetentionModule, GatedRetentionModule)
def _retention(part: RetentionModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    require_kernels(setup)
    norm, rotary, heads = head_norm(part.norm), part.rotary, part.heads
    assert isinstance(rotary, RotaryModule)
    if rotary.width != part.keys:
        raise Unsupported("the retention kernel rotates whole heads")
    add_rotation(rotary, setup)
    maps = [part.q, part.k, part.v, part.gate]
    temperature: float | None = None
    logs = floors = torch.empty(0, device=setup.states.device)
    if isinstance(part, GatedRetentionModule):
        temperature = part.temperature
    else:
        log = part.decay(setup.positions.double())[0, :, 0]  # (heads,)
        logs = log.float()
        steps = setup.positions[0, :, None].double() + 1
        floors = (torch.expm1(steps * log) / torch.expm1(log)).sqrt().float()  # (positions, heads)

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        from allyouneed.kernels.triton.recurrent_step import retention_step

        q, k, v, gate = joint(x, maps)
        s, z = state.carry(len(x), q.unflatten(-1, (heads, -1))[:, :, None])
        decay, floor = logs, None
        if isinstance(part, GatedRetentionModule):
            decay = linear(x, part.decays)
        else:
            floor = context.memoize(StepSetup, ("floor", heads), lambda: embedding(positions, floors))
        rotation = row_rotation(rotary, setup, positions, context)
        mixed = retention_step(q, k, v, gate, decay, temperature, floor, rotation, s, z, norm, part.keys**-0.5)
        return linear(mixed, part.out, partial=partial)

    return run


# --- RWKV -------------------------------------------------------------------------------------------------------------


@make_kernel.register(RWKVModule)
def _rwkv(part: RWKVModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    require_kernels(setup)
    maps, mixes = [part.r, part.k, part.v], [part.mix_r, part.mix_k, part.mix_v]

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        from allyouneed.kernels.triton.recurrent_step import wkv_step

        before, m, a, b = state.carry(len(x), x[:, None])
        r, k, v = joint(x, maps, ("sigmoid", "", ""), before, mixes)
        mixed = wkv_step(x, before, r, k, v, part.decay, part.bonus, m, a, b)
        return linear(mixed, part.out, partial=partial)

    return run


@make_kernel.register(RWKVChannelModule)
def _rwkv_channel(part: RWKVChannelModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    require_kernels(setup)

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        from allyouneed.kernels.triton.recurrent_step import gate_shift

        before = state.buffer(x[:, None])[:, 0]
        hidden, gate = joint(x, [part.up, part.r], ("relu-squared", "sigmoid"), before, [part.mix_k, part.mix_r])
        return gate_shift(x, before, gate, linear(hidden, part.down))

    return run


# --- feature sums and compressive memory ------------------------------------------------------------------------------


@make_kernel.register(PerformerModule)
def _performer(part: PerformerModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    require_kernels(setup)
    if part.eps or len(part.bits) * part.head_width > 1 << 15:
        raise Unsupported("the performer kernel holds all features of a head at once")

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        from allyouneed.kernels.triton.mixer_steps.feature_sums import performer_step

        (sums, tops), recent = state.buffers(len(x), x[:, None])
        floor = RELU_FLOOR if part.kernel == "relu" else None
        given = (sums, tops, recent, positions, floor, LEAST, setup.states.counters)
        mixed = performer_step(linear(x, part.qkv), part.features, *given)
        return linear(mixed, part.out, partial=partial)

    return run


@make_kernel.register(InfiniModule)
def _infini(part: InfiniModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    """Attention to the keys of the segment, then the memory and the gate between both."""
    require_kernels(setup)
    rotary, states, segment = part.rotary, setup.states, part.segment
    if part.head_width > 128 or part.head_width % 2:
        raise Unsupported("the memory kernel holds the memory of a head at once")
    if isinstance(rotary, RotaryModule):
        check_rotary(rotary, part.head_width)
        add_rotation(rotary, setup)

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        from allyouneed.kernels.triton.memory_step import infini_step

        qkv = linear(x, part.qkv)
        q, k, v = (y.unflatten(-1, (-1, part.head_width)) for y in qkv.chunk(3, -1))
        memory, following, keys, values = state.buffers(k[:, :, None])
        places = context.memoize(StepSetup, ("place", segment), lambda: positions % segment)
        rotation = None
        if isinstance(rotary, RotaryModule):
            key = ("rotation", rotary.key, segment)
            rotation = context.memoize(StepSetup, key, lambda: embedding(places, setup.rotations[rotary.key]))
        scale, table = part.head_width**-0.5, states.own_rows
        near = decode_attention(q, keys, values, places, scale, table, (k, v), rotation, states.counters)
        mixed = infini_step(
            qkv, near, places, positions, part.gate, memory, following, segment, part.update == "delta",
            part.first == "local", MIN_WEIGHT,
        )  # fmt: skip
        return linear(mixed, part.out, partial=partial)

    return run


# --- LSTM and GRU -----------------------------------------------------------------------------------------------------


@make_kernel.register(RNNModule)
def _rnn(part: RNNModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    """Two linear maps and the gates: cuDNN would copy all weights in every step to have them side by side."""
    require_kernels(setup)
    rnn = part.float_rnn

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        from allyouneed.kernels.triton.recurrent_step import rnn_gates

        carry = state.carry(len(x), x[:, None])
        bias = (rnn.bias_ih_l0, rnn.bias_hh_l0) if rnn.bias else (None, None)
        seen = product(x, rnn.weight_ih_l0, bias[0])  # type: ignore[arg-type]
        kept = product(carry[0], rnn.weight_hh_l0, bias[1])  # type: ignore[arg-type]
        return rnn_gates(seen, kept, carry[0], carry[1] if len(carry) > 1 else None)

    return run


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not is_narrow(x, weight):
        return nn.functional.linear(x, weight, bias)
    from allyouneed.kernels.triton.small_batch_linear import linear as small_batch

    return small_batch(x, weight, bias)


# --- subspace attention -----------------------------------------------------------------------------------------------


@make_kernel.register(MSSAModule)
def _mssa(part: MSSAModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    """Attention whose keys are its values: one cache is both."""
    states, subspaces = setup.states, part.subspaces
    if not isinstance(subspaces, nn.Linear):
        raise Unsupported("subspaces in a packed format have no fused kernel")
    width = subspaces.out_features // part.heads
    if not part.score_mod().plain or not sees_all(part.pattern, states.capacity) or width % 2:
        raise Unsupported("the attention kernel computes softmax(q·k) over all keys")

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        z = linear(x, subspaces).unflatten(-1, (part.heads, -1))  # (rows, heads, head_width)
        (cache, _) = state.tokens.allocate((z[:, :, None], z[:, :, None, :0]))
        scale = part.score_mod().scale
        seen = decode_attention(z, cache, cache, positions, scale, states.table, (z, z), None, states.counters)
        if part.out is not None:
            return linear(seen.flatten(1), part.out, partial=partial)
        return seen.flatten(1) @ subspaces.weight

    return run


# --- latent attention -------------------------------------------------------------------------------------------------


@make_kernel.register(LatentAttentionModule)
def _latent_attention(part: LatentAttentionModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    """Always absorbed: a step reads each token's latent once."""
    require_kernels(setup)
    config, relative, states = part.config, part.relative, setup.states
    if not part.score_mod().plain or not sees_all(part.pattern, states.capacity):
        raise Unsupported("the attention kernel computes softmax(q·k) over all keys")
    up_key, up_value = part.k, part.v
    if type(up_key) is not nn.Linear or type(up_value) is not nn.Linear or config.rope_width % 2:
        raise Unsupported("only plain linear maps can be absorbed")
    if isinstance(relative, RotaryModule):
        rotary = relative.config
        if relative.width != config.rope_width or rotary.xpos is not None or rotary.values:
            raise Unsupported("the attention kernel rotates whole heads")
        add_rotation(relative, setup)
    elif type(relative) is not RelativeModule:
        raise Unsupported(f"{type(relative).__name__} has no fused kernel")
    norm = None if part.latent_norm is None else head_norm(part.latent_norm)
    counters = torch.zeros(states.rows * -(-config.heads // 16), dtype=torch.int32, device=states.device)

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        from allyouneed.kernels.triton.mixer_steps.head_linear import head_linear
        from allyouneed.kernels.triton.mixer_steps.latent_attention import latent_attention

        if part.q_latent is None:
            q, new = joint(x, [part.q, part.latent])
        else:
            h, new = joint(x, [part.q_latent, part.latent])
            h = h if part.q_norm is None else part.q_norm(h[:, None], context)[:, 0]
            q = linear(h, part.q)
        q = q.unflatten(-1, (config.heads, -1))  # (rows, heads, nope + rope)
        if type(part.scores).prepare is not ScoresModule.prepare:
            q = part.scores.prepare(q[:, :, None])[:, :, 0]
        nope, rope = q.split(part.widths, -1)
        to_key = up_key.weight.unflatten(0, (config.heads, -1))  # (heads, nope, kv_rank)
        to_value = up_value.weight.unflatten(0, (config.heads, -1))  # (heads, value, kv_rank)
        (cache, _) = state.tokens.allocate((new[:, None, None], new[:, None, None, :0]))
        rotation = row_rotation(relative, setup, positions, context) if isinstance(relative, RotaryModule) else None
        interleaved = isinstance(relative, RotaryModule) and relative.config.order == "interleaved"
        table, scale = states.table, part.score_mod().scale
        projected = head_linear(nope, to_key).transpose(0, 1)  # (heads, rows, kv_rank)
        seen = latent_attention(
            projected, rope, new, cache, table.blocks, positions, scale, table.size, rotation, interleaved, norm,
            counters,
        )  # fmt: skip
        values = head_linear(seen.transpose(0, 1), to_value.mT)  # (rows, heads, value)
        return linear(values.flatten(1), part.out, partial=partial)

    return run
