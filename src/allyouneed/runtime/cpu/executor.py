"""Decoding on a CPU by the native interpreter. It works on the same `States` as the model; parts without instructions
are called between two runs of the interpreter, and what it cannot do at all (gradients, packed rows) the model does."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.kernels.cpu.abi import Kind
from allyouneed.kernels.cpu.build import native_library, wait_for_build
from allyouneed.nn.batch import Rows
from allyouneed.nn.common import least
from allyouneed.nn.context import Context, Memory, TokenLayout
from allyouneed.nn.linear import int8 as quantized
from allyouneed.nn.states.base import States
from allyouneed.nn.states.paged import PagedKVCache, PagedStates
from allyouneed.nn.states.recurrent import Recurrent
from allyouneed.runtime.cpu.bindings import StateBinding, grow_cache, grow_window, leaf_states, replace_cache
from allyouneed.runtime.cpu.instructions import FORMATS, Instructions, PartCall, Register
from allyouneed.runtime.cpu.lower import lower, lower_embed, lower_program
from allyouneed.runtime.cpu.lower_attention import lower_source
from allyouneed.runtime.cpu.native_program import NativeProgram, PassInputs, arena_for
from allyouneed.runtime.eager import apply
from allyouneed.runtime.program import Call, Unsupported
from allyouneed.runtime.trace import require_traced_model, trace


@dataclass
class LoweredModel:
    """`encoder`: of int8 models; it returns keys and values for each of `crosses`, too (cross-attentions by layer). A
    program that calls parts also returns its embeddings. `head`, `encoder`: None where `reasons` say why."""

    decoder: Instructions
    head: Instructions | None = None
    encoder: Instructions | None = None
    crosses: dict[int, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def lower_model(model: Any) -> LoweredModel:
    """Instructions of a model, which may be on the meta device. Raises `Unsupported` where no sub-layer has any."""
    require_traced_model(model)
    if getattr(model.head, "reads_source", False):
        raise Unsupported(f"{type(model.head).__name__} reads the encoder's output in every step")
    types = {weight.dtype for weight in model.parameters()} - set(FORMATS)
    if types:
        raise Unsupported(f"its weights are {', '.join(sorted(str(t).removeprefix('torch.') for t in types))}")
    width = model.config.width
    code, embedded, hidden = lower_stack(model.embed, model.decoder, width, states=True)
    code.outputs += [hidden, embedded] if code.calls else [hidden]
    lowered = LoweredModel(code)
    for slot in code.caches:
        if slot.state.name == "cross":
            lowered.crosses[slot.state.layer] = model.decoder.blocks[slot.state.layer].sublayers["cross"]
    head = Instructions()
    try:
        head.outputs.append(lower(model.head, head.register(hidden.width), head, None))
        lowered.head = head
    except Unsupported as reason:
        lowered.reasons["head"] = str(reason)
    if hasattr(model, "encoder"):
        try:
            if not is_int8(model):
                raise Unsupported("torch is as fast for float weights")
            if getattr(model.config, "context", ()):
                raise Unsupported("it reads the sentences before the source apart")
            embed = model.embed if model.source_embed is None else model.source_embed
            reading, embedded, hidden = lower_stack(embed, model.encoder, width, states=False)
            sources = [lower_source(part, hidden, reading) for part in lowered.crosses.values()]
            reading.outputs += [hidden, embedded] if code.calls or reading.calls else [hidden]
            reading.outputs += sources
            lowered.encoder = reading
        except Unsupported as reason:
            lowered.reasons["encoder"] = str(reason)
    return lowered


def lower_stack(embed: nn.Module, stack: Any, width: int, states: bool) -> tuple[Instructions, Register, Register]:
    """Instructions, and the registers of the embeddings and of the result."""
    code = Instructions()
    embedded = lower_embed(embed, width, code)
    before = len(code.instructions)
    hidden = lower_program(trace(stack, width, states), embedded, code)
    if not any(order.kind == Kind.LINEAR for order in code.instructions[before:]):
        raise Unsupported(f"no sub-layer is native: {'; '.join(dict.fromkeys(call.reason for call in code.calls))}")
    return code, embedded, hidden


def is_int8(model: Any) -> bool:
    return type(getattr(getattr(model, "embed", None), "tokens", None)) is quantized.Int8Table


@dataclass
class PartCaller:
    """Calls the parts of one pass that have no instructions; the second output of a program with part calls is its
    embeddings."""

    program: NativeProgram
    batch: PassInputs
    embed: Any
    rows: Rows
    context: Context
    layers: list[dict[str, Any]] | None
    dtype: torch.dtype

    def __call__(self, call: PartCall, inputs: list[Tensor]) -> Tensor:
        if call.op is None:
            return self.embed(self.rows, self.context.queries)
        if self.context.inputs is None:
            self.context.inputs = self.program.view(self.program.returned[1], self.batch).to(self.dtype)
        dtype = self.dtype if isinstance(call.op, Call) else torch.float32  # formulas stay in single precision
        return apply(call.op, [x.to(dtype) for x in inputs], self.context, self.layers)


class CpuExecutor:
    """The `start`, `advance` and `head` of a model (infer/running_batch.py) by native programs."""

    def __init__(self, model: Any, library: ctypes.CDLL) -> None:
        lowered = lower_model(model)
        self._model = weakref.ref(model)
        self.weights = list(model.parameters())
        self.dtype = self.weights[0].dtype if self.weights else torch.float32
        self.lowered_from = self.signature()
        arena = arena_for(library, lowered.decoder, lowered.head, lowered.encoder)
        self.decoder = NativeProgram(lowered.decoder, library, arena)
        self.scores = None if lowered.head is None else NativeProgram(lowered.head, library, arena)
        self.encoder = None if lowered.encoder is None else NativeProgram(lowered.encoder, library, arena)
        self.crosses, self.int8 = lowered.crosses, is_int8(model)
        self.limit = least(model.embed.limit, lowered.decoder.limit)
        self.read_limit = lowered.decoder.source_limit  # of sources that it reads
        self.source_embed: Any = getattr(model, "source_embed", None) or model.embed
        reader = lowered.encoder
        self.source_limit = least(self.source_embed.limit, None if reader is None else reader.limit)
        self.width = lowered.decoder.outputs[0].width
        self.bindings: weakref.WeakKeyDictionary[States, StateBinding] = weakref.WeakKeyDictionary()

    def signature(self) -> tuple[Any, ...]:
        """Changes when weights do."""
        tensors = [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in self.weights]
        return (quantized.weight_version.count, *tensors)

    @property
    def model(self) -> Any:
        model = self._model()
        assert model is not None, "the caller holds the model"
        return model

    def start(self, source: Any, **options: Any) -> States:
        model, encoder = self.model, self.encoder
        if encoder is None or options or not isinstance(source, Rows) or not is_plain(source):
            return model.start(source, **options)
        rows, time = source.tokens.shape
        if self.source_limit is not None and time > self.source_limit:
            return model.start(source)
        lengths = [time] * rows if source.lengths is None else source.lengths.tolist()
        layout = self.source_embed.layout(source)
        batch = PassInputs(rows, time, source.tokens.contiguous(), [0] * rows, lengths, time, time)
        caller = None
        if encoder.calls:
            caller = PartCaller(encoder, batch, self.source_embed, source, Context(layout), None, self.dtype)
        hidden, *others = encoder.run(batch, call_part=caller)
        inputs = None
        if len(others) > len(self.crosses):
            inputs, *others = others
            inputs = inputs.view(rows, time, inputs.shape[-1])
        memory = Memory(hidden.view(rows, time, self.width), layout, inputs=inputs)
        states = States(model.decoder.new_states(), rows, hidden.device, memory)
        for (layer, part), pair in zip(self.crosses.items(), others, strict=True):
            state: Any = states.layers[layer]["cross"]
            keys, values = pair.view(rows, time, pair.shape[-1]).chunk(2, -1)
            state.keys, state.values, state.end = part.split(keys), part.split(values), time
        return states

    def advance(self, new: Rows, states: States, last: bool = False) -> Tensor:
        rows, time = new.tokens.shape
        end = max(states.lengths, default=0) + time
        binding = self.bind(states, rows, end) if self.supports(new, states, end) else None
        if binding is None:
            return self.model.advance(new, self.restore_dtype(states), last)
        lengths = [time] * rows if new.lengths is None else new.lengths.tolist()
        sources = 0 if states.memory is None else states.memory.layout.time
        batch = PassInputs(rows, time, new.tokens.contiguous(), states.lengths, lengths, end, max(end, sources))
        batch.caches, batch.group = ctypes.addressof(binding.caches), states.group
        batch.memories, batch.masks = ctypes.addressof(binding.memories), ctypes.addressof(binding.masks)
        batch.sources = binding.source_lengths
        layout = TokenLayout.following(states.lengths, new) if self.decoder.calls else None
        if isinstance(states, PagedStates) and states.has_pages:
            # parts that torch computes need to know where new tokens are written
            states.reserve(lengths) if layout is None else states.append_marks(layout, end)
            states.copy_shared_blocks()
            batch.block_table, batch.shift = states.padded_table(end, torch.int32), states.pool.size.bit_length() - 1
        caller = None
        if layout is not None:
            context = Context(layout, states.slot_layout(end), states.memory)
            caller = PartCaller(self.decoder, batch, self.model.embed, new, context, states.layers, self.dtype)
        hidden, *_ = self.decoder.run(batch, call_part=caller)
        binding.finish(end)
        states.lengths = list(map(add, states.lengths, lengths))
        found = hidden.view(rows, time, self.width)
        if last and time > 1:
            indices = torch.tensor([max(0, count - 1) for count in lengths])[:, None, None]
            found = found.take_along_dim(indices, 1)
        return found

    def restore_dtype(self, states: States) -> States:
        """Convert states written in single precision to the model's own."""
        if self.dtype is torch.float32:
            return states
        for layer in states.layers:
            for state in leaf_states(layer.values()):
                held: Any = state  # keys and values, or the tokens before a convolution
                if getattr(held, "keys", None) is not None:
                    replace_cache(held, held.keys.to(self.dtype), held.values.to(self.dtype))
                elif getattr(held, "tokens", None) is not None:
                    held.tokens = held.tokens.to(self.dtype)
                elif isinstance(state, Recurrent) and state.now is not None:
                    types = [part.dtype for part in state.snapshot]
                    state.now = tuple(part.to(dtype) for part, dtype in zip(state.now, types, strict=True))
        return states

    def supports(self, new: Rows, states: States, end: int) -> bool:
        return (
            (type(states) is States or type(states) is PagedStates)
            # blocks hold 2^n tokens in single precision
            and (
                not isinstance(states, PagedStates)
                or not states.has_pages
                or (states.pool.size.bit_count() == 1 and self.dtype is torch.float32)
            )
            and len(states.lengths) == len(new.tokens)
            and not states.marks
            and is_plain(new)
            and bool(new.tokens.numel())
            # of many tokens torch's float products are as fast
            and (new.tokens.shape[1] == 1 or (self.int8 and not self.decoder.single))
            and not (self.decoder.single and new.lengths is not None and bool((new.lengths != 1).any()))
            and not torch.is_grad_enabled()
            and (self.limit is None or end <= self.limit)
            and (self.read_limit is None or states.memory is None or states.memory.layout.time <= self.read_limit)
        )

    def bind(self, states: States, rows: int, end: int) -> StateBinding | None:
        """States with capacity for tokens up to `end`; None where they are of another kind or have other rows."""
        binding, program = self.bindings.get(states), self.decoder
        if binding is None or binding.layers is not states.layers or binding.source is not states.memory:
            binding = StateBinding(program.caches, program.memories, program.masks, states)
            self.bindings[states] = binding
        if not binding.supported:
            return None
        for number, (slot, state) in enumerate(zip(self.decoder.caches, binding.states, strict=True)):
            if slot.state.name == "cross":
                if state.keys is None:
                    memory = states.memory
                    assert memory is not None
                    part = self.crosses[slot.state.layer]
                    state.keys, state.values = part.source(memory.hidden, Context(memory.layout))
                    state.end = memory.layout.time
                if state.keys.shape[0] * states.group != rows:
                    return None
            elif slot.window:
                if state.keys is not None and state.keys.shape[0] != rows:
                    return None
                grow_window(state, slot, rows, end)
            elif isinstance(states, PagedStates) and isinstance(state, PagedKVCache):
                like = torch.empty(1, slot.heads, 0, slot.head_width)
                value = torch.empty(1, slot.heads, 0, slot.value_width)
                keys, values = states.pool.layer(slot.state.layer, like, value)
                if keys.dtype is not torch.float32 or keys.shape[1::2] != like.shape[1::2]:
                    return None
                if keys is not binding.keys[number]:
                    binding.point_to(number, keys, values, paged=True)
                continue
            else:
                state.end = end
                capacity = 0 if state.keys is None else state.keys.shape[2]
                if state.keys is not None and state.keys.shape[0] != rows:
                    return None
                if end > capacity:
                    grow_cache(state, slot, rows, max(end, 2 * capacity, 16))
            if state.keys is not binding.keys[number]:
                binding.point(number)
        like = torch.empty(0, dtype=self.dtype)
        return binding if binding.prepare(rows, states.lengths, like) else None

    def head(self, x: Tensor) -> Tensor:
        if (
            self.scores is None
            or torch.is_grad_enabled()
            or x.dim() != 2
            or not len(x)
            or x.dtype is not torch.float32
            or x.shape[1] != self.width
        ):
            return self.model.head(x.to(self.dtype) if self.scores is None else x)
        ones = [1] * len(x)
        (logits,) = self.scores.run(PassInputs(len(x), 1, None, ones, ones), x=x.contiguous())
        return logits

    def narrow_head(self, tokens: Tensor) -> Callable[[Tensor], Tensor]:
        """`head` for the logits of these tokens (n,) alone, in the same bits."""
        part = self.model.head.narrowed(tokens)
        if self.scores is None:
            return lambda x: part(x.to(self.dtype))
        code = Instructions()
        code.outputs.append(lower(part, code.register(self.width), code, None))
        program = NativeProgram(code, self.scores.library, arena_for(self.scores.library, code))

        def head(x: Tensor) -> Tensor:
            if x.dtype is not torch.float32 or not len(x):
                return part(x)
            ones = [1] * len(x)
            (logits,) = program.run(PassInputs(len(x), 1, None, ones, ones), x=x.contiguous())
            return logits

        return head


def is_plain(rows: Rows) -> bool:
    """One sentence a row, padded on the right, with no marks."""
    plain = rows.segments is None and rows.positions is None and rows.types is None and rows.prompt is None
    plain = plain and rows.chosen is None and rows.order is None and rows.slots is None
    return plain and rows.side == "right" and rows.tokens.device.type == "cpu"


_executors: weakref.WeakKeyDictionary[nn.Module, CpuExecutor] = weakref.WeakKeyDictionary()
_refused: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def cpu_executor(model: Any) -> Any:
    """What decodes with this model: its native program where it has one and the interpreter is available, else the
    model itself. `allyouneed describe` says why (runtime/report.py)."""
    if not isinstance(model, nn.Module) or model.training:
        return model
    known = _executors.get(model)
    if known is not None and known.lowered_from == known.signature():  # else its weights have changed or moved
        return known
    if model in _refused or not on_cpu(model):
        return model
    library = wait_for_build() if is_int8(model) else native_library()  # see kernels/cpu/build.py
    if library is None:
        return model
    try:
        known = _executors[model] = CpuExecutor(model, library)
    except Unsupported as reason:
        _refused[model] = str(reason)
        return model
    return known


def on_cpu(model: nn.Module) -> bool:
    weight = next(chain(model.parameters(), model.buffers()), None)
    return weight is not None and weight.device.type == "cpu"
