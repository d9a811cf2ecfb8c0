"""Models that are stored, and computed with, in fewer bits than they were trained in. A folder's config says which
(`stored`); its model is built as always and shrunk before its weights are put in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from allyouneed.errors import UserError
from allyouneed.nn.linear.bitlinear import BitLinear
from allyouneed.nn.linear.int8 import Int8Linear, Int8Table, to_int8
from allyouneed.nn.linear.ternary import PackedBitLinear, pack
from allyouneed.nn.models.weights import named, one_dtype


def _int8(model: nn.Module) -> nn.Module:
    if not any(isinstance(part, Int8Linear) for part in to_int8(model).modules()):
        raise UserError("int8: the model has no dense map to store so")
    return model


def _bf16(model: nn.Module) -> nn.Module:
    one_dtype(model, torch.bfloat16)
    return model.eval()


def _ternary(model: nn.Module) -> nn.Module:
    if not any(isinstance(part, BitLinear | PackedBitLinear) for part in model.modules()):
        raise UserError(
            "ternary: the model's maps are not of kind 'bit', and no rounding makes them so without training; train "
            "one with `linear: {kind: bit}`, or store this one as int8"
        )
    return pack(model)


STORED: dict[str, Callable[[nn.Module], nn.Module]] = {"int8": _int8, "bf16": _bf16, "ternary": _ternary}


def quantize(model: nn.Module, manner: str) -> nn.Module:
    """The model itself, in this manner. It does not train any more (bf16 does)."""
    if manner not in STORED:
        raise UserError(f"stored as {manner!r}: it may be {', '.join(STORED)}")
    return STORED[manner](model)


def dequantize(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model by the names of one that trains: what was stored in eight bits, in 32. What two bits stand
    for was lost when they were packed."""
    if (manner := stored_as(model)) == "ternary":
        raise UserError(f"its weights are stored as {manner}, which cannot be trained; start from what it was made of")
    found, wide = named(model), {}
    for name, tensor in found.items():
        home, _, leaf = name.rpartition(".")
        if leaf == "codes":
            tensor, leaf = tensor * found[f"{home}.step"][:, None], "weight"
        elif leaf == "step" and f"{home}.codes" in found:
            continue
        wide[".".join(part for part in (*home.split("."), leaf) if part != "product")] = tensor
    return wide


def stored_as(model: nn.Module) -> str | None:
    """The manner of a model that was shrunk; None where its weights are plain tensors of some precision."""
    for part in model.modules():
        if isinstance(part, Int8Linear | Int8Table):
            return "int8"
        if isinstance(part, PackedBitLinear):
            return "ternary"
    return None
