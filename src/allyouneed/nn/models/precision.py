"""Models stored and run at reduced precision (`stored` in the config of a folder): built as usual, quantized, then
loaded."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor, nn

from allyouneed.errors import UserError
from allyouneed.nn.embed.tokens import EmbedModule
from allyouneed.nn.heads.vocabulary import VocabularyHeadModule
from allyouneed.nn.linear.bitlinear import BitLinear
from allyouneed.nn.linear.dense import MergedLinear
from allyouneed.nn.linear.int8 import Int8Codes, Int8Linear, Int8Table, Int8Weight
from allyouneed.nn.linear.ternary import PackedBitLinear, pack_model
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.weights import assign_weights, cast_weights, meta_model, named_tensors


def to_int8(model: nn.Module, stored: Container[str] = (), known: Mapping[int, Int8Weight] | None = None) -> nn.Module:
    """Quantize dense maps, LSTMs, GRUs, token embeddings and the vocabulary head to int8 in place; everything else
    becomes fp32. The model can no longer be trained. `stored`: names of the tensors that will be loaded: in files of
    earlier versions LSTMs and GRUs are floats, and some maps have a scale for their inputs. `known`: codes of weights,
    by their id, that were int8 before.

    Shared weights stay shared. To load the `state_dict` of such a model: build, `to_int8`, load.
    """

    known = dict(known or {})  # by id of the weight
    keep: list[Tensor] = []  # keeps ids unique

    def linear(path: str, weight: Tensor, bias: Tensor | None) -> Int8Linear:
        scale = torch.empty((), device=weight.device) if f"{path}.input_scale" in stored else None
        return Int8Linear(codes(weight), bias, scale)

    def codes(weight: Tensor) -> Int8Weight:
        if id(weight) not in known:
            known[id(weight)] = Int8Weight.of(weight)
            keep.append(weight)
        return known[id(weight)]

    made: dict[nn.Module, nn.Module] = {}
    for path, parent in list(model.named_modules()):
        if hasattr(parent, "rnn_to_int8") and f"{path}.rnn.weight_ih_l0" not in stored:
            parent.rnn_to_int8()
        if isinstance(parent, VocabularyHeadModule) and parent.product is None:
            parent.set_product(linear(f"{path}.product", parent.weight, parent.bias))
        if isinstance(parent, EmbedModule) and type(getattr(parent, "tokens", None)) is nn.Embedding:
            tokens = parent.tokens
            made[tokens] = made.get(tokens) or Int8Table(codes(tokens.weight))
            parent.tokens = made[tokens]  # type: ignore[assignment]
        for name, child in list(parent.named_children()):
            if (
                isinstance(child, nn.Linear)
                and type(child) in (nn.Linear, MergedLinear)
                and not getattr(parent, "exact", False)
            ):
                made[child] = made.get(child) or linear(f"{path}.{name}", child.weight, child.bias)
                setattr(parent, name, made[child])
    return model.float().eval()


def _int8(model: nn.Module, stored: Container[str]) -> nn.Module:
    if not any(isinstance(part, Int8Linear) for part in to_int8(model, stored).modules()):
        raise UserError("int8: the model has no dense linear map to quantize")
    return model


def _bf16(model: nn.Module, stored: Container[str]) -> nn.Module:
    cast_weights(model, torch.bfloat16)
    return model.eval()


def _ternary(model: nn.Module, stored: Container[str]) -> nn.Module:
    if not any(isinstance(part, BitLinear | PackedBitLinear) for part in model.modules()):
        raise UserError(
            "ternary: needs linear maps of kind 'bit', which must be trained as such; train "
            "with `linear: {kind: bit}`, or store this model as int8"
        )
    return pack_model(model)


def _ternary_int8(model: nn.Module, stored: Container[str]) -> nn.Module:
    return to_int8(_ternary(model, stored), stored)


STORED: dict[str, Callable[[nn.Module, Container[str]], nn.Module]] = {
    "int8": _int8,
    "bf16": _bf16,
    "ternary": _ternary,
    "ternary-int8": _ternary_int8,  # what is not ternary, embedding and vocabulary head above all, as int8
}


def quantize(model: nn.Module, precision: str, stored: Container[str] = ()) -> nn.Module:
    """Convert the model in place. It can no longer be trained (except bf16). `stored`: names of the tensors of the file
    that it is loaded from; in int8 files of earlier versions, LSTMs and GRUs are floats."""
    if precision not in STORED:
        raise UserError(f"unknown precision {precision!r} (allowed: {', '.join(STORED)})")
    return STORED[precision](model, stored)


def dequantize(model: nn.Module) -> dict[str, Tensor]:
    """Weights under the names of the trainable model, int8 dequantized to fp32. The trained weights behind ternary ones
    are lost."""
    if (precision := stored_as(model)) in ("ternary", "ternary-int8"):
        raise UserError(f"weights stored as {precision} cannot be trained; start from the original model")
    return _plain_weights(model)


def widen(model: nn.Module) -> nn.Module:
    """The same model with plain weights, for libraries that do not read our storage formats: int8 and ternary weights
    become floats of the same value. A plain model is returned as it is."""
    if stored_as(model) is None:
        return model
    config: Model = model.config  # type: ignore[assignment]
    plain = meta_model(config)
    assign_weights(plain, _plain_weights(model))
    return plain.eval()


def _plain_weights(model: nn.Module) -> dict[str, Tensor]:
    found, weights = named_tensors(model), {}
    for name, tensor in found.items():
        home, _, leaf = name.rpartition(".")
        if leaf == "codes":
            tensor, leaf = tensor * found[f"{home}.step"][:, None], "weight"
            if type(model.get_submodule(home)) is Int8Codes:  # of an LSTM or GRU
                home, _, leaf = home.rpartition(".")
        elif leaf == "packed":
            packed = model.get_submodule(home)
            assert isinstance(packed, PackedBitLinear)
            tensor, leaf = packed.latent_weight(), "weight"
        elif leaf == "input_scale" or (leaf == "step" and (f"{home}.codes" in found or f"{home}.packed" in found)):
            continue
        weights[".".join(part for part in (*home.split("."), leaf) if part != "product")] = tensor
    return weights


def stored_as(model: nn.Module) -> str | None:
    """Stored precision of a quantized model; None for plain tensors."""
    kinds = {type(part) for part in model.modules()}
    int8 = not kinds.isdisjoint({Int8Linear, Int8Table})
    if PackedBitLinear in kinds:
        return "ternary-int8" if int8 else "ternary"
    return "int8" if int8 else None
