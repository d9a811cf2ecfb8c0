"""Fusion: an addition whose sum is read by a norm first becomes one operation with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from allyouneed.runtime.program import Add, Call, Op, Program


@dataclass(frozen=True, eq=False)
class AddNorm:
    """total = left + right, output = norm(total). `right` None: nothing is added. `keep`: the total is read again."""

    output: int
    total: int
    left: int
    right: int | None
    norm: Any
    keep: bool

    @property
    def inputs(self) -> tuple[int, ...]:
        return (self.left,) if self.right is None else (self.left, self.right)


FusedOp = Op | AddNorm


def fuse_add_norm(program: Program, is_norm: Callable[[Any], bool]) -> list[FusedOp]:
    """The operations of a program with additions moved into the norms that read their sums first. x + f(norm(x)),
    norm(x + f(x)), norm(α x + f(x)), … : whatever the wiring, each sum is read once."""
    uses, made = program.uses(), {op.output: op for op in program.ops}
    fused: dict[int, AddNorm] = {}  # by the index of the norm
    moved: set[int] = set()  # sums
    for index, op in enumerate(program.ops):
        if not isinstance(op, Call) or not is_norm(op.part):
            continue
        total = made.get(op.input)
        if isinstance(total, Add) and uses[op.input][0] == index:
            keep = len(uses[op.input]) > 1 or op.input == program.output
            fused[index] = AddNorm(op.output, op.input, total.left, total.right, op.part, keep)
            moved.add(op.input)
        else:
            fused[index] = AddNorm(op.output, op.input, op.input, None, op.part, keep=False)
    return [fused.get(index, op) for index, op in enumerate(program.ops) if op.output not in moved]


def summands(ops: list[FusedOp], output: int) -> set[int]:
    """Values whose only reader is an addition that takes them as its right side: they may arrive as partial sums."""
    readers: dict[int, list[FusedOp]] = {}
    for op in ops:
        for number in op.inputs:
            readers.setdefault(number, []).append(op)
    return {
        number
        for number, found in readers.items()
        if len(found) == 1
        and number != output
        and isinstance(found[0], Add | AddNorm)
        and found[0].right == number
        and found[0].left != number
    }
