"""One token of every row over states of a fixed shape: the program of the decoder stack with fused kernels. Nothing in
it waits for the host, so that it can be captured in a CUDA graph (infer/cuda_graph/runner.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from allyouneed.nn.context import Context, TokenLayout
from allyouneed.runtime.cuda.kernels import (
    NORMS,
    StepSetup,
    add_norm,
    embed_kernel,
    kernel,
    move_constants,
    rotation_key,
    total,
)
from allyouneed.runtime.cuda.static_cache import StaticStates
from allyouneed.runtime.eager import apply, find_states
from allyouneed.runtime.fuse import AddNorm, FusedOp, fuse_add_norm, summands
from allyouneed.runtime.program import Add, Call, Op
from allyouneed.runtime.trace import trace

Values = dict[int, Tensor]  # (rows, width), or partial sums (parts, rows, width) where only an addition reads them
Step = Callable[[Values, Tensor, Context], None]  # values, positions (rows,), context


class DecodeStep:
    """Captured by `GraphRunner`; on a CPU it runs the same operations with torch."""

    def __init__(self, model: Any, states: StaticStates) -> None:
        self.model, self.states = model, states
        for module in model.modules():
            if move_constants.get(module) is not None:
                move_constants(module, states.device)
        self.setup = StepSetup(states)
        program = trace(model.decoder, model.config.width, states=True, dtype=next(model.decoder.parameters()).dtype)
        ops = fuse_add_norm(program, lambda part: type(part) in NORMS)
        partial_sums = summands(ops, program.output)
        self.steps: list[Step] = [self.prepare(op, op.output in partial_sums) for op in ops]
        self.output = program.output
        self.head = kernel(model.head, self.setup, None, partial=False)
        self.embed = embed_kernel(model.embed, self.setup)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Token ids (rows,) to the scores (rows, vocab) of the next token."""
        states = self.states
        x, positions, rotation = self.embed(tokens)
        context = Context(TokenLayout(positions[:, None]), states.static_layout, states.memory, x[:, None])
        if rotation is not None:
            context.memo[rotation_key(next(iter(self.setup.rotations)))] = rotation
        values = {0: x}
        for step in self.steps:
            step(values, positions, context)
        return self.head(values[self.output], positions, context)

    def prepare(self, op: FusedOp, partial_sum: bool) -> Step:
        """`partial_sum`: the output may be one."""
        if isinstance(op, AddNorm):
            return partial(_add_norm, op)
        if isinstance(op, Add):
            return partial(_add, op)
        if isinstance(op, Call):
            state = find_states(op.state, self.states.layers)
            return partial(_call, op, kernel(op.part, self.setup, state, partial_sum))
        return partial(_apply, op)


def _add_norm(op: AddNorm, values: Values, positions: Tensor, context: Context) -> None:
    more = None if op.right is None else values[op.right]
    sums, values[op.output] = add_norm(values[op.left], more, op.norm, context, op.keep or op.right is None)
    if op.keep:
        values[op.total] = sums


def _add(op: Add, values: Values, positions: Tensor, context: Context) -> None:
    left, right = values[op.left], values[op.right]
    values[op.output] = left + (right if right.dim() == 2 else total(right).to(left.dtype))


def _call(op: Call, run: Any, values: Values, positions: Tensor, context: Context) -> None:
    values[op.output] = run(values[op.input], positions, context)


def _apply(op: Op, values: Values, positions: Tensor, context: Context) -> None:
    """As torch has it, on tensors (rows, 1, width)."""
    values[op.output] = apply(op, [values[number][:, None] for number in op.inputs], context)[:, 0]
