"""Weights from somewhere else: a model is built hollow, without memory for its weights, and they are put into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from allyouneed.nn.models.base import Model


def meta_model(config: Model) -> nn.Module:
    """The model without weights. Nothing is drawn and nothing taken: whatever its size, it costs no memory."""
    with torch.device("meta"), _NothingDrawn():
        return config.build()


class _NothingDrawn(TorchFunctionMode):
    """Filling what has no memory does nothing, but torch loads its compiler to do it, which takes a second or more."""

    FILLS = (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        return (args[0] if args else given["tensor"]) if func in self.FILLS else func(*args, **given)


def named(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, each once: a tied matrix has one name."""
    persistent = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, tensor in persistent.items():
        first.setdefault(id(tensor), name)
    return {name: persistent[name] for name in first.values()}


def assign_weights(model: nn.Module, found: Mapping[str, Tensor]) -> None:
    """These tensors take the places of the model's own, by the names of `named`; what was tied stays tied."""
    own = named(model)
    new = {
        id(own[name]): nn.Parameter(tensor, own[name].requires_grad and tensor.is_floating_point())
        if isinstance(own[name], nn.Parameter)
        else tensor
        for name, tensor in found.items()
    }
    for module in model.modules():
        for places in (module._parameters, module._buffers):
            for name, tensor in places.items():
                if tensor is not None and id(tensor) in new:
                    places[name] = new[id(tensor)]  # type: ignore[assignment]


def one_dtype(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """All weights in this precision; if none is given, in that which most of them have."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in named(model).values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    wanted = dtype or max(sizes, key=lambda kind: sizes[kind], default=torch.float32)
    if set(sizes) - {wanted}:
        cast = {name: t for name, t in named(model).items() if t.is_floating_point() and t.dtype != wanted}
        for name, tensor in cast.items():  # one at a time: a second copy of one, not of all
            assign_weights(model, {name: tensor.detach().to(wanted)})


def suit_cpu(model: nn.Module) -> None:
    """Half precision is widened, which changes no number: processors multiply matrices of float16 far more slowly than
    those of float32, and some do not at all."""
    if any(tensor.dtype == torch.float16 for tensor in named(model).values()):
        one_dtype(model, torch.float32)


__all__ = ["hollow", "named", "one_dtype", "put", "suit_cpu"]
