"""Optimisers and their parameter groups.

The fused kernels of torch take two more tensors: `grad_scale`, by which gradients are divided, and `found_inf`, which
makes the whole update a no-op. Clipping and skipping a non-finite update thus happen on the device, without a sync.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from allyouneed.config import Part
from allyouneed.torch_private import tensor_norms
from allyouneed.training.distributed.fsdp import distribute_like, sharded_norm
from allyouneed.training.distributed.tensor_parallel import row_orders, tensor_parallel_size

Fraction = Annotated[float, Field(ge=0, lt=1)]


class Optimiser(Part, slot="optimiser", default="adam"):
    @abstractmethod
    def build(self, model: nn.Module) -> torch.optim.Optimizer: ...

    @property
    @abstractmethod
    def moments(self) -> int:
        """Values stored per parameter."""


class Adam(Optimiser):
    """Kingma, Ba 2015, with the paper's β and ε (5.3). Weight decay is decoupled (Loshchilov, Hutter 2019)."""

    kind: Literal["adam"] = "adam"
    beta1: Fraction = 0.9
    """Decay of the mean of gradients."""
    beta2: Fraction = 0.98
    """Decay of the mean of squared gradients."""
    eps: PositiveFloat = 1e-9
    """Added to the root of the mean square."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of matrices; not of norms, biases and embeddings."""

    @property
    def moments(self) -> int:
        return 2

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            groups(model, self.weight_decay), lr=0.0, betas=(self.beta1, self.beta2), eps=self.eps, fused=True
        )


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; vectors and lookup tables (embeddings, a head tied to one) do not. One fused kernel updates a
    group, so parameters on different device meshes are in different groups."""
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    found: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            decays = parameter.ndim >= 2 and id(parameter) not in looked_up
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            found.setdefault((decays, mesh), []).append(parameter)
    # decaying parameters first
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0}
        for (decays, _), parameters in sorted(found.items(), key=lambda entry: not entry[0][0])
    ]


def apply_update(
    optimiser: torch.optim.Optimizer, rate: float | Tensor, norm: Tensor, clip: float | None, bad: Tensor
) -> None:
    """One update at this rate; gradients are divided by max(1, norm / clip); no update if `bad` is 1."""
    for group in optimiser.param_groups:
        group["lr"] = rate
    fused: Any = optimiser
    fused.grad_scale = None if clip is None else (norm / clip).clamp(min=1.0).float()
    fused.found_inf = bad
    optimiser.step()
    fused.grad_scale = fused.found_inf = None


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The global norm of all gradients, on the device."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if any(isinstance(gradient, DTensor) for gradient in gradients):
        return sharded_norm(gradients)
    return torch.linalg.vector_norm(torch.stack(tensor_norms(gradients)))


# --- state by name -------------------------------------------------------------------------------------------------


def state_tensors(optimiser: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimiser's state, as `exp_avg/encoder.blocks.0…`; empty before the first update."""
    return {
        f"{key}/{name}": value.detach()
        for name, parameter in model.named_parameters()
        for key, value in optimiser.state.get(parameter, {}).items()
    }


def load_state_tensors(optimiser: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    parameters, orders = dict(model.named_parameters()), row_orders(model, tensor_parallel_size(model))
    optimiser.state.clear()
    for path, tensor in tensors.items():
        key, _, name = path.partition("/")
        parameter = parameters[name]
        own = tensor if isinstance(tensor, DTensor) else distribute_like(tensor, parameter, orders.get(name))
        optimiser.state[parameter][key] = own
