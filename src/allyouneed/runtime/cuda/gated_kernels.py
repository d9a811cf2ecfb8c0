"""Decode kernels of gated attention units, quadratic and in mixed chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from allyouneed.nn.context import Context
from allyouneed.nn.mixers.gau import GAUModule, MixedChunkModule
from allyouneed.nn.positions.t5_bias import BucketsModule
from allyouneed.runtime.cuda.kernels import (
    Kernel,
    StepSetup,
    add_rotation,
    check_rotary,
    linear,
    make_kernel,
    row_rotation,
    sees_all,
)
from allyouneed.runtime.cuda.mixer_kernels import require_kernels
from allyouneed.runtime.cuda.static_cache import StaticKVCache
from allyouneed.runtime.program import Unsupported


def gated_parts(part: GAUModule | MixedChunkModule, setup: StepSetup, distances: int) -> Any:
    """What the kernels make queries and keys from, for keys less than `distances` tokens away; rotations cover every
    position."""
    from allyouneed.kernels.triton.mixer_steps.gated import GatedParts

    turns = numbers = biases = None
    if part.rotary is not None:
        check_rotary(part.rotary, part.keys)
        add_rotation(part.rotary, setup)
        turns = setup.rotations[part.rotary.key]
    if isinstance(part.bias, BucketsModule):
        steps = torch.arange(distances, device=setup.states.device)
        numbers = part.bias.numbers(steps[None], torch.zeros_like(steps[None, :1])).flatten().int()
        biases = part.bias.table.weight
    return GatedParts(part.gains, part.offsets, turns, numbers, biases, part.length or 0)


def counters(part: GAUModule | MixedChunkModule, setup: StepSetup) -> Tensor:
    """Zeros for each row and block of values."""
    return torch.zeros(setup.states.rows * part.values, dtype=torch.int32, device=setup.states.device)


@make_kernel.register(GAUModule)
def _gau(part: GAUModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    require_kernels(setup)
    states, rotary = setup.states, part.rotary
    if not sees_all(part.pattern, states.capacity) or not isinstance(state, StaticKVCache):
        raise Unsupported("the kernel of gated attention units attends to all keys")
    gated, arrived = gated_parts(part, setup, states.capacity), counters(part, setup)
    like = [torch.empty(1, 1, 1, n, dtype=states.dtype, device=states.device) for n in (part.keys, part.values)]
    keys, values = state.tokens.allocate(like)

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        from allyouneed.kernels.triton.mixer_steps.gated import gau_step

        turns = None if rotary is None else row_rotation(rotary, setup, positions, context)
        uvz, (table, size) = linear(x, part.up, activation=silu), states.table[:2]
        mixed = gau_step(uvz, gated._replace(turns=turns), keys, values, table, positions, size, arrived)
        return linear(mixed, part.out, partial=partial)

    return run


@make_kernel.register(MixedChunkModule)
def _mixed_chunk(part: MixedChunkModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    """What a chunk leaves behind is added to the sums once, at its end."""
    require_kernels(setup)
    gated, arrived = gated_parts(part, setup, part.chunk), counters(part, setup)

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        from allyouneed.kernels.triton.mixer_steps.gated import chunk_scores, mixed_chunk_step

        count, current, sums = state.carry(len(x), x[:, None])
        u, v, z = linear(x, part.up, activation=silu).split(part.parts, -1)
        scores = chunk_scores(z, gated, count, current)
        mixed = mixed_chunk_step(u, v, scores, gated.length, count, current, sums, arrived)
        return linear(mixed, part.out, partial=partial)

    return run
