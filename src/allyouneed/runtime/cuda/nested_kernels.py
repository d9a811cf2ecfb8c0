"""Decode kernels of parts that contain others: each of them runs by its own kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allyouneed.nn.context import Context
from allyouneed.nn.mixers.branches import BranchesModule
from allyouneed.nn.mixers.conv_ffn import ConvolutionalFFNModule
from allyouneed.nn.mixers.lsra import LSRAModule
from allyouneed.nn.states.nested import NestedStates
from allyouneed.runtime.cuda.kernels import NORMS, Kernel, StepSetup, add_norm, kernel, make_kernel


def inner_kernel(part: Any, name: str, setup: StepSetup, state: Any, partial: bool = False) -> Kernel:
    """The kernel of the part with this name in the nested states."""
    states: dict[str, Any] = {**state.parts} if isinstance(state, NestedStates) else {}
    return kernel(part, setup, states.get(name), partial)


@make_kernel.register(BranchesModule)
def _branches(part: BranchesModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    """The norm of a sum of two branches also adds them."""
    norm, pieces = part.norm, part.pieces
    adds = part.join == "sum" and "right" in pieces and type(norm) in NORMS
    left = inner_kernel(pieces["left"], "left", setup, state)
    right = inner_kernel(pieces["right"], "right", setup, state, adds) if "right" in pieces else None
    then = inner_kernel(pieces["then"], "then", setup, state) if "then" in pieces else None

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        found = [run_branch(x, positions, context) for run_branch in (left, right) if run_branch is not None]
        if adds and found[0].shape[-1] == found[1].shape[-1]:
            y = add_norm(found[0], found[1], norm, context, keep=False)[1]
        else:
            y = part.joined([y if y.dim() == 2 else y.sum(0).to(x.dtype) for y in found])
            y = y if norm is None else norm(y[:, None], context)[:, 0]
        y = y if then is None else then(y, positions, context)
        missing = part.width - y.shape[-1]
        return torch.nn.functional.pad(y, (0, missing)) if missing else y

    return run


@make_kernel.register(LSRAModule)
def _lsra(part: LSRAModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    far, near = (inner_kernel(getattr(part, name), name, setup, state) for name in ("far", "near"))

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        left, right = x.split(part.widths, -1)
        return torch.cat((far(left, positions, context), near(right, positions, context)), -1)

    return run


@make_kernel.register(ConvolutionalFFNModule)
def _convolutional_ffn(part: ConvolutionalFFNModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    up, down = inner_kernel(part.up, "up", setup, state), inner_kernel(part.down, "down", setup, state, partial)
    return lambda x, positions, context: down(up(x, positions, context), positions, context)
