"""A model's pass over new tokens as a flat list of orders, which a machine of ours (kernels/machine.cpp) runs in one
call: what a model of eight bits spends on small steps is not products but the calls in between.

Parts are told once, symbolically: `told(part, x, orders)` writes down what `part.forward` would do. A part that is not
told here has no orders, and a model with such a part is computed as always. Nothing else depends on which way it goes:
states are the same, and tests hold both ways to the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from allyouneed.kernels.cpu.build import Order
from allyouneed.nn.channels.feedforward import ACTIVATIONS, FFNModule, GLUModule
from allyouneed.nn.embed.tokens import TokenEmbedModule
from allyouneed.nn.heads.vocabulary import VocabularyHeadModule
from allyouneed.nn.linear.dense import Joined
from allyouneed.nn.linear.int8 import Int8Linear, Int8Table
from allyouneed.nn.mixers.attention.attention import CrossAttention, SelfAttention, _Heads
from allyouneed.nn.mixers.attention.scores import ScoresModule
from allyouneed.nn.models.stack import Stack, changes
from allyouneed.nn.norms import LayerNormModule, RMSNormModule
from allyouneed.nn.patterns.core import Causal, Full
from allyouneed.nn.positions.absolute import NoPositionsModule
from allyouneed.nn.positions.relative import RelativeModule
from allyouneed.nn.positions.rotary import RotaryModule
from allyouneed.nn.wiring.residual import ResiDualEnd, ResidualModule

EMBED, PRODUCT, NORM, ADD, SCALE, ACTIVATE, GATE, ATTEND = range(8)
EIGHT, SINGLE, HALF = range(3)  # weights: packed numbers of 8 bits, or float32 or bfloat16 as they lie
FORMS = {torch.float32: SINGLE, torch.bfloat16: HALF}
CACHED, SOURCE, OWN = range(3)  # keys and values: of the state, of the source, of these tokens themselves
NUMBERED = ("identity", "relu", "relu-squared", "gelu", "gelu-tanh", "quick-gelu", "silu", "sigmoid", "tanh")


class Unsupported(Exception):
    """A part that has no orders."""


class Slot(NamedTuple):
    """Keys and values that an order looks at: of which layer and sub-layer, and their sizes."""

    layer: int
    name: str
    heads: int
    head_width: int


class Value:
    """What stands in a register: (tokens, width). Sums and multiples of it are orders, so that a wiring's formula,
    handed values instead of tensors, writes its own."""

    def __init__(self, program: Program, number: int, width: int) -> None:
        self.program, self.number, self.width = program, number, width

    def __add__(self, other: Value | int) -> Value:
        if not isinstance(other, Value):  # sum() begins with 0
            return self
        return self.program.add(ADD, self.width, self, other)

    __radd__ = __add__

    def __mul__(self, factor: float | Tensor) -> Value:
        if isinstance(factor, Tensor):
            return self.program.add(SCALE, self.width, self, places=[factor])
        return self.program.add(SCALE, self.width, self, factors=[factor])

    __rmul__ = __mul__

    def _untold(self, *given: Any, **named: Any) -> Any:
        """Whatever else a formula does with it has no order."""
        raise Unsupported

    __getattr__ = __getitem__ = __neg__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __pow__ = _untold

    @classmethod
    def __torch_function__(cls, *given: Any, **named: Any) -> Any:
        raise Unsupported


class Program:
    """Orders so far. `slots`: caches they look at; `tables`: functions of a number of places that make a table of so
    many rows; `kept`: tensors they point to; `outputs`: values that are wanted afterwards."""

    def __init__(self) -> None:
        self.list: list[Order] = []
        self.widths: list[int] = []
        self.slots: list[Slot] = []
        self.tables: list[Callable[[int], Tensor]] = []
        self.kept: list[Tensor] = []
        self.outputs: list[Value] = []

    def value(self, width: int) -> Value:
        self.widths.append(width)
        return Value(self, len(self.widths) - 1, width)

    def add(
        self,
        kind: int,
        width: int,
        x: Value | None = None,
        other: Value | None = None,
        numbers: Sequence[int] = (),
        factors: Sequence[float] = (),
        places: Sequence[Tensor | None] = (),
    ) -> Value:
        out = self.value(width)
        order = Order(kind, -1 if x is None else x.number, -1 if other is None else other.number, out.number)
        order.numbers[: len(numbers)] = list(numbers)
        order.factors[: len(factors)] = list(factors)
        for n, place in enumerate(places):
            # weights stay as they are; what is added or scaled with is small, and in single precision
            order.places[n] = None if place is None else self.keep(place if place.dim() == 2 else single(place))
        self.list.append(order)
        return out

    def keep(self, tensor: Tensor) -> int:
        if tensor.device.type != "cpu":
            raise Unsupported
        self.kept.append(tensor.detach().contiguous())
        return self.kept[-1].data_ptr()

    def assigned(self) -> tuple[list[int], list[int]]:
        """Registers (widths) and which one each value has: one whose last reader has been gets another value."""
        last = {value.number: len(self.list) for value in self.outputs}
        for place, order in enumerate(self.list):
            for number in (order.input, order.other):
                last[number] = max(last.get(number, 0), place)
        free: dict[int, list[int]] = {}
        registers: list[int] = []
        chosen = [-1] * len(self.widths)
        leaving: dict[int, list[int]] = {}
        made = {order.output for order in self.list}
        for number, width in enumerate(self.widths):
            if number not in made:  # what is given
                registers.append(width)
                chosen[number] = len(registers) - 1
        for place, order in enumerate(self.list):
            width = self.widths[order.output]
            if free.get(width):
                chosen[order.output] = free[width].pop()
            else:
                registers.append(width)
                chosen[order.output] = len(registers) - 1
            leaving.setdefault(last.get(order.output, place), []).append(order.output)
            for number in leaving.pop(place, []):  # after the order itself: what it reads and writes lies apart
                free.setdefault(self.widths[number], []).append(chosen[number])
        return registers, chosen


def single(tensor: Tensor) -> Tensor:
    if tensor.dtype not in (*FORMS, torch.int32):
        raise Unsupported
    return tensor if tensor.dtype is torch.int32 else tensor.float()


# --- parts ------------------------------------------------------------------------------------------------------------


TOLD: dict[type, Callable[[Any, Any, Program], Value]] = {}


def told(part: Any, x: Any, program: Program) -> Value:
    if type(part) not in TOLD:  # a part made of another may do something else
        raise Unsupported
    return TOLD[type(part)](part, x, program)


def tells(kind: type) -> Callable[[Any], Any]:
    def noted(function: Any) -> Any:
        TOLD[kind] = function
        return function

    return noted


@tells(Int8Linear)
@tells(nn.Linear)
@tells(Joined)
def _map(part: Int8Linear | nn.Linear, x: Value, program: Program) -> Value:
    return product([part], x, program)


def product(maps: Sequence[nn.Module | None], x: Value, program: Program) -> Value:
    """What several maps make of one input, side by side."""
    eight = [one for one in maps if type(one) is Int8Linear]
    dense = [one for one in maps if isinstance(one, nn.Linear) and type(one) in (nn.Linear, Joined)]
    if len(eight) == len(maps):
        codes, step = (side_by_side([getattr(one, name) for one in eight]) for name in ("codes", "step"))
        return multiplied(codes, step, biases(eight), x, program)
    if len(dense) < len(maps):
        raise Unsupported
    return multiplied(side_by_side([one.weight for one in dense]), None, biases(dense), x, program)


def multiplied(weight: Tensor, step: Tensor | None, bias: Tensor | None, x: Value, program: Program) -> Value:
    """`step`: of numbers of 8 bits. The place between: for their sums, when they are packed."""
    form = EIGHT if step is not None else FORMS.get(weight.dtype)
    if form is None:
        raise Unsupported
    outputs, inputs = weight.shape
    numbers = [inputs, outputs, 0, form]
    return program.add(PRODUCT, outputs, x, numbers=numbers, places=[weight, step, None, bias])


def biases(maps: Sequence[Int8Linear] | Sequence[nn.Linear]) -> Tensor | None:
    if all(one.bias is None for one in maps):
        return None
    all_of: list[Any] = list(maps)
    return side_by_side([torch.zeros(m.out_features) if m.bias is None else m.bias.float() for m in all_of])


def side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def activated(function: Callable[[Tensor], Tensor]) -> int:
    for number, name in enumerate(NUMBERED):
        if ACTIVATIONS[name] is function:
            return number
    raise Unsupported


@tells(LayerNormModule)
def _layer_norm(part: LayerNormModule, x: Value, program: Program) -> Value:
    return program.add(NORM, x.width, x, numbers=[x.width, 1], factors=[part.eps, 0], places=[part.weight, part.bias])


@tells(RMSNormModule)
def _rms_norm(part: RMSNormModule, x: Value, program: Program) -> Value:
    factors = [part.eps, part.offset]
    return program.add(NORM, x.width, x, numbers=[x.width, 0], factors=factors, places=[part.weight, None])


@tells(FFNModule)
def _ffn(part: FFNModule, x: Value, program: Program) -> Value:
    hidden = told(part.up, x, program)
    program.list[-1].numbers[2] = activated(part.activation)  # in the same go
    return told(part.down, hidden if part.norm is None else told(part.norm, hidden, program), program)


@tells(GLUModule)
def _glu(part: GLUModule, x: Value, program: Program) -> Value:
    both = told(part.gate_up, x, program)
    hidden = program.add(GATE, both.width // 2, both, numbers=[activated(part.activation)])
    return told(part.down, hidden if part.norm is None else told(part.norm, hidden, program), program)


def plain(part: _Heads) -> None:
    """Attention that is softmax(q·k · scale) v, with nothing of its own between."""
    known = type(part.scores) is ScoresModule and type(part.relative) in (RelativeModule, RotaryModule)
    if not known or not part.score_mod().plain or part.q_norm is not None:
        raise Unsupported


def looked(part: _Heads, seen: Value, program: Program) -> Value:
    return told(part.out, seen if part.sub_norm is None else told(part.sub_norm, seen, program), program)


def attended(part: SelfAttention, x: Value, program: Program, layer: int, reads: bool) -> Value:
    """`reads`: all tokens see each other and nothing is remembered; else each sees those before it, which are."""
    plain(part)
    if type(part) is not SelfAttention or part.keeps_hidden or type(part.pattern) is not (Full if reads else Causal):
        raise Unsupported
    maps = [part.qkv] if part.qkv is not None else [part.q, part.k, part.v]
    both = product(maps, x, program)
    numbers = [part.heads, part.kv_heads, part.head_width, OWN if reads else CACHED, 0, 0, 0]
    if not reads:
        numbers[4] = len(program.slots)
        program.slots.append(Slot(layer, "mixer", part.kv_heads, part.head_width))
    if isinstance(part.relative, RotaryModule):
        numbers[5:7] = [part.relative.width // 2, len(program.tables)]
        program.tables += turns(part.relative)
    seen = program.add(ATTEND, part.inner, both, numbers=numbers, factors=[part.score_mod().scale])
    return looked(part, seen, program)


def turns(part: RotaryModule) -> list[Callable[[int], Tensor]]:
    """Tables (places, cosines and sines, planes) for queries and for keys."""
    if part.config.values or part.config.order != "halves":
        raise Unsupported

    def table(which: int, count: int) -> Tensor:
        found = part.tables(torch.arange(count)[None], torch.float32)[which]  # (2, 1, 1, places, planes)
        return found[:, 0, 0].transpose(0, 1).contiguous()

    return [partial(table, 0), partial(table, 1)]


def crossed(part: CrossAttention, x: Value, program: Program, layer: int) -> Value:
    plain(part)
    if type(part) is not CrossAttention or type(part.pattern) is not Full:
        raise Unsupported
    q = told(part.q, x, program)
    numbers = [part.heads, part.kv_heads, part.head_width, SOURCE, len(program.slots)]
    program.slots.append(Slot(layer, "cross", part.kv_heads, part.head_width))
    seen = program.add(ATTEND, part.inner, q, numbers=numbers, factors=[part.score_mod().scale])
    return looked(part, seen, program)


def sources(part: nn.Module, hidden: Value, program: Program) -> Value:
    """Keys and values that a cross-attention makes of a source, side by side."""
    if type(part) is not CrossAttention or part.k_norm is not None:
        raise Unsupported
    return product([part.kv] if part.kv is not None else [part.k, part.v], hidden, program)


@tells(ResiDualEnd)
def _residual_end(part: ResiDualEnd, x: Any, program: Program) -> Value:
    stream, dual = x
    return stream + told(part.norm, dual, program)


def stacked(stack: Stack, x: Any, program: Program, reads: bool) -> Value:
    """As `Stack.forward`."""
    if len(stack.recurrences):
        raise Unsupported
    stream: Any = stack.wirings[0].begin(x)
    for number, span in enumerate(stack.spans):
        if number and changes(stack.wirings[number - 1], stack.wirings[number]):
            joint = str(number - 1)
            closed: Any = told(stack.joints[joint], stream, program) if joint in stack.joints else stream
            stream = stack.wirings[number].begin(closed)
        for layer in span:
            stream = blocked(stack.blocks[layer], stream, program, layer, reads)
    return stream if stack.end is None else told(stack.end, stream, program)


def blocked(block: Any, stream: Any, program: Program, layer: int, reads: bool) -> Any:
    wiring = block.wiring
    if type(wiring) is not ResidualModule:
        raise Unsupported

    def called(name: str, part: nn.Module, x: Value) -> Value:
        if name == "mixer" and isinstance(part, SelfAttention):
            return attended(part, x, program, layer, reads)
        if name == "cross" and isinstance(part, CrossAttention):
            return crossed(part, x, program, layer)
        return told(part, x, program)

    def branch(number: int, name: str, part: nn.Module, x: Value) -> Value:
        y = called(name, part, x)
        return y if wiring.scale_start is None else y * wiring.scales[number]

    branches: list[Any] = [partial(branch, n, name, part) for n, (name, part) in enumerate(block.sublayers.items())]
    norms: list[Any] = [partial(told, norm, program=program) for norm in wiring.norms]
    return wiring.config.run(stream, branches, norms, wiring.depth)


def embedded(part: nn.Module, program: Program) -> Value:
    if type(part) is not TokenEmbedModule:
        raise Unsupported
    tokens: Any = part.tokens
    eight = type(tokens) is Int8Table
    if not eight and (type(tokens) is not nn.Embedding or tokens.weight.dtype not in FORMS):
        raise Unsupported
    if part.types is not None or part.asking is not None or part.chosen != "none":
        raise Unsupported
    table, positions = -1, part.positions
    if not isinstance(positions, NoPositionsModule):
        table = len(program.tables)
        most = part.limit
        program.tables.append(
            lambda n: positions(torch.arange(n if most is None else min(n, most))[None])[0].float().contiguous()
        )
    width, places = tokens.embedding_dim, [tokens.codes, tokens.step] if eight else [tokens.weight]
    numbers = [width, table, EIGHT if eight else FORMS[tokens.weight.dtype], tokens.num_embeddings]
    x = program.add(EMBED, width, numbers=numbers, factors=[part.scale], places=places)
    x = x if part.norm is None else told(part.norm, x, program)
    return x if part.widen is None else told(part.widen, x, program)


def scored(part: nn.Module, x: Value, program: Program) -> Value:
    if type(part) is not VocabularyHeadModule or part.soft_cap is not None:
        raise Unsupported
    if part.transform is not None or part.maxout is not None:
        raise Unsupported
    x = x if part.scale == 1.0 else x * part.scale
    if part.product is not None:
        return told(part.product, x, program)
    return multiplied(part.weight, None, part.bias, x, program)
