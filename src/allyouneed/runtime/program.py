"""A traced forward pass as plain data: what a stack computes, one operation after another.

A `Program` is recorded by running a stack's own forward on `Value`s (trace.py). It knows parts and formulas but no
executor: eager.py runs it by calling the parts, cpu/ lowers it to native instructions, cuda/ to fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

BATCH, TIME = 2, 3  # of the meta tensors by which shapes are inferred; any numbers that differ


class Unsupported(Exception):
    """What an executor cannot do; the message is the reason, without the part's name."""


class StateSlot(NamedTuple):
    """The state of one sub-layer: `states.layers[layer].get(name)`."""

    layer: int
    name: str


@dataclass(frozen=True, eq=False)
class Call:
    """part(x, context, state). `state`: a StateSlot, containers of them, or None."""

    output: int
    input: int
    part: Callable[..., Any]
    state: Any = None

    @property
    def inputs(self) -> tuple[int, ...]:
        return (self.input,)


@dataclass(frozen=True, eq=False)
class Add:
    output: int
    left: int
    right: int

    @property
    def inputs(self) -> tuple[int, ...]:
        return self.left, self.right


@dataclass(frozen=True, eq=False)
class Scale:
    """Multiplication by one number, or by one per feature."""

    output: int
    input: int
    factor: float | Tensor

    @property
    def inputs(self) -> tuple[int, ...]:
        return (self.input,)


@dataclass(frozen=True, eq=False)
class Function:
    """Any other torch function of values; `args` and `kwargs` hold them as `Value`."""

    output: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def inputs(self) -> tuple[int, ...]:
        return tuple(value.number for value in values_in((self.args, self.kwargs)))

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", str(self.function))


Op = Call | Add | Scale | Function


@dataclass(eq=False)
class Program:
    """`examples`: a meta tensor of each value (BATCH, TIME, width); values 0 to `given` - 1 are the inputs."""

    ops: list[Op] = field(default_factory=list)
    examples: list[Tensor] = field(default_factory=list)
    given: int = 0
    output: int = -1

    def input(self, width: int, dtype: torch.dtype = torch.float32) -> Value:
        assert not self.ops, "inputs come before operations"
        self.given += 1
        return self._value(torch.zeros(BATCH, TIME, width, dtype=dtype, device="meta"))

    def width(self, number: int) -> int:
        return self.examples[number].shape[-1]

    def call(self, part: Callable[..., Any], x: Value, state: Any = None) -> Value:
        """A part keeps shape and dtype."""
        out = self._value(x.example)
        self.ops.append(Call(out.number, x.number, part, state))
        return out

    def add(self, left: Value, right: Value) -> Value:
        a, b = left.example, right.example
        # the sum of two meta tensors imports torch's compiler, which takes seconds
        out = self._value(a if a.shape == b.shape and a.dtype is b.dtype else a + b)
        self.ops.append(Add(out.number, left.number, right.number))
        return out

    def scale(self, x: Value, factor: float | Tensor) -> Value:
        out = self._value(x.example)
        self.ops.append(Scale(out.number, x.number, factor))
        return out

    def function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Value:
        meta = substitute((args, kwargs), lambda value: value.example, lambda tensor: tensor.to("meta"))
        found = function(*meta[0], **meta[1])
        if not isinstance(found, Tensor) or found.shape[:2] != (BATCH, TIME) or found.dim() != 3:
            raise Unsupported(f"its formula uses {getattr(function, '__name__', function)}, which mixes tokens")
        out = self._value(found)
        self.ops.append(Function(out.number, function, args, kwargs))
        return out

    def uses(self) -> list[list[int]]:
        """For each value, the indexes of the operations that read it."""
        found: list[list[int]] = [[] for _ in self.examples]
        for index, op in enumerate(self.ops):
            for number in op.inputs:
                found[number].append(index)
        return found

    def _value(self, example: Tensor) -> Value:
        self.examples.append(example)
        return Value(self, len(self.examples) - 1, example)


class Value:
    """A symbolic tensor (batch, time, width): the result of one operation of a program. What a formula does with it is
    recorded; what depends on its numbers cannot be and raises `Unsupported`."""

    def __init__(self, program: Program, number: int, example: Tensor) -> None:
        self.program, self.number, self.example = program, number, example

    @property
    def width(self) -> int:
        return self.example.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.example.dtype

    def __add__(self, other: Any) -> Value:
        if isinstance(other, Value):
            return self.program.add(self, other)
        return self if isinstance(other, int) and other == 0 else self._record(torch.add, self, other)  # sum() adds 0

    def __radd__(self, other: Any) -> Value:
        return self + other

    def __mul__(self, factor: Any) -> Value:
        if isinstance(factor, Value) or (isinstance(factor, Tensor) and factor.dim() != 1):
            return self._record(torch.mul, self, factor)
        return self.program.scale(self, factor)

    def __rmul__(self, factor: Any) -> Value:
        return self * factor

    def __sub__(self, other: Any) -> Value:
        return self._record(torch.sub, self, other)

    def __rsub__(self, other: Any) -> Value:
        return self._record(torch.rsub, self, other)

    def __truediv__(self, other: Any) -> Value:
        return self._record(torch.div, self, other)

    def __neg__(self) -> Value:
        return self._record(torch.neg, self)

    def __getitem__(self, index: Any) -> Value:
        return self._record(Tensor.__getitem__, self, index)

    def detach(self) -> Value:
        return self

    def to(self, dtype: torch.dtype) -> Value:
        return self if dtype == self.dtype else self._record(Tensor.to, self, dtype)

    def float(self) -> Value:
        return self.to(torch.float32)

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name, None)
        if name.startswith("_") or not callable(method):
            raise Unsupported(f"its formula reads `{name}` of the stream")
        return lambda *args, **kwargs: self.program.function(method, (self, *args), kwargs)

    def _record(self, function: Callable[..., Any], *args: Any) -> Value:
        return self.program.function(function, args, {})

    def _refuse(self, *args: Any) -> Any:
        raise Unsupported("its formula depends on the numbers in the stream")

    __bool__ = __len__ = __iter__ = __float__ = __int__ = __index__ = _refuse

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Value:
        program = next(iter(values_in((args, kwargs or {})))).program
        return program.function(function, args, kwargs or {})


def values_in(tree: Any) -> Iterator[Value]:
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, Mapping):
        for entry in tree.values():
            yield from values_in(entry)
    elif isinstance(tree, list | tuple):
        for entry in tree:
            yield from values_in(entry)


def substitute(
    tree: Any, replace: Callable[[Value], Any], tensor: Callable[[Tensor], Tensor] = lambda given: given
) -> Any:
    """The same tree with each Value, and each tensor, replaced."""
    if isinstance(tree, Value):
        return replace(tree)
    if isinstance(tree, Tensor):
        return tensor(tree)
    if isinstance(tree, Mapping):
        return {key: substitute(entry, replace, tensor) for key, entry in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(substitute(entry, replace, tensor) for entry in tree)
    return tree
