"""One token of every row over states of a fixed shape: the program of the decoder stack with fused kernels. Nothing in
it waits for the host, so that it can be captured in a CUDA graph (infer/cuda_graph/runner.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.models.decoder_decoder import DecoderDecoderModel
from allyouneed.nn.models.stack import Stack
from allyouneed.runtime.cuda.kernels import (
    NORMS,
    Kernel,
    StepSetup,
    add_norm,
    embed_kernel,
    head_kernel,
    kernel,
    move_constants,
    shared_cache,
    total,
)
from allyouneed.runtime.cuda.static_cache import StaticStates
from allyouneed.runtime.eager import apply, find_states
from allyouneed.runtime.fuse import AddNorm, FusedOp, fuse_add_norm, summands
from allyouneed.runtime.program import Add, Call, Op
from allyouneed.runtime.trace import trace

Values = dict[int, Tensor]  # (rows, width), or partial sums (parts, rows, width) where only an addition reads them
Step = Callable[[Values, Tensor, Context], None]  # values, positions (rows,), context


class Stage(NamedTuple):
    """The operations of one stack, its output, and what follows it."""

    steps: list[Step]
    output: int
    after: Callable[[Tensor, Tensor, Context], None] | None = None


class DecodeStep:
    """Captured by `GraphRunner`; on a CPU it runs the same operations with torch."""

    def __init__(self, model: Any, states: StaticStates) -> None:
        self.model, self.states = model, states
        move_constants(model, states.device)
        self.setup = StepSetup(states)
        self.stages = self.make_stages(model)
        self.head = head_kernel(model.head)
        self.embed = embed_kernel(model.embed, self.setup)

    def make_stages(self, model: Any) -> list[Stage]:
        """The stacks that the stream runs through; between two of them, their shared cache."""
        layers: list[Any] = self.states.layers
        if not isinstance(model, DecoderDecoderModel):
            return [self.make_stage(model.decoder, layers)]
        count = len(model.first.blocks)
        self.setup.shared = layers[count]["keys"]
        first, second = self.make_stage(model.first, layers[:count]), self.make_stage(model.second, layers[count + 1 :])
        return [first._replace(after=shared_cache(model, self.setup)), second]

    def make_stage(self, stack: Stack, layers: list[Any]) -> Stage:
        program = trace(stack, stack.width, states=True, dtype=self.states.dtype)
        ops = fuse_add_norm(program, lambda part: type(part) in NORMS)
        partial_sums = summands(ops, program.output)
        return Stage([self.prepare(op, layers, op.output in partial_sums) for op in ops], program.output)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Token ids (rows,) to the scores (rows, vocab) of the next token."""
        states = self.states
        x, positions = self.embed(tokens)
        layout = TokenLayout(positions[:, None])
        context = Context(layout, states.static_layout, states.memory, x[:, None], static=True)
        for stage in self.stages:
            values = {0: x}
            for step in stage.steps:
                step(values, positions, context)
            x = values[stage.output]
            if stage.after is not None:
                stage.after(x, positions, context)
        return self.head(x, positions, context)

    def prepare(self, op: FusedOp, layers: list[Any], partial_sum: bool) -> Step:
        """`partial_sum`: the output may be one."""
        if isinstance(op, AddNorm):
            return partial(_add_norm, op)
        if isinstance(op, Add):
            return partial(_add, op)
        if isinstance(op, Call):
            state = find_states(op.state, layers)
            return call_step(op, kernel(op.part, self.setup, state, partial_sum))
        return partial(_apply, op)


def _add_norm(op: AddNorm, values: Values, positions: Tensor, context: Context) -> None:
    more = None if op.right is None else values[op.right]
    sums, values[op.output] = add_norm(values[op.left], more, op.norm, context, op.keep or op.right is None)
    if op.keep:
        values[op.total] = sums


def _add(op: Add, values: Values, positions: Tensor, context: Context) -> None:
    left, right = values[op.left], values[op.right]
    values[op.output] = left + (right if right.dim() == 2 else total(right).to(left.dtype))


def call_step(op: Call, run: Kernel) -> Step:
    return partial(_call, op, run)


def _call(op: Call, run: Kernel, values: Values, positions: Tensor, context: Context) -> None:
    values[op.output] = run(values[op.input], positions, context)


def _apply(op: Op, values: Values, positions: Tensor, context: Context) -> None:
    """Apply an operation as torch does, on tensors (rows, 1, width)."""
    values[op.output] = apply(op, [values[number][:, None] for number in op.inputs], context)[:, 0]
