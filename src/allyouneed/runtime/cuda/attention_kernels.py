"""Decode kernels of other kinds of attention: LongNet, LSH, the synthesizer, tensorised attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.nn.context import Context
from allyouneed.nn.mixers.attention.longnet import LongNetAttention
from allyouneed.nn.mixers.attention.lsh import LSHAttention, rotations
from allyouneed.nn.mixers.attention.synthesizer import DenseSynthesis, SynthesizedScores, SynthesizerModule
from allyouneed.nn.mixers.attention.tensorized import TensorizedModule
from allyouneed.nn.ops.attention.decode import DilatedBranches, decode_attention
from allyouneed.nn.patterns.core import And
from allyouneed.nn.patterns.sparse import SegmentDilated
from allyouneed.runtime.cuda.kernels import Kernel, StepSetup, attention_kernel, linear, make_kernel, sees_all, total
from allyouneed.runtime.cuda.mixer_kernels import joint, require_kernels
from allyouneed.runtime.cuda.static_cache import StaticKVCache
from allyouneed.runtime.program import Unsupported


@make_kernel.register(LongNetAttention)
def _longnet(part: LongNetAttention, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    if not part.score_mod().plain:
        raise Unsupported("the kernel of dilated segments computes softmax(q·k)")
    return attention_kernel(part, setup, state, partial, branches=dilated_branches(part, setup))


def dilated_branches(part: LongNetAttention, setup: StepSetup) -> DilatedBranches:
    sizes = torch.empty(part.heads, len(part.groups[0][0]), 3, dtype=torch.int32)
    most = 1
    for branches, heads in part.groups:
        for number, branch in enumerate(branches):
            one = branch.right if isinstance(branch, And) else branch
            assert isinstance(one, SegmentDilated)
            sizes[heads, number] = torch.tensor([one.segment, one.dilation, one.offset % one.dilation]).int()
            most = max(most, -(-min(one.segment, setup.states.capacity) // one.dilation))
    return DilatedBranches(sizes.to(setup.states.device), most)


@make_kernel.register(SynthesizerModule)
def _synthesizer(part: SynthesizerModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    """Dense scores are a product of the token with the weights of every position; there are no keys."""
    states, scores = setup.states, part.scores
    assert isinstance(scores, SynthesizedScores)
    synthesis = scores.synthesis
    if not isinstance(synthesis, DenseSynthesis) or len(synthesis.outputs) > 1 or part.q is not None:
        raise Unsupported("only dense synthesized scores have a fused kernel")
    if not sees_all(part.pattern, states.capacity) or not isinstance(state, StaticKVCache) or part.head_width % 2:
        raise Unsupported("the attention kernel computes softmax(q·k + bias) over all keys")
    table, shifts = synthesis.maps[0], synthesis.shifts
    none = torch.zeros(states.rows, part.heads, part.head_width, dtype=states.dtype, device=states.device)

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        v = linear(x, part.v).unflatten(-1, (part.heads, -1))  # (rows, heads, head_width)
        (_, values) = state.tokens.allocate((v[:, :, None, :0], v[:, :, None]))
        hidden = linear(x, part.hidden, activation=torch.nn.functional.relu).unflatten(-1, (part.heads, -1))
        hidden = hidden.transpose(0, 1)  # (heads, rows, head_width)
        found = torch.baddbmm(shifts[0], hidden, table) if len(shifts) else torch.bmm(hidden, table)
        bias = found.transpose(0, 1)  # (rows, heads, length)
        new, counters = (v, v), states.counters
        seen = decode_attention(none, values, values, positions, 1.0, states.table, new, None, counters, bias)
        return linear(seen.flatten(1), part.out, partial=partial)

    return run


@make_kernel.register(LSHAttention)
def _lsh(part: LSHAttention, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    require_kernels(setup)
    from allyouneed.kernels.triton.mixer_steps.lsh import direction_count

    states, config = setup.states, part.config
    shape = (part.heads, part.head_width, config.rounds, config.buckets // 2)
    if direction_count(*shape[1:]) > 1 << 15:
        raise Unsupported("the kernel holds the hash directions of a head at once")
    directions = rotations(config.seed, shape, states.device)
    heads = torch.empty(1, part.heads, 1, part.head_width, dtype=states.dtype, device=states.device)
    hashed = torch.empty(1, part.heads, 1, config.rounds, dtype=torch.int32, device=states.device)
    keys, values, buckets = state.stored.allocate((heads, heads, hashed))

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        from allyouneed.kernels.triton.mixer_steps.lsh import lsh_attention

        q, v = joint(x, [part.qk, part.v])  # (rows, heads · head_width)
        table, size = states.table[:2]
        mixed = lsh_attention(
            q, v, directions, keys, values, buckets, table, positions, size, config.whole, states.counters
        )
        return linear(mixed, part.out, partial=partial)

    return run


@make_kernel.register(TensorizedModule)
def _tensorized(part: TensorizedModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    require_kernels(setup)
    states, out = setup.states, part.out
    if (
        not sees_all(part.pattern, states.capacity)
        or not isinstance(state, StaticKVCache)
        or type(out) is not nn.Linear
    ):
        raise Unsupported("the kernel combines all tokens so far, and reads the weights of their pairs")
    one = torch.empty(1, 1, 1, part.rank, dtype=states.dtype, device=states.device)
    keys, values = state.tokens.allocate((one, one))

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        from allyouneed.kernels.triton.mixer_steps.tensorized import pair_linear, pairs

        table, size = states.table[:2]
        found = pairs(linear(x, part.qkv), part.cores, keys, values, table, positions, size, part.length)
        sums = pair_linear(found, out.weight, positions, part.length)
        return sums if partial else total(sums).to(x.dtype)

    return run
