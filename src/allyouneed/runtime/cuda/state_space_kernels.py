"""Decode kernels of state spaces: the convolution of Mamba and Mamba-2 and each recurrence as one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allyouneed.nn.context import Context
from allyouneed.nn.linear.dense import is_dense
from allyouneed.nn.mixers.state_space.mamba import MambaModule
from allyouneed.nn.mixers.state_space.mamba2 import Mamba2Module
from allyouneed.nn.mixers.state_space.s4 import S4Module
from allyouneed.runtime.cuda.derived import derive
from allyouneed.runtime.cuda.kernels import NORMS, Kernel, StepSetup, add_norm, is_narrow, linear, make_kernel
from allyouneed.runtime.cuda.mixer_kernels import product, require_kernels
from allyouneed.runtime.program import Unsupported


@make_kernel.register(MambaModule)
def _mamba(part: MambaModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    require_kernels(setup)
    convolution = part.convolution

    def run(u: Tensor, positions: Tensor, context: Context) -> Tensor:
        from allyouneed.kernels.triton.mixer_steps.state_space_step import convolution_step, mamba_step

        before, h = state.carry(len(u), u[:, None])
        x, z = linear(u, part.up).chunk(2, -1)
        x = convolution_step(x, before, convolution.taps, convolution.shift)
        steps, b, c = linear(x, part.select).split([part.rank, part.states, part.states], -1)
        steps = product(steps, part.step_map, None)
        y = mamba_step(x, steps, part.step_bias, part.a_log, b, c, part.skip, z, h)
        return linear(y, part.out, partial=partial)

    return run


@make_kernel.register(Mamba2Module)
def _mamba2(part: Mamba2Module, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    require_kernels(setup)
    if part.states > 1 << 10:
        raise Unsupported("the kernel holds all states of a feature, and of the recent tokens, at once")
    convolution, sizes = part.convolution, [part.hidden, *[part.groups * part.states] * 2]

    def run(u: Tensor, positions: Tensor, context: Context) -> Tensor:
        from allyouneed.kernels.triton.mixer_steps.state_space_step import convolution_step, mamba2_step

        (before, h), recent = state.buffers(len(u), u[:, None])
        z, mixed, steps = linear(u, part.up).split(part.parts, -1)
        x, b, c = convolution_step(mixed, before, convolution.taps, convolution.shift).split(sizes, -1)
        y = mamba2_step(x, b, c, steps, part.step_bias, part.a_log, part.skip, z, h, recent, positions)
        fused = type(part.norm) in NORMS
        y = add_norm(y, None, part.norm, context)[1] if fused else part.norm(y[:, None], context)[:, 0]
        return linear(y, part.out, partial=partial)

    return run


@make_kernel.register(S4Module)
def _s4(part: S4Module, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    """The state space is not discretised in every step."""
    require_kernels(setup)
    weights, out = derive(setup.states, part.step_weights, torch.float32), part.out

    def run(u: Tensor, positions: Tensor, context: Context) -> Tensor:
        from allyouneed.kernels.triton.mixer_steps.state_space_step import s4_step
        from allyouneed.kernels.triton.mixer_steps.window_step import gate_inputs
        from allyouneed.kernels.triton.small_batch_linear import linear as small_batch

        y = s4_step(u, weights, part.skip, *state.carry(len(u), u[:, None]))
        if is_dense(out) and is_narrow(y, out.weight):
            return small_batch(y, out.weight, out.bias, "glu", True)
        return gate_inputs(linear(y, out))

    return run
