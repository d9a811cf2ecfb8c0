"""Programs run by calling their parts in torch: the definition every other executor is tested against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from allyouneed.nn.context import Context
from allyouneed.runtime.program import Add, Call, Function, Op, Program, Scale, StateSlot, substitute


def run(program: Program, x: Tensor, context: Context, layers: Sequence[dict[str, Any]] | None = None) -> Tensor:
    values: dict[int, Tensor] = {0: x}
    for op in program.ops:
        values[op.output] = apply(op, [values[number] for number in op.inputs], context, layers)
    return values[program.output]


def apply(op: Op, inputs: Sequence[Tensor], context: Context, layers: Sequence[dict[str, Any]] | None = None) -> Tensor:
    """One operation on tensors (batch, time, width)."""
    match op:
        case Call(part=part, state=state):
            return context.call(part, inputs[0], find_states(state, layers))
        case Add():
            return inputs[0] + inputs[1]
        case Scale(factor=factor):
            return inputs[0] * factor
        case Function(function=function):
            given = iter(inputs)
            args, kwargs = substitute((op.args, op.kwargs), lambda value: next(given))
            return function(*args, **kwargs)


def find_states(slots: Any, layers: Sequence[dict[str, Any]] | None) -> Any:
    """The states that stand in these slots."""
    if isinstance(slots, StateSlot):
        return None if layers is None else layers[slots.layer].get(slots.name)
    if isinstance(slots, list):
        return [find_states(entry, layers) for entry in slots]
    if isinstance(slots, dict):
        found = {name: find_states(entry, layers) for name, entry in slots.items()}
        return {name: state for name, state in found.items() if state is not None}
    return slots
