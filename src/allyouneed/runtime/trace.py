"""Tracing: a stack's own forward, run on values, writes its program. There is no second forward of a stack."""

from __future__ import annotations

from typing import Any

import torch

from allyouneed.nn.context import Context
from allyouneed.nn.models.stack import Stack
from allyouneed.runtime.process import run_eagerly
from allyouneed.runtime.program import Program, StateSlot, Unsupported, Value


class TraceContext(Context):
    """Records the calls of parts. It knows nothing of a batch: parts may need one, wirings may not."""

    def __init__(self, program: Program) -> None:
        nothing: Any = None
        super().__init__(queries=nothing)
        self.program = program

    def call(self, part: Any, x: Any, state: Any = None) -> Any:
        """What takes one value is recorded; what closes a stream of several values is a formula of its own."""
        return self.program.call(part, x, state) if isinstance(x, Value) else part(x, context=self)


def trace(stack: Stack, width: int, states: bool, dtype: torch.dtype = torch.float32) -> Program:
    """The program of a stack of this width, in eval mode; `states`: every sub-layer is called with its state."""
    program = Program()
    x: Any = program.input(width, dtype)
    layers: list[dict[str, Any]] = [
        {name: StateSlot(number, name) for name in block.sublayers} if states else {}  # type: ignore[union-attr]
        for number, block in enumerate(stack.blocks)
    ]
    with torch.no_grad(), run_eagerly():
        result: Any = stack(x, TraceContext(program), layers)
    if not isinstance(result, Value):
        raise Unsupported("the stack ends in more than one stream")
    program.output = result.number
    return program


def require_traced_model(model: Any, *others: type) -> None:
    """Raises `Unsupported` where a model does not decode token by token, or a step of it is not its embedding, decoder
    stack and head (`ModelModule.steps_by_stack`); `others`: models with another step that the caller knows."""
    config = getattr(model, "config", None)
    head: Any = getattr(config, "head", None)
    if not getattr(head, "causal", True):
        raise Unsupported(f"{head.kind} does not decode token by token")
    if "steps_by_stack" in vars(type(model)) or type(model) in others:
        return
    if not getattr(config, "generates", False):
        raise Unsupported(f"{getattr(config, 'kind', type(model).__name__)} models do not decode")
    raise Unsupported(f"{getattr(config, 'kind', '')} models have no traced decode step")


def part_paths(model: Any) -> dict[int, str]:
    """Where each module stands, by id, as a reader of the config would say it."""
    return {id(module): name.replace(".sublayers.", ".") for name, module in model.named_modules()}
