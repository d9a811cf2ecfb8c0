"""Lowering rules: what instructions a part becomes. A program is lowered operation by operation; a part without a rule,
or one its rule does not cover, becomes a call of the part itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.kernels.cpu.abi import Activation, Format, Keys, Kind
from allyouneed.nn.activations import ACTIVATIONS
from allyouneed.nn.channels.feedforward import FFNModule, GLUModule
from allyouneed.nn.embed.tokens import TokenEmbedModule
from allyouneed.nn.heads.vocabulary import VocabularyHeadModule
from allyouneed.nn.linear.dense import MergedLinear
from allyouneed.nn.linear.int8 import Int8Linear, Int8Table
from allyouneed.nn.mixers.attention.attention import CrossAttention, SelfAttention
from allyouneed.nn.mixers.attention.scores import ScoresModule
from allyouneed.nn.norms import LayerNormModule, RMSNormModule
from allyouneed.nn.patterns.core import Causal, Full
from allyouneed.nn.positions.absolute import NoPositionsModule
from allyouneed.nn.positions.relative import RelativeModule
from allyouneed.nn.positions.rotary import RotaryModule
from allyouneed.runtime.cpu.instructions import FORMATS, CacheSlot, Instructions, Register
from allyouneed.runtime.program import Add, Call, Function, Op, Program, Scale, StateSlot, Unsupported
from allyouneed.runtime.rules import Rules

lower = Rules("native instructions")  # rule(part, x, code, state) -> Register


def lower_program(program: Program, x: Register, code: Instructions) -> Register:
    """Append a program with this input; its output."""
    registers = {0: x}
    for op in program.ops:
        registers[op.output] = lower_op(op, [registers[number] for number in op.inputs], code, program)
    return registers[program.output]


def lower_op(op: Op, inputs: list[Register], code: Instructions, program: Program) -> Register:
    width = program.width(op.output)
    match op:
        case Add():
            return code.emit(Kind.ADD, width, inputs[0], inputs[1])
        case Scale():
            by = "factors" if isinstance(op.factor, Tensor) else "factor"
            return code.emit(Kind.SCALE, width, inputs[0], **{by: op.factor})
        case Function():
            return code.call(None, op, inputs, width, f"torch.{op.name} has no native instruction")
        case Call(part=part, state=state):
            try:
                with code.undo_if_unsupported():
                    found: Register = lower(part, inputs[0], code, state)
                    return found
            except Unsupported as reason:
                return code.call(part, op, inputs, width, str(reason))


def lower_embed(embed: nn.Module, width: int, code: Instructions) -> Register:
    try:
        with code.undo_if_unsupported():
            found: Register = lower(embed, None, code, None)
            return found
    except Unsupported as reason:
        return code.call(embed, None, [], width, str(reason))


# --- linear maps ------------------------------------------------------------------------------------------------------


@lower.register(Int8Linear, nn.Linear, MergedLinear)
def _linear(part: nn.Module, x: Register, code: Instructions, state: None = None) -> Register:
    return emit_product([part], x, code)


def emit_product(maps: Sequence[nn.Module | None], x: Register, code: Instructions) -> Register:
    """The outputs of several linear maps of one input, side by side."""
    quantized = [one for one in maps if type(one) is Int8Linear]
    dense = [one for one in maps if isinstance(one, nn.Linear) and type(one) in (nn.Linear, MergedLinear)]
    if len(quantized) == len(maps):
        codes, step = (concat([getattr(one, name) for one in quantized]) for name in ("codes", "step"))
        return emit_matmul(codes, step, concat_biases(quantized), x, code)
    if len(dense) < len(maps):
        other = next(one for one in maps if type(one) not in (nn.Linear, MergedLinear, Int8Linear))
        raise Unsupported(f"{type(other).__name__} has no native instructions")
    return emit_matmul(concat([one.weight for one in dense]), None, concat_biases(dense), x, code)


def emit_matmul(weight: Tensor, step: Tensor | None, bias: Tensor | None, x: Register, code: Instructions) -> Register:
    """`step`: the quantization step per output of int8 weights."""
    format = Format.INT8 if step is not None else FORMATS.get(weight.dtype)
    if format is None:
        raise Unsupported(f"its weights are {str(weight.dtype).removeprefix('torch.')}")
    outputs, inputs = weight.shape
    sizes = {"inputs": inputs, "outputs": outputs, "format": format}
    return code.emit(Kind.LINEAR, outputs, x, weight=weight, step=step, bias=bias, **sizes)


def concat_biases(maps: Sequence[Any]) -> Tensor | None:
    """A map without a bias adds zeros."""
    biases = [one.bias for one in maps]
    known = next((bias for bias in biases if bias is not None), None)
    if known is None:
        return None
    zeros = [known.new_zeros(one.out_features, dtype=torch.float32) for one in maps]
    return concat([zero if b is None else b.float() for b, zero in zip(biases, zeros, strict=True)])


def concat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


# --- norms and channel mixers -----------------------------------------------------------------------------------------


@lower.register(LayerNormModule)
def _layer_norm(part: LayerNormModule, x: Register, code: Instructions, state: None = None) -> Register:
    weights = {"weight": part.weight, "bias": part.bias}
    return code.emit(Kind.NORM, x.width, x, width=x.width, centred=1, eps=part.eps, **weights)


@lower.register(RMSNormModule)
def _rms_norm(part: RMSNormModule, x: Register, code: Instructions, state: None = None) -> Register:
    weights = {"weight": part.weight, "offset": part.offset}
    return code.emit(Kind.NORM, x.width, x, width=x.width, centred=0, eps=part.eps, **weights)


def activation_number(function: Callable[[Tensor], Tensor]) -> int:
    name = next((name for name, known in ACTIVATIONS.items() if known is function), "this activation")
    number: int | None = Activation.__members__.get(name.upper().replace("-", "_"))
    if number is None:
        raise Unsupported(f"{name} has no native instruction")
    return number


@lower.register(FFNModule)
def _ffn(part: FFNModule, x: Register, code: Instructions, state: None = None) -> Register:
    hidden = lower(part.up, x, code)
    code.last.linear.activation = activation_number(part.activation)  # fused into the product
    return down(part, hidden, code)


@lower.register(GLUModule)
def _glu(part: GLUModule, x: Register, code: Instructions, state: None = None) -> Register:
    both = lower(part.gate_up, x, code)
    gate = code.emit(Kind.GATE, both.width // 2, both, activation=activation_number(part.activation))
    return down(part, gate, code)


def down(part: FFNModule | GLUModule, hidden: Register, code: Instructions) -> Register:
    found: Register = lower(part.down, hidden if part.norm is None else lower(part.norm, hidden, code), code)
    return found


# --- attention --------------------------------------------------------------------------------------------------------


def check_attention(part: SelfAttention | CrossAttention, pattern: type) -> None:
    """Only softmax(q·k · scale) v under this pattern, with at most a rotation between."""
    if type(part.scores) is not ScoresModule or not part.score_mod().plain:
        what = type(part.relative).__name__ if part.relative.adds_bias or part.relative.adds_values else "its scores"
        raise Unsupported(f"attention scores other than scaled q·k ({what}) have no native instruction")
    if type(part.relative) not in (RelativeModule, RotaryModule):
        raise Unsupported(f"{type(part.relative).__name__} has no native instruction")
    if part.q_norm is not None:
        raise Unsupported("norms of queries and keys have no native instruction")
    if type(part.pattern) is not pattern:
        raise Unsupported(f"attention with pattern '{part.pattern}' has no native instruction")


def emit_attention(part: SelfAttention | CrossAttention, x: Register, code: Instructions, **arguments: int) -> Register:
    sizes = {"heads": part.heads, "kv_heads": part.kv_heads, "head_width": part.head_width}
    mixed = code.emit(Kind.ATTENTION, part.inner, x, scale=part.score_mod().scale, **sizes, **arguments)
    return attention_output(part, mixed, code)


def attention_output(part: SelfAttention | CrossAttention, seen: Register, code: Instructions) -> Register:
    found: Register = lower(part.out, seen if part.sub_norm is None else lower(part.sub_norm, seen, code), code)
    return found


@lower.register(SelfAttention)
def _self_attention(part: SelfAttention, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    """With a state each token sees itself and those before it; without one all tokens see each other."""
    check_attention(part, Full if state is None else Causal)
    if part.caches_hidden:
        raise Unsupported("a cache of hidden states has no native instruction")
    both = emit_product([part.qkv] if part.qkv is not None else [part.q, part.k, part.v], x, code)
    arguments = {"keys": Keys.SELF}
    if state is not None:
        arguments = {"keys": Keys.CACHED, "cache": len(code.caches)}
        code.caches.append(CacheSlot(state, part.kv_heads, part.head_width))
    if isinstance(part.relative, RotaryModule):
        arguments |= {"planes": part.relative.width // 2, "table": len(code.tables)}
        code.tables += rotary_tables(part.relative)
    return emit_attention(part, both, code, **arguments)


def rotary_tables(part: RotaryModule) -> list[Callable[[int], Tensor]]:
    """Tables (positions, cosines and sines, planes) for queries and for keys."""
    if part.config.values or part.config.order != "halves":
        raise Unsupported("rotary positions of values, or of interleaved pairs, have no native instruction")

    def table(which: int, count: int) -> Tensor:
        found = part.tables(torch.arange(count)[None], torch.float32)[which]  # (2, 1, 1, positions, planes)
        return found[:, 0, 0].transpose(0, 1).contiguous()

    return [partial(table, 0), partial(table, 1)]


@lower.register(CrossAttention)
def _cross_attention(part: CrossAttention, x: Register, code: Instructions, state: StateSlot | None) -> Register:
    check_attention(part, Full)
    if state is None:
        raise Unsupported("cross-attention without a state has no native instruction")
    q = lower(part.q, x, code)
    code.caches.append(CacheSlot(state, part.kv_heads, part.head_width))
    return emit_attention(part, q, code, keys=Keys.SOURCE, cache=len(code.caches) - 1)


def lower_source(part: CrossAttention, hidden: Register, code: Instructions) -> Register:
    """Keys and values that a cross-attention makes of a source, side by side."""
    return emit_product([part.kv] if part.kv is not None else [part.k, part.v], hidden, code)


# --- embedding and head -----------------------------------------------------------------------------------------------


@lower.register(TokenEmbedModule)
def _embed(part: TokenEmbedModule, x: None, code: Instructions, state: None = None) -> Register:
    tokens: Any = part.tokens
    quantized = type(tokens) is Int8Table
    if not quantized and (type(tokens) is not nn.Embedding or tokens.weight.dtype not in FORMATS):
        raise Unsupported(f"{type(tokens).__name__} has no native instruction for these weights")
    if part.types is not None or part.asking is not None or part.chosen != "none":
        raise Unsupported("embeddings with token types, queries or chosen tokens have no native instruction")
    table, positions = -1, part.positions
    if not isinstance(positions, NoPositionsModule):
        table = len(code.tables)
        limit = part.limit
        code.tables.append(
            lambda n: positions(torch.arange(n if limit is None else min(n, limit))[None])[0].float().contiguous()
        )
    width, arguments = tokens.embedding_dim, {"vocab": tokens.num_embeddings, "positions": table, "scale": part.scale}
    if quantized:
        arguments |= {"format": Format.INT8, "weight": tokens.codes, "step": tokens.step}
    else:
        arguments |= {"format": FORMATS[tokens.weight.dtype], "weight": tokens.weight}
    found = code.emit(Kind.EMBED, width, width=width, **arguments)
    found = found if part.norm is None else lower(part.norm, found, code)
    return found if part.widen is None else lower(part.widen, found, code)


@lower.register(VocabularyHeadModule)
def _head(part: VocabularyHeadModule, x: Register, code: Instructions, state: None = None) -> Register:
    if part.soft_cap is not None or part.transform is not None or part.maxout is not None:
        raise Unsupported("a head with soft_cap, transform or maxout has no native instructions")
    if part.scale != 1.0:
        x = code.emit(Kind.SCALE, x.width, x, factor=part.scale)
    if part.product is not None:
        found: Register = lower(part.product, x, code)
        return found
    return emit_matmul(part.weight, None, part.bias, x, code)
