"""Loading weights: build on the meta device without memory, then assign tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from allyouneed.nn.models.base import Model
from allyouneed.torch_private import settle_rnn_weights


def meta_model(config: Model) -> nn.Module:
    """The model on the meta device: no memory, no initialisation, whatever its size."""
    with torch.device("meta"), _SkipInit():
        return config.build()


class _SkipInit(TorchFunctionMode):
    """Skips initialisation of meta tensors, for which torch would import its compiler (a second or more)."""

    FILLS = (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        return (args[0] if args else given["tensor"]) if func in self.FILLS else func(*args, **given)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers; a tied tensor appears once."""
    persistent = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, tensor in persistent.items():
        first.setdefault(id(tensor), name)
    return {name: persistent[name] for name in first.values()}


def assign_weights(model: nn.Module, found: Mapping[str, Tensor]) -> None:
    """Replace the model's tensors by these, by the names of `named_tensors`; tied tensors stay tied."""
    own = named_tensors(model)
    new = {
        id(own[name]): nn.Parameter(tensor, own[name].requires_grad and tensor.is_floating_point())
        if isinstance(own[name], nn.Parameter)
        else tensor
        for name, tensor in found.items()
    }
    for module in model.modules():
        replaced = False
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) in new:
                    tensors[name], replaced = new[id(tensor)], True  # type: ignore[assignment]
        if replaced and isinstance(module, nn.RNNBase):
            settle_rnn_weights(module)


def dtype_problem(stored: torch.dtype, wanted: torch.dtype) -> str | None:
    """Why weights of one dtype cannot take the place of another: floats stay floats, codes are read unchanged."""
    name = str(stored).removeprefix("torch.")
    if wanted.is_floating_point:
        return None if stored.is_floating_point and stored.itemsize > 1 else f"{name} instead of floating point"
    return None if stored == wanted else f"{name} instead of {str(wanted).removeprefix('torch.')}"


def cast_weights(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Cast all weights to `dtype`; default: the dtype of most weight bytes."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in named_tensors(model).values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    wanted = dtype or max(sizes, key=lambda kind: sizes[kind], default=torch.float32)
    if set(sizes) - {wanted}:
        cast = {name: t for name, t in named_tensors(model).items() if t.is_floating_point() and t.dtype != wanted}
        for name, tensor in cast.items():  # one at a time, so that only one tensor exists twice
            assign_weights(model, {name: tensor.detach().to(wanted)})


def widen_half_for_cpu(model: nn.Module) -> None:
    """Cast float16 to float32 (exact): CPUs multiply float16 matrices slowly or not at all."""
    if any(tensor.dtype == torch.float16 for tensor in named_tensors(model).values()):
        cast_weights(model, torch.float32)
