"""Lowering rule of a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from allyouneed.kernels.cpu.abi import CONSTANTS, Kind
from allyouneed.nn.channels.feedforward import FFNModule, GLUModule
from allyouneed.nn.channels.moe import MoEModule
from allyouneed.nn.linear.dense import MergedLinear
from allyouneed.nn.linear.int8 import Int8Linear
from allyouneed.runtime.cpu.instructions import Instructions, Register
from allyouneed.runtime.cpu.lower import (
    activation_number,
    concat,
    concat_biases,
    emit_matmul,
    input_scale,
    joint_weight,
    lower,
    weight_format,
)
from allyouneed.runtime.program import Unsupported


@lower.register(MoEModule)
def _experts(part: MoEModule, x: Register, code: Instructions, state: Any = None) -> Register:
    """Tokens are sorted by expert; a product reads the weights of those experts that have tokens."""
    router, config = part.router, part.router.config
    count, top = len(part.experts), router.top
    if part.capacity is not None or part.row_capacity is not None:
        raise Unsupported("experts with a capacity have no native instruction")
    if count > CONSTANTS["MAX_EXPERTS"]:
        raise Unsupported(f"more than {CONSTANTS['MAX_EXPERTS']} experts have no native instruction")
    kinds = {type(expert) for expert in part.experts}
    if kinds not in ({FFNModule}, {GLUModule}):
        raise Unsupported("experts other than FFN and GLU have no native instruction")
    experts: list[Any] = list(part.experts)
    if any(expert.norm is not None for expert in experts):
        raise Unsupported("norms inside experts have no native instruction")
    logits = emit_matmul(router.linear.weight, None, router.linear.bias, x, code)
    groups = config.groups
    routing = code.emit(
        Kind.ROUTE,
        2 * top + count + 1,
        logits,
        experts=count,
        top=top,
        sigmoid=config.scores == "sigmoid",
        normalise=config.normalise,
        scale=config.scale,
        correction=router.correction,
        groups=0 if groups is None else groups.count,
        top_groups=0 if groups is None else groups.top,
        two_best=groups is not None and groups.score == "two-best",
    )
    width, activation = x.width, activation_number(experts[0].activation)
    rows = code.emit(Kind.SPREAD, width, x, routing, into=code.register(top * width))
    if kinds == {FFNModule}:
        hidden = emit_experts([expert.up for expert in experts], rows, routing, top, code, activation=activation)
    else:
        both = emit_experts([expert.gate_up for expert in experts], rows, routing, top, code)
        half = both.width // top // 2
        hidden = code.register(top * half)
        for row in range(top):
            gate, up = both.part(2 * half * row, half), both.part(2 * half * row + half, half)
            code.emit(Kind.GATE, half, gate, up, into=hidden.part(half * row, half), activation=activation)
    found = emit_experts([expert.down for expert in experts], hidden, routing, top, code)
    mixed = code.emit(Kind.COMBINE, found.width // top, found, routing)
    if part.shared is None:
        return mixed
    return code.emit(Kind.ADD, mixed.width, mixed, lower(part.shared, x, code, state))


def emit_experts(
    maps: Sequence[Any], rows: Register, routing: Register, top: int, code: Instructions, **arguments: Any
) -> Register:
    """Each row of a token through the map of its expert."""
    kinds = {type(one) for one in maps}
    if not kinds <= {Int8Linear} and not kinds <= {nn.Linear, MergedLinear}:
        raise Unsupported("experts of other linear maps have no native instruction")
    if any(input_scale(one) for one in maps):
        raise Unsupported("experts with a fixed scale of their inputs have no native instruction")
    weights = [joint_weight([one]) for one in maps]
    addresses = torch.tensor([code.keep(weight) for weight, _ in weights])
    steps = [step for _, step in weights if step is not None]
    (outputs, inputs), step = weights[0][0].shape, concat(steps) if steps else None
    arguments |= {"inputs": inputs, "outputs": outputs, "format": weight_format(*weights[0]), "step": step}
    arguments |= {"weight": code.keep(addresses), "bias": concat_biases(maps), "experts": len(maps), "top": top}
    return code.emit(Kind.LINEAR, outputs, rows, routing, into=code.register(top * outputs), **arguments)
