"""Lowering rules: what instructions a part becomes. A program is lowered operation by operation; a part without a rule,
or one its rule does not cover, becomes a call of the part itself. Rules of token mixers: lower_attention.py,
lower_linear_attention.py, lower_mixers.py, lower_recurrent.py, lower_state_space.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.kernels.cpu.abi import Activation, Format, Kind
from allyouneed.nn.channels.feedforward import FFNModule, GLUModule
from allyouneed.nn.embed.tokens import TokenEmbedModule
from allyouneed.nn.heads.vocabulary import VocabularyHeadModule
from allyouneed.nn.linear.bitlinear import BitLinear, quantize_ternary
from allyouneed.nn.linear.dense import MergedLinear
from allyouneed.nn.linear.int8 import Int8Linear, Int8Table
from allyouneed.nn.linear.ternary import PackedBitLinear, unpack_weights
from allyouneed.nn.norms import BatchNormModule, LayerNormModule, RMSNormModule, ScaleNormModule
from allyouneed.nn.ops.activations import ACTIVATIONS
from allyouneed.nn.positions.absolute import NoPositionsModule
from allyouneed.runtime.cpu.instructions import FORMATS, Instructions, Register
from allyouneed.runtime.program import Add, Call, Function, Op, Program, Scale, Unsupported
from allyouneed.runtime.rules import Rules

lower = Rules("native instructions", __name__)  # rule(part, x, code, state) -> Register


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
            factor: dict[str, Any] = {"factors" if isinstance(op.factor, Tensor) else "factor": op.factor}
            return code.emit(Kind.SCALE, width, inputs[0], **factor)
        case Function(function=torch.cat, args=([*values], -1)) if len(values) == len(inputs):
            return emit_joined(inputs, code)
        case Function():
            return code.call(None, op, inputs, width, f"torch.{op.name} has no native instruction")
        case Call(part=part, state=state):
            try:
                with code.undo_if_unsupported():
                    return lower(part, inputs[0], code, state)
            except Unsupported as reason:
                return code.call(part, op, inputs, width, str(reason))


def emit_joined(parts: Sequence[Register], code: Instructions) -> Register:
    """Features side by side."""
    joint, at = code.register(sum(part.width for part in parts)), 0
    for part in parts:
        code.emit(Kind.COPY, part.width, part, into=joint.part(at, part.width))
        at += part.width
    return joint


def lower_embed(embed: nn.Module, width: int, code: Instructions) -> Register:
    try:
        with code.undo_if_unsupported():
            return lower(embed, None, code, None)
    except Unsupported as reason:
        return code.call(embed, None, [], width, str(reason))


# --- linear maps ------------------------------------------------------------------------------------------------------


@lower.register(Int8Linear, nn.Linear, MergedLinear)
def _linear(part: nn.Module, x: Register, code: Instructions, state: None = None) -> Register:
    return emit_product([part], x, code)


@lower.register(BitLinear, PackedBitLinear)
def _bit_linear(part: BitLinear | PackedBitLinear, x: Register, code: Instructions, state: None = None) -> Register:
    return emit_product([part], x, code)


def emit_product(maps: Sequence[nn.Module | None], x: Register, code: Instructions) -> Register:
    """The outputs of several linear maps of one input, side by side."""
    kinds = {type(one) for one in maps}
    if kinds <= {BitLinear, PackedBitLinear}:
        return emit_bit_product(maps, x, code)
    if kinds <= {Int8Linear, nn.Linear, MergedLinear}:
        scales = {input_scale(one) for one in maps}
        if len(maps) == 1 or (kinds == {Int8Linear} and len(scales) == 1):  # they are packed into other memory anyway
            weight, step = joint_weight(maps)
            return emit_matmul(weight, step, concat_biases(maps), x, code, input_scale=scales.pop())
        both, at = code.register(sum(map(output_width, maps))), 0
        for part in maps:  # without a copy of their weights
            weight, step = joint_weight([part])
            into = both.part(at, len(weight))
            emit_matmul(weight, step, concat_biases([part]), x, code, into=into, input_scale=input_scale(part))
            at += len(weight)
        return both
    other = next(kind for kind in kinds if kind not in (nn.Linear, MergedLinear, Int8Linear))
    raise Unsupported(f"{other.__name__} has no native instructions")


def input_scale(part: Any) -> float:
    """0: each token has its own range."""
    scale: Tensor | None = getattr(part, "input_scale", None)
    return 0.0 if scale is None or scale.is_meta else float(scale)


def joint_weight(maps: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """The weights of several linear maps (outputs, inputs) and, of int8 ones, their steps (outputs)."""
    quantized = [one for one in maps if type(one) is Int8Linear]
    if len(quantized) == len(maps):
        return concat([one.codes for one in quantized]), concat([one.step for one in quantized])
    if quantized:
        raise Unsupported("int8 and float maps of one input have no native instruction")
    return concat([one.weight for one in maps]), None


def emit_bit_product(maps: Sequence[Any], x: Register, code: Instructions) -> Register:
    """Ternary weights as int8, with activations rounded as BitNet does."""
    norms = [part.norm for part in maps]
    if any(norm is not None for norm in norms):
        if len(maps) > 1:
            raise Unsupported("several BitNet maps with norms of one input have no native instruction")
        x = lower(norms[0], x, code)
    codes, steps = zip(*map(ternary_weight, maps), strict=True)
    return emit_matmul(concat(codes), concat(steps), concat_biases(maps), x, code, symmetric=1)


def ternary_weight(part: BitLinear | PackedBitLinear) -> tuple[Tensor, Tensor]:
    if isinstance(part, PackedBitLinear):
        return unpack_weights(part.packed, part.inputs), part.step.float()
    weight, step = quantize_ternary(part.weight.detach(), part.outputs)
    return weight.to(torch.int8), step


def emit_matmul(
    weight: Tensor, step: Tensor | None, bias: Tensor | None, x: Register, code: Instructions, **arguments: Any
) -> Register:
    """`step`: the quantization step per output of int8 weights."""
    outputs, inputs = weight.shape
    sizes: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "format": weight_format(weight, step)}
    return code.emit(Kind.LINEAR, outputs, x, weight=weight, step=step, bias=bias, **sizes, **arguments)


def weight_format(weight: Tensor, step: Tensor | None) -> int:
    format = Format.INT8 if step is not None else FORMATS.get(weight.dtype)
    if format is None:
        raise Unsupported(f"its weights are {str(weight.dtype).removeprefix('torch.')}")
    return format


def concat_biases(maps: Sequence[Any]) -> Tensor | None:
    """A map without a bias adds zeros."""
    biases = [one.bias for one in maps]
    known = next((bias for bias in biases if bias is not None), None)
    if known is None:
        return None
    zeros = [known.new_zeros(output_width(one), dtype=torch.float32) for one in maps]
    return concat([zero if b is None else b.float() for b, zero in zip(biases, zeros, strict=True)])


def output_width(part: Any) -> int:
    return part.outputs if isinstance(part, PackedBitLinear) else part.out_features


def concat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


# --- norms and channel mixers -----------------------------------------------------------------------------------------


@lower.register(LayerNormModule)
def _layer_norm(part: LayerNormModule, x: Register, code: Instructions, state: None = None) -> Register:
    return emit_norm(part, x, code)


@lower.register(RMSNormModule, ScaleNormModule)
def _rms_norm(part: RMSNormModule | ScaleNormModule, x: Register, code: Instructions, state: None = None) -> Register:
    return emit_norm(part, x, code)


@lower.register(BatchNormModule)
def _batch_norm(part: BatchNormModule, x: Register, code: Instructions, state: None = None) -> Register:
    """Moving averages give a factor and a summand per feature."""
    if part.training:
        raise Unsupported("batch norm in training has no native instruction")
    assert part.weight is not None and part.bias is not None
    factors = part.weight.detach().float() * torch.rsqrt(part.running_var.float() + part.eps)
    added = part.bias.detach().float() - part.running_mean.float() * factors
    return code.emit(Kind.SCALE, x.width, x, factors=factors, added=added)


def emit_norm(
    part: nn.Module | None, x: Register, code: Instructions, groups: int = 1, into: Register | None = None
) -> Register:
    """Each group of features apart, with the same weights."""
    arguments: dict[str, Any] = {"groups": groups}
    if type(part) is LayerNormModule:
        arguments |= {"centred": 1, "eps": part.eps, "weight": part.weight, "bias": part.bias}
    elif type(part) is RMSNormModule:
        arguments |= {"centred": 0, "eps": part.eps, "weight": part.weight, "offset": part.offset}
    elif type(part) is ScaleNormModule:  # x / ‖x‖ is RMSNorm's result over √width
        width = x.width // groups
        assert part.weight is not None
        weight = (part.weight.detach().float() * width**-0.5).expand(width)
        arguments |= {"centred": 0, "eps": part.eps**2 / width, "weight": weight}
    else:
        raise Unsupported(f"{type(part).__name__} has no native instruction")
    return code.emit(Kind.NORM, x.width, x, into=into, **arguments)


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
    return down(part, emit_gate(both, activation_number(part.activation), code), code)


def emit_gate(both: Register, activation: int, code: Instructions) -> Register:
    """activation(first half) · second half"""
    half = both.width // 2
    return code.emit(Kind.GATE, half, both.part(0, half), both.part(half, half), activation=activation)


def down(part: FFNModule | GLUModule, hidden: Register, code: Instructions) -> Register:
    return lower(part.down, hidden if part.norm is None else lower(part.norm, hidden, code), code)


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
        if any(weight.dtype is not torch.float32 for weight in positions.parameters()):
            positions = copy.deepcopy(positions).float()  # so that a sum of its vectors is not rounded
        made = positions
        code.tables.append(
            lambda n: made(torch.arange(n if limit is None else min(n, limit))[None])[0].float().contiguous()
        )
    width, arguments = tokens.embedding_dim, {"vocab": tokens.num_embeddings, "positions": table, "scale": part.scale}
    if quantized:
        arguments |= {"format": Format.INT8, "weight": tokens.codes, "step": tokens.step}
    else:
        arguments |= {"format": FORMATS[tokens.weight.dtype], "weight": tokens.weight}
    found = code.emit(Kind.EMBED, width, **arguments)
    found = found if part.norm is None else lower(part.norm, found, code)
    return found if part.widen is None else lower(part.widen, found, code)


@lower.register(VocabularyHeadModule)
def _head(part: VocabularyHeadModule, x: Register, code: Instructions, state: None = None) -> Register:
    if part.transform is not None or part.maxout is not None:
        raise Unsupported("a head with transform or maxout has no native instructions")
    if part.scale != 1.0:
        x = code.emit(Kind.SCALE, x.width, x, factor=part.scale)
    product = part.product
    found: Register = emit_matmul(part.weight, None, part.bias, x, code) if product is None else lower(product, x, code)
    return found if part.soft_cap is None else emit_cap(found, part.soft_cap, code)


def emit_cap(x: Register, cap: float, code: Instructions) -> Register:
    """cap · tanh(x / cap)"""
    code.emit(Kind.SCALE, x.width, x, into=x, factor=1 / cap)
    code.emit(Kind.ACTIVATE, x.width, x, into=x, activation=Activation.TANH)
    return code.emit(Kind.SCALE, x.width, x, into=x, factor=cap)
