"""Decode kernels of convolutions: one launch shifts the last tokens and applies the filters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from allyouneed.nn.context import Context
from allyouneed.nn.mixers.convolution import ConvolutionModule
from allyouneed.nn.mixers.lightweight import DynamicModule, LightweightModule, SoftmaxConvolutionModule
from allyouneed.nn.ops.activations import ACTIVATIONS
from allyouneed.runtime.cuda.kernels import Kernel, StepSetup, linear, make_kernel
from allyouneed.runtime.cuda.mixer_kernels import require_kernels
from allyouneed.runtime.program import Unsupported


@make_kernel.register(LightweightModule, DynamicModule)
def _softmax_convolution(part: SoftmaxConvolutionModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    require_kernels(setup)
    if part.size == 1:
        raise Unsupported("a window of one token has no state")

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        from allyouneed.kernels.triton.mixer_steps.window_step import gate_inputs, window_step

        x, is_gated = linear(x, part.inside), part.gated
        if isinstance(part, DynamicModule):
            x, is_gated = gate_inputs(x) if is_gated else x, False
            taps = linear(x, part.filters).unflatten(-1, (part.heads, part.size))
        else:
            assert isinstance(part, LightweightModule)
            taps = part.taps
        features = x.shape[1] // 2 if is_gated else x.shape[1]
        before = state.buffer(x[:, None, :features])
        return linear(window_step(x, before, taps, is_gated, True), part.out, partial=partial)

    return run


@make_kernel.register(ConvolutionModule)
def _convolution(part: ConvolutionModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    require_kernels(setup)
    if part.size == 1:
        raise Unsupported("a window of one token has no state")

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        from allyouneed.kernels.triton.mixer_steps.window_step import gather_window, window_step

        before = state.buffer(x[:, None])
        seen = gather_window(x, before) if part.taps is None else window_step(x, before, part.taps)
        if part.activation is ACTIVATIONS["identity"] and not part.gated:
            return linear(seen, part.out, partial=partial)
        if not part.gated:
            return linear(seen, part.out, activation=part.activation)
        values, gates = linear(seen, part.out).chunk(2, -1)
        return values * part.activation(gates)

    return run
