"""Models that are run by orders (lower.py), where every part of them is told and the machine is there. They decode over
the same `States` as the model itself, which does whatever else is asked for."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from threading import Lock
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.kernels.cpu.build import Cache, Order, Pass, machine
from allyouneed.nn.batch import Rows
from allyouneed.nn.context import Context, Memory, TokenLayout
from allyouneed.nn.linear import int8 as quantized
from allyouneed.nn.models.decoder import DecoderModel
from allyouneed.nn.models.encoder_decoder import EncoderDecoderModel
from allyouneed.nn.states.base import State, States
from allyouneed.nn.states.kv_cache import CrossKVCache, KVCache
from allyouneed.runtime.cpu.lower import EIGHT, PRODUCT, Program, Slot, Unsupported, embedded, scored, sources, stacked
from allyouneed.runtime.cpu.threads import Team

WIDE, QUAD, SPARE = (
    64,
    4,
    64,
)  # machine/products.h: outputs side by side, inputs of one instruction, bytes after a token
AHEAD = 64  # places that tables have at least


class Arena:
    """Memory for what is packed, in large pages."""

    def __init__(self, library: ctypes.CDLL, size: int) -> None:
        self.library, self.next = library, library.large(size)
        if not self.next:
            raise MemoryError(f"{size} bytes for packed weights")
        weakref.finalize(self, library.give_back, self.next)

    def pack(self, order: Order) -> Tensor:
        """Put an order's codes in, in the machine's order; their sums, which it needs too."""
        inputs, outputs = order.numbers[0], order.numbers[1]
        sums = torch.empty(outputs, dtype=torch.int32)
        self.library.pack(order.places[0], outputs, inputs, self.next, sums.data_ptr())
        order.places[0], order.places[2] = self.next, sums.data_ptr()
        self.next += packed_bytes(order)
        return sums


def packs(order: Order) -> bool:
    return order.kind == PRODUCT and order.numbers[3] == EIGHT


def packed_bytes(order: Order) -> int:
    inputs, outputs = order.numbers[0], order.numbers[1]
    return -(-outputs // WIDE) * WIDE * -(-inputs // QUAD) * QUAD


class NativeProgram:
    """Orders with room to run in. `fresh`: registers whose contents are handed out; `given`: those that are filled."""

    def __init__(self, program: Program, library: ctypes.CDLL, arena: Arena) -> None:
        self.library, self.arena, self.lock = library, arena, Lock()
        self.kept = list(program.kept)
        widths, chosen = program.assigned()
        self.fresh = [chosen[value.number] for value in program.outputs]
        self.slots, self.makers = program.slots, program.tables
        for order in program.list:
            order.input, order.other, order.output = (
                -1 if number < 0 else chosen[number] for number in (order.input, order.other, order.output)
            )
            if packs(order):
                self.kept.append(arena.pack(order))
        self.widths = widths
        self.program = (Order * len(program.list))(*program.list)
        self.registers = (ctypes.c_void_p * len(widths))()
        self._widths = (ctypes.c_int32 * len(widths))(*widths)
        self._tables = (ctypes.c_void_p * max(1, len(self.makers)))()
        self.tables: list[Tensor] = []
        self.teams: dict[int, Team] = {}
        self.places = self.room = self.longest = self.threads = 0
        self.inputs = max((order.numbers[0] for order in program.list if packs(order)), default=0)
        self.all = Pass(
            orders=len(self.program),
            order=ctypes.addressof(self.program),
            registers=ctypes.addressof(self.registers),
            widths=ctypes.addressof(self._widths),
            tables=ctypes.addressof(self._tables),
        )

    def reserve(self, tokens: int, places: int, longest: int) -> None:
        """Room for so many tokens, at places before `places`, that look at so many keys."""
        threads = torch.get_num_threads()
        if tokens > self.room:
            self.room = tokens
            self.registers_memory = torch.empty(tokens * sum(self.widths))
            at = self.registers_memory.data_ptr()
            for number, width in enumerate(self.widths):
                self.registers[number] = at
                at += 4 * tokens * width
            self.rounded = torch.empty(tokens * (self.inputs + QUAD + SPARE), dtype=torch.uint8)
            self.all.rounded = self.rounded.data_ptr()
            self.longest = self.threads = 0
        if longest + 4 > self.longest or threads != self.threads:  # keys are looked at in fours
            self.longest, self.threads = 2 * longest + 4, threads
            self.scratch = torch.empty(2 * self.room + threads * self.longest)
            self.all.scratch, self.all.longest = self.scratch.data_ptr(), self.longest
        if places > self.places:
            self.places = max(2 * places, AHEAD)
            self.tables = [make(self.places) for make in self.makers]
            self._tables[: len(self.tables)] = [table.data_ptr() for table in self.tables]

    def run(
        self,
        rows: int,
        time: int,
        tokens: Tensor | None,
        starts: Sequence[int],
        lengths: Sequence[int],
        places: int,
        longest: int,
        caches: int = 0,
        group: int = 1,
        sources: Any = None,
        x: Tensor | None = None,
    ) -> list[Tensor]:
        """`x`: what stands in the first register."""
        given = self.all
        with self.lock:
            self.reserve(rows * time, places, longest)
            given.rows, given.time, given.group, given.caches = rows, time, group, caches
            held = (ctypes.c_int32 * rows)(*starts), (ctypes.c_int32 * rows)(*lengths)
            given.starts, given.lengths = ctypes.addressof(held[0]), ctypes.addressof(held[1])
            given.sources = None if sources is None else ctypes.addressof(sources)
            given.tokens = None if tokens is None else tokens.data_ptr()
            if x is not None:
                self.registers[0] = x.data_ptr()
            out = [torch.empty(rows * time, self.widths[number]) for number in self.fresh]
            for number, tensor in zip(self.fresh, out, strict=True):
                self.registers[number] = tensor.data_ptr()
            team = self.team(rows * time)
            given.threads = team.size
            began = perf_counter()
            if self.library.run(ctypes.addressof(given)):
                raise IndexError("a token is none of the vocabulary")
            team.took(given.threads, perf_counter() - began)
        return out

    def team(self, tokens: int) -> Team:
        """Of passes over about so many tokens."""
        size = tokens.bit_length()
        if size not in self.teams or self.teams[size].most != self.threads:
            self.teams[size] = Team(self.threads)
        return self.teams[size]


class Bound:
    """The caches of some states as the machine sees them."""

    def __init__(self, slots: Sequence[Slot], states: States) -> None:
        self.layers, self.memory = states.layers, states.memory
        found: list[State | None] = [states.layers[slot.layer].get(slot.name) for slot in slots]
        wanted = [CrossKVCache if slot.name == "cross" else KVCache for slot in slots]
        self.known = all(type(state) is kind for state, kind in zip(found, wanted, strict=True))
        self.states: list[Any] = found
        self.keys: list[Tensor | None] = [None] * len(slots)
        self.caches = (Cache * max(1, len(slots)))()
        self.lengths: Any = None
        if states.memory is not None:
            layout = states.memory.layout
            self.known = self.known and layout.start == 0 and not layout.packed
            count = len(states.memory.hidden)
            ends = [layout.time] * count if layout.real is None else layout.real.sum(1).tolist()
            self.lengths = (ctypes.c_int32 * count)(*ends)

    def point(self, number: int) -> None:
        """To where a state's keys and values lie now."""
        state, cache = self.states[number], self.caches[number]
        keys, values = state.keys, state.values
        if keys.dtype is not torch.float32:
            state.keys, state.values = keys, values = keys.float(), values.float()
        if keys.stride() != values.stride() or keys.stride(3) != 1:
            state.keys = keys = keys.contiguous()
            state.values = values = values.contiguous()
        cache.keys, cache.values = keys.data_ptr(), values.data_ptr()
        cache.row, cache.head, cache.time = keys.stride()[:3]
        self.keys[number] = keys


class CpuExecutor:
    """What decoding asks of a model (infer/running_batch.py), by orders."""

    def __init__(self, model: EncoderDecoderModel | DecoderModel, library: ctypes.CDLL) -> None:
        self._model = weakref.ref(model)
        decoder, head = Program(), Program()
        decoder.outputs.append(stacked(model.decoder, embedded(model.embed, decoder), decoder, reads=False))
        width = decoder.outputs[0].width
        head.outputs.append(scored(model.head, head.value(width), head))
        blocks: list[Any] = list(model.decoder.blocks)
        self.crosses = {n: block.sublayers["cross"] for n, block in enumerate(blocks) if "cross" in block.sublayers}
        reader: Program | None = None
        writing: Any = model.embed
        self.limit: int | None = writing.limit
        self.source_limit: int | None = None
        self.eight = type(writing.tokens) is quantized.Int8Table
        if isinstance(model, EncoderDecoderModel) and self.eight:
            reading: Any = model.embed if model.source_embed is None else model.source_embed
            try:
                reader = Program()
                hidden = stacked(model.encoder, embedded(reading, reader), reader, reads=True)
                reader.outputs += [hidden, *(sources(part, hidden, reader) for part in self.crosses.values())]
                self.source_limit = reading.limit
            except Unsupported:
                reader = None
        all_orders = [program for program in (decoder, head, reader) if program is not None]
        self.kept = list(model.parameters())
        self.was = self.signature()
        arena = Arena(library, sum(packed_bytes(o) for program in all_orders for o in program.list if packs(o)) or 1)
        self.decoder, self.scores = NativeProgram(decoder, library, arena), NativeProgram(head, library, arena)
        self.reader = None if reader is None else NativeProgram(reader, library, arena)
        self.width = width
        self.bounds: weakref.WeakKeyDictionary[States, Bound] = weakref.WeakKeyDictionary()

    def signature(self) -> tuple[Any, ...]:
        """Another one: weights are no longer what they were."""
        tensors = [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in self.kept]
        return (quantized.changes.count, *tensors)

    @property
    def model(self) -> Any:
        model = self._model()
        assert model is not None, "whoever decodes holds the model"
        return model

    def start(self, source: Any, **options: Any) -> States:
        model = self.model
        if self.reader is None or options or not isinstance(source, Rows) or not plain(source):
            return model.start(source, **options)
        rows, time = source.tokens.shape
        if self.source_limit is not None and time > self.source_limit:
            return model.start(source)
        lengths = [time] * rows if source.lengths is None else source.lengths.tolist()
        hidden, *both = self.reader.run(rows, time, source.tokens.contiguous(), [0] * rows, lengths, time, time)
        memory = Memory(hidden.view(rows, time, -1), TokenLayout.of(source))
        states = States(model.decoder.new_states(), rows, hidden.device, memory)
        for (layer, part), pair in zip(self.crosses.items(), both, strict=True):
            state: Any = states.layers[layer]["cross"]
            keys, values = pair.view(rows, time, -1).chunk(2, -1)
            state.keys, state.values, state.end = part.split(keys), part.split(values), time
        return states

    def advance(self, new: Rows, states: States, last: bool = False) -> Tensor:
        rows, time = new.tokens.shape
        end = max(states.lengths, default=0) + time
        bound = self.bound(states, rows, end) if self.takes(new, states, end) else None
        if bound is None:
            return self.model.advance(new, self.handed(states), last)
        lengths = [time] * rows if new.lengths is None else new.lengths.tolist()
        sources = 0 if states.memory is None else states.memory.layout.time
        (hidden,) = self.decoder.run(
            rows,
            time,
            new.tokens.contiguous(),
            states.lengths,
            lengths,
            end,
            max(end, sources),
            ctypes.addressof(bound.caches),
            states.group,
            bound.lengths,
        )
        states.lengths = [seen + count for seen, count in zip(states.lengths, lengths, strict=True)]
        found = hidden.view(rows, time, self.width)
        if last and time > 1:
            places = torch.tensor([max(0, count - 1) for count in lengths])[:, None, None]
            found = found.take_along_dim(places, 1)
        return found

    def handed(self, states: States) -> States:
        """What was remembered in single precision, in the model's own."""
        dtype = self.kept[0].dtype
        if dtype is torch.float32:
            return states
        for layer in states.layers:
            for state in layer.values():
                if isinstance(state, KVCache) and state.keys is not None and state.values is not None:
                    state.keys, state.values = state.keys.to(dtype), state.values.to(dtype)
        return states

    def takes(self, new: Rows, states: States, end: int) -> bool:
        return (
            type(states) is States
            and len(states.lengths) == len(new.tokens)
            and not states.marks
            and plain(new)
            and bool(new.tokens.numel())
            and (self.eight or new.tokens.shape[1] == 1)  # many tokens of floats at once: torch's products are as good
            and not torch.is_grad_enabled()
            and (self.limit is None or end <= self.limit)
        )

    def bound(self, states: States, rows: int, end: int) -> Bound | None:
        """Caches with room for tokens up to `end`; None where they are none of ours."""
        bound = self.bounds.get(states)
        if bound is None or bound.layers is not states.layers or bound.memory is not states.memory:
            bound = self.bounds[states] = Bound(self.decoder.slots, states)
        if not bound.known:
            return None
        for number, (slot, state) in enumerate(zip(self.decoder.slots, bound.states, strict=True)):
            if slot.name == "cross":
                if state.keys is None:
                    memory = states.memory
                    assert memory is not None
                    state.keys, state.values = self.crosses[slot.layer].source(memory.hidden, Context(memory.layout))
                    state.end = memory.layout.time
                if state.keys.shape[0] * states.group != rows:
                    return None
            else:
                state.end = end
                capacity = 0 if state.keys is None else state.keys.shape[2]
                if state.keys is not None and state.keys.shape[0] != rows:
                    return None
                if end > capacity:
                    sizes = rows, slot.heads, max(end, 2 * capacity, 16), slot.head_width
                    for name in ("keys", "values"):
                        grown, cache = torch.zeros(sizes), getattr(state, name)
                        if cache is not None:
                            grown[:, :, :capacity] = cache
                        setattr(state, name, grown)
            if state.keys is not bound.keys[number]:
                bound.point(number)
        return bound

    def head(self, x: Tensor) -> Tensor:
        if (
            torch.is_grad_enabled()
            or x.dim() != 2
            or not len(x)
            or x.dtype is not torch.float32
            or x.shape[1] != self.width
        ):
            return self.model.head(x)
        ones = [1] * len(x)
        (logits,) = self.scores.run(len(x), 1, None, ones, ones, 0, 0, x=x.contiguous())
        return logits


def plain(rows: Rows) -> bool:
    """Nothing but sentences, padded on the right."""
    said = (rows.segments, rows.positions, rows.types, rows.prompt, rows.chosen, rows.order)
    return rows.side == "right" and all(fact is None for fact in said) and rows.tokens.device.type == "cpu"


_KNOWN: weakref.WeakKeyDictionary[nn.Module, CpuExecutor] = weakref.WeakKeyDictionary()
_UNTOLD: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def swift(model: Any) -> Any:
    """The model by orders, where it has them and the machine is there; else the model itself."""
    if not isinstance(model, EncoderDecoderModel | DecoderModel) or model.training or model in _UNTOLD:
        return model
    weights: Any = model.embed.tokens
    if next(weights.buffers() if type(weights) is quantized.Int8Table else weights.parameters()).device.type != "cpu":
        return model
    library = machine()
    if library is None:
        return model
    known = _KNOWN.get(model)
    if known is None or known.was != known.signature():
        try:
            known = _KNOWN[model] = CpuExecutor(model, library)
        except Unsupported:
            _UNTOLD.add(model)
            return model
    return known
