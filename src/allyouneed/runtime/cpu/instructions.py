"""The native program of one pass while it is being written: instructions for the interpreter (kernels/cpu), and calls
of the parts that have none, over virtual registers (tokens, width) of float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from allyouneed.kernels.cpu.abi import Format, Instruction, Kind
from allyouneed.nn.patterns.core import Pattern
from allyouneed.runtime.program import Op, StateSlot, Unsupported

FORMATS = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}
# kinds whose arguments have another name than the kind; those from LOAD on read and write a state
OWN = (Kind.RETAIN, Kind.SCAN, Kind.STATE_SPACE, Kind.ASSOCIATE)
STATEFUL = [kind for kind in Kind if kind >= Kind.LOAD]
ARGUMENTS = {Kind.GATE: "activate", Kind.LERP: "scale"} | {kind: "state" for kind in STATEFUL if kind not in OWN}
ARGUMENTS |= {Kind.CHUNK_ATTENTION: "chunk", Kind.CHUNK_SUMS: "chunk"}


class Register(NamedTuple):
    """A virtual register, or some features of one: every result has its own; `assign` maps them to few real ones."""

    number: int
    width: int
    at: int = 0

    def part(self, at: int, width: int) -> Register:
        return Register(self.number, width, self.at + at)


def nested(state: StateSlot | None, name: str) -> StateSlot | None:
    """The state of a part inside a sub-layer (`NestedStates`), by its name there."""
    return None if state is None else StateSlot(state.layer, f"{state.name}/{name}")


class CacheSlot(NamedTuple):
    """A KV cache that an instruction reads: whose it is, and its sizes. `value_width` 0: the keys contain the values.
    `window`: it is a ring (nn/states/window.py). `rounds`: how many buckets of each key it holds
    (nn/mixers/attention/lsh.py)."""

    state: StateSlot
    heads: int
    head_width: int
    value_width: int
    window: bool = False
    rounds: int = 0


class MemorySlot(NamedTuple):
    """A state of constant size (Recurrent, RecentTokens, CompressiveMemory). `features`: of its inputs."""

    state: StateSlot
    features: int


@dataclass
class PartCall:
    """A part without instructions: called in torch between two runs of the interpreter. `op` None: the embedding."""

    part: Any
    op: Op | None
    inputs: tuple[int, ...]
    output: int
    reason: str


class Instructions:
    """`steps`: instructions and part calls in order. `caches`: what ATTENTION reads; `masks`: patterns that depend on
    more than the distance. `memories`: other states. `tables`: functions that make a table of that many positions.
    `kept`: tensors that instructions point to. `outputs`: registers read afterwards. `limit`, `source_limit`: positions
    of a text and of its source that parts have weights for; None: any number."""

    def __init__(self) -> None:
        self.steps: list[Instruction | PartCall] = []
        self.widths: list[int] = []
        self.caches: list[CacheSlot] = []
        self.masks: list[Pattern] = []
        self.memories: list[MemorySlot] = []
        self.tables: list[Callable[[int], Tensor]] = []
        self.kept: list[Tensor] = []
        self.outputs: list[Register] = []
        self.limit: int | None = None
        self.source_limit: int | None = None

    def limit_positions(self, count: int) -> None:
        self.limit = count if self.limit is None else min(count, self.limit)

    def limit_sources(self, count: int) -> None:
        self.source_limit = count if self.source_limit is None else min(count, self.source_limit)

    @property
    def calls(self) -> list[PartCall]:
        return [step for step in self.steps if isinstance(step, PartCall)]

    @property
    def instructions(self) -> list[Any]:
        return [step for step in self.steps if isinstance(step, Instruction)]

    @property
    def last(self) -> Any:
        step = self.steps[-1]
        assert isinstance(step, Instruction)
        return step

    @property
    def single(self) -> bool:
        """Whether a pass has exactly one new token of every row."""
        return bool(self.memories or self.masks or any(slot.window for slot in self.caches))

    def register(self, width: int) -> Register:
        self.widths.append(width)
        return Register(len(self.widths) - 1, width)

    def emit(
        self,
        kind: Any,
        width: int,
        x: Register | None = None,
        other: Register | None = None,
        /,
        into: Register | None = None,
        **arguments: Any,
    ) -> Register:
        """Append an instruction with these arguments (kernels/cpu/program.h); tensors become pointers. `into`: where
        the result is written, for instance a part of a register that exists; default: a new register."""
        out = self.register(width) if into is None else into
        step = Instruction(kind, -1 if x is None else x.number, -1 if other is None else other.number, out.number)
        step.input_at, step.other_at = (0 if given is None else given.at for given in (x, other))
        step.output_at, step.width = out.at, width
        for name, value in arguments.items():
            if isinstance(value, Tensor):  # matrices stay as they are; vectors are small, and read in float32
                value = self.keep(value if value.dim() > 1 else single(value))
            struct = getattr(step, ARGUMENTS.get(kind, kind.name.lower()))
            assert hasattr(struct, name), f"{kind.name} has no argument {name}"
            setattr(struct, name, value)
        self.steps.append(step)
        return out

    def memory(self, state: StateSlot, features: int) -> int:
        """The number of a state whose inputs have `features` features."""
        self.memories.append(MemorySlot(state, features))
        return len(self.memories) - 1

    def call(self, part: Any, op: Op | None, inputs: Sequence[Register], width: int, reason: str) -> Register:
        out = self.register(width)
        self.steps.append(PartCall(part, op, tuple(x.number for x in inputs), out.number, reason))
        return out

    def keep(self, tensor: Tensor) -> int:
        if tensor.device.type not in ("cpu", "meta"):
            raise Unsupported(f"its weights are on {tensor.device.type}")
        self.kept.append(tensor.detach().contiguous())
        return self.kept[-1].data_ptr()

    @contextmanager
    def undo_if_unsupported(self) -> Iterator[None]:
        """Leave no trace of a rule that gives up halfway."""
        lists: list[list[Any]] = [
            self.steps,
            self.widths,
            self.caches,
            self.masks,
            self.memories,
            self.tables,
            self.kept,
        ]
        sizes = [len(entries) for entries in lists]
        try:
            yield
        except Unsupported:
            for entries, size in zip(lists, sizes, strict=True):
                del entries[size:]
            raise

    def assign(self) -> tuple[list[int], list[int]]:
        """Real registers (widths), and the one of each virtual register: it is reused after its last reader."""
        last = {register.number: len(self.steps) for register in self.outputs}
        for index, step in enumerate(self.steps):
            for number in reads(step):
                last[number] = max(last.get(number, 0), index)
        free: dict[int, list[int]] = {}
        registers: list[int] = []
        chosen = [-1] * len(self.widths)
        expiring: dict[int, list[int]] = {}
        made = {step.output for step in self.steps}
        for number, width in enumerate(self.widths):
            if number not in made:  # an input
                registers.append(width)
                chosen[number] = len(registers) - 1
        for index, step in enumerate(self.steps):
            if chosen[step.output] < 0:  # else it is written once more
                width = self.widths[step.output]
                if free.get(width):
                    chosen[step.output] = free[width].pop()
                else:
                    registers.append(width)
                    chosen[step.output] = len(registers) - 1
                expiring.setdefault(last.get(step.output, index), []).append(step.output)
            for number in expiring.pop(index, []):  # after the step itself: its inputs and its output never overlap
                free.setdefault(self.widths[number], []).append(chosen[number])
        return registers, chosen


def reads(step: Any) -> tuple[int, ...]:
    return step.inputs if isinstance(step, PartCall) else (step.input, step.other)


def single(tensor: Tensor) -> Tensor:
    if tensor.dtype not in (*FORMATS, torch.int32):
        raise Unsupported(f"its weights are {str(tensor.dtype).removeprefix('torch.')}")
    return tensor if tensor.dtype is torch.int32 else tensor.float()
