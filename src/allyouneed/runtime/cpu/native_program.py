"""Instructions ready to run: registers, packed weights and tables, and the interpreter that reads them."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from allyouneed.kernels.cpu.abi import CONSTANTS, Format, Instruction, Kind, Pass
from allyouneed.runtime.cpu.instructions import Instructions, PartCall
from allyouneed.runtime.cpu.threads import ThreadCount

TILE_OUTPUTS, QUAD, SLACK, DIGIT = (CONSTANTS[name] for name in ("TILE_OUTPUTS", "QUAD", "SLACK", "DIGIT"))
POSITIONS = 64  # rows that tables have at least
PROBLEMS = {1: "a token id is outside the vocabulary", 2: "lengths do not fit the pass"}  # `check` of interpreter.cpp


class Arena:
    """Packed weights, in huge pages."""

    def __init__(self, library: ctypes.CDLL, size: int) -> None:
        self.library, self.next = library, library.allocate(size)
        if not self.next:
            raise MemoryError(f"cannot allocate {size} bytes for packed weights")
        weakref.finalize(self, library.release, self.next)

    def pack(self, linear: Any) -> Tensor:
        """Pack the int8 weights of a linear map; their row sums, which the kernel needs too."""
        experts = max(1, linear.experts)
        sums = torch.empty(experts, linear.outputs, dtype=torch.int32)
        weights, packed = [linear.weight], self.next
        if linear.experts:
            weights = list((ctypes.c_int64 * experts).from_address(linear.weight))
        for weight, total in zip(weights, sums, strict=True):
            self.library.pack(weight, linear.outputs, linear.inputs, self.next, total.data_ptr())
            self.next += packed_bytes(linear) // experts
        linear.weight, linear.sums = packed, sums.data_ptr()
        return sums


def is_packed(instruction: Any) -> bool:
    return instruction.kind == Kind.LINEAR and instruction.linear.format == Format.INT8


def packed_bytes(linear: Any) -> int:
    size: int = -(-linear.outputs // TILE_OUTPUTS) * TILE_OUTPUTS * -(-linear.inputs // QUAD) * QUAD
    return size * max(1, linear.experts)


def arena_for(library: ctypes.CDLL, *programs: Instructions | None) -> Arena:
    steps = [step for code in programs if code is not None for step in code.instructions]
    return Arena(library, sum(packed_bytes(step.linear) for step in steps if is_packed(step)) or 1)


class InstructionRun(NamedTuple):
    """Instructions that run without a part call between them."""

    address: int
    size: int


CallPart = Callable[[PartCall, list[Tensor]], Tensor]  # of tensors (rows, time, width)


@dataclass
class PassInputs:
    """The new tokens of one pass. `starts`: tokens before them, by row. `end`: positions are below it. `keys`: the most
    keys a token reads. `caches`, `memories`, `masks`: addresses of the states. `sources`: lengths of the sources.
    `block_table` (rows, blocks): of paged caches, int32, for blocks of `1 << shift` tokens."""

    rows: int
    time: int
    tokens: Tensor | None
    starts: Sequence[int]
    lengths: Sequence[int]
    end: int = 0
    keys: int = 0
    caches: int = 0
    memories: int = 0
    masks: int = 0
    group: int = 1
    sources: Any = None
    block_table: Tensor | None = None
    shift: int = 0


class NativeProgram:
    """`returned`: the registers of the outputs."""

    def __init__(self, code: Instructions, library: ctypes.CDLL, arena: Arena) -> None:
        self.library, self.arena, self.lock = library, arena, Lock()
        self.kept = list(code.kept)
        widths, chosen = code.assign()
        self.returned = [chosen[register.number] for register in code.outputs]
        self.caches, self.memories, self.masks = code.caches, code.memories, code.masks
        self.table_makers, self.single = code.tables, code.single
        instructions = code.instructions
        for step in instructions:
            step.input, step.other, step.output = (
                -1 if number < 0 else chosen[number] for number in (step.input, step.other, step.output)
            )
            if is_packed(step):
                self.kept.append(arena.pack(step.linear))
        self.widths = widths
        self.program = (Instruction * len(instructions))(*instructions)
        self.steps = self._steps(code, chosen)
        self.calls = [step for step in self.steps if isinstance(step, PartCall)]
        self.buffers: list[Tensor] = []
        self.registers = (ctypes.c_void_p * len(widths))()
        self._widths = (ctypes.c_int32 * len(widths))(*widths)
        self._tables = (ctypes.c_void_p * max(1, len(self.table_makers)))()
        self.tables: list[Tensor] = []
        self.thread_counts: dict[int, ThreadCount] = {}
        self.positions = self.tokens = self.keys = self.threads = 0
        self.inputs = max((step.linear.inputs for step in instructions if is_packed(step)), default=0)
        seen = (step.attention.branches for step in instructions if step.kind == Kind.ATTENTION)
        self.branches = max(seen, default=0) or 1  # a key may be seen in each of them
        rows = (max(step.linear.top, step.linear.digits) for step in instructions if is_packed(step))
        self.top = max(rows, default=0) or 1  # rows of a token
        self.given = Pass(
            count=len(self.program),
            instructions=ctypes.addressof(self.program),
            registers=ctypes.addressof(self.registers),
            widths=ctypes.addressof(self._widths),
            tables=ctypes.addressof(self._tables),
        )

    def _steps(self, code: Instructions, chosen: list[int]) -> list[InstructionRun | PartCall]:
        found: list[InstructionRun | PartCall] = []
        first = count = 0
        for step in [*code.steps, None]:
            if isinstance(step, Instruction):
                count += 1
                continue
            if count:
                found.append(InstructionRun(ctypes.addressof(self.program) + first * ctypes.sizeof(Instruction), count))
                first, count = first + count, 0
            if step is not None:
                inputs = tuple(chosen[number] for number in step.inputs)
                found.append(PartCall(step.part, step.op, inputs, chosen[step.output], step.reason))
        return found

    def reserve(self, tokens: int, positions: int, keys: int) -> None:
        """Room for that many tokens, at positions below `positions`, that read that many keys. A size is 0 while its
        memory changes, so that after an interrupt or without memory no pass writes to what is gone."""
        threads = torch.get_num_threads()
        if tokens > self.tokens:
            self.tokens = self.keys = 0
            self.register_memory = torch.empty(tokens * sum(self.widths))
            self.buffers = list(self.register_memory.split([tokens * width for width in self.widths]))
            self.registers[:] = [buffer.data_ptr() for buffer in self.buffers]
            self.quantized = torch.empty(self.top * tokens * (self.inputs + QUAD + SLACK) * DIGIT, dtype=torch.uint8)
            self.given.quantized = self.quantized.data_ptr()
            self.tokens = tokens
        if keys + 4 > self.keys or threads != self.threads:  # keys are read in fours
            self.keys, longest = 0, 2 * keys * self.branches + 4
            self.scratch = torch.empty(2 * self.top * self.tokens + 2 * threads * longest)
            self.given.scratch, self.given.longest = self.scratch.data_ptr(), longest
            self.given.most_rows = self.top * self.tokens
            self.keys, self.threads = 2 * keys + 4, threads
        if positions > self.positions:
            self.positions, longest = 0, max(2 * positions, POSITIONS)
            self.tables = [make(longest) for make in self.table_makers]
            self._tables[: len(self.tables)] = [table.data_ptr() for table in self.tables]
            self.positions = self.given.positions = longest

    def run(self, batch: PassInputs, x: Tensor | None = None, call_part: CallPart | None = None) -> list[Tensor]:
        """The outputs (rows · time, width). `x`: the input in the first register. `call_part`: runs a part call."""
        given, rows, tokens = self.given, batch.rows, batch.rows * batch.time
        if not tokens:
            return [torch.empty(0, self.widths[number]) for number in self.returned]
        with self.lock:
            self.reserve(tokens, batch.end, batch.keys)
            given.rows, given.time, given.group, given.caches = rows, batch.time, batch.group, batch.caches
            given.memories, given.masks = batch.memories, batch.masks
            held = (ctypes.c_int32 * rows)(*batch.starts), (ctypes.c_int32 * rows)(*batch.lengths)
            given.starts, given.lengths = ctypes.addressof(held[0]), ctypes.addressof(held[1])
            given.sources = None if batch.sources is None else ctypes.addressof(batch.sources)
            given.tokens = None if batch.tokens is None else batch.tokens.data_ptr()
            table = batch.block_table
            given.block_table, given.blocks = (None, 0) if table is None else (table.data_ptr(), table.shape[1])
            given.shift = batch.shift
            if x is not None:
                self.registers[0] = x.data_ptr()
            out = list[Tensor]()
            for number in self.returned:
                out.append(torch.empty(tokens, self.widths[number]))
                self.registers[number] = out[-1].data_ptr()
            size = tokens.bit_length()
            count = self.thread_counts.get(size)  # for passes over about this many tokens
            if count is None or count.most != self.threads:
                count = self.thread_counts[size] = ThreadCount(self.threads)
            given.threads = count.current
            seconds = 0.0
            for step in self.steps:
                if isinstance(step, InstructionRun):
                    given.instructions, given.count = step
                    began = perf_counter()
                    if problem := self.library.run(ctypes.addressof(given)):
                        raise IndexError(PROBLEMS[problem])
                    seconds += perf_counter() - began
                    continue
                assert call_part is not None
                for number, tensor in zip(self.returned, out, strict=True):
                    self.buffers[number] = tensor.view(-1)
                found = call_part(step, [self.view(number, batch).clone() for number in step.inputs])
                self.view(step.output, batch).copy_(found)
            count.record(given.threads, seconds)
        return out

    def view(self, number: int, batch: PassInputs) -> Tensor:
        """What stands in a register, (rows, time, width)."""
        width = self.widths[number]
        return self.buffers[number][: batch.rows * batch.time * width].view(batch.rows, batch.time, width)
