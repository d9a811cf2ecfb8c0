"""Optimisers and their parameter groups.

The fused kernels of torch take two more tensors: `grad_scale`, by which gradients are divided, and `found_inf`, which
makes the whole update a no-op. Clipping and skipping a non-finite update thus happen on the device, without a sync.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from allyouneed.config import Part
from allyouneed.torch_private import move_towards, tensor_norms
from allyouneed.training.distributed.fsdp import distribute_like, sharded_norm
from allyouneed.training.distributed.tensor_parallel import row_orders, tensor_parallel_size

EMA = "ema"  # in the optimiser's state: the moving average of a weight
BLOCK = re.compile(r"(.*?)\.blocks\.(\d+)\.")
EMBEDDING = re.compile(r"(^|\.)(source_)?embed\.")
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Optimiser(Part, slot="optimiser", default="adam"):
    ema: Fraction | None = None
    """Decay of a moving average of the weights, which is validated and becomes the model (Polyak, Juditsky 1992);
    0.999 to 0.9999; default: none."""

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

    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Factor of the learning rate from each block to the one below it, embeddings last (Clark et al. 2020, "ELECTRA",
    appendix B); for fine-tuning, 0.65 to 0.9; default: the same rate for all."""

    @property
    def moments(self) -> int:
        return 2 if self.ema is None else 3

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            groups(model, self.weight_decay, self.layer_decay or 1.0, self.ema),
            lr=0.0,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            fused=True,
        )


def groups(
    model: nn.Module, weight_decay: float, layer_decay: float = 1.0, ema: float | None = None
) -> list[dict[str, Any]]:
    """Matrices decay; vectors and lookup tables (embeddings, a head tied to one) do not. One fused kernel updates a
    group, so parameters on different device meshes are in different groups, and those of different rates."""
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    depths = blocks_above(model)
    found: dict[tuple[bool, float, Any], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim >= 2 and id(parameter) not in looked_up
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            found.setdefault((decays, layer_decay ** depths[name], mesh), []).append(parameter)
    # decaying parameters first
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0, "scale": scale, "ema": ema}
        for (decays, scale, _), parameters in sorted(found.items(), key=lambda entry: not entry[0][0])
    ]


def blocks_above(model: nn.Module) -> dict[str, int]:
    """How many blocks of its stack are above each parameter; above an embedding, all of its tower's or model's, and
    one more; above a head none."""
    numbers = {name: BLOCK.match(name) for name, _ in model.named_parameters()}
    counts: dict[str, int] = {}
    for match in numbers.values():
        if match:
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    towers = {stack: stack.rpartition(".")[0] for stack in counts}

    def above(name: str, match: re.Match[str] | None) -> int:
        if match:
            return counts[match[1]] - int(match[2])
        inside = [count for stack, count in counts.items() if name.startswith(towers[stack])]
        return 1 + max(inside, default=0) if EMBEDDING.search(name) else 0

    return {name: above(name, match) for name, match in numbers.items()}


def apply_update(
    optimiser: torch.optim.Optimizer, rate: float | Tensor, norm: Tensor, clip: float | None, bad: Tensor
) -> None:
    """One update at this rate; gradients are divided by max(1, norm / clip); no update if `bad` is 1."""
    for group in optimiser.param_groups:
        scale = group.get("scale", 1.0)
        group["lr"] = rate if scale == 1 else rate * scale
    fused: Any = optimiser
    fused.grad_scale = None if clip is None else (norm / clip).clamp(min=1.0).float()
    fused.found_inf = bad
    optimiser.step()
    fused.grad_scale = fused.found_inf = None
    for group in optimiser.param_groups:
        if (decay := group.get("ema")) is not None:
            moved = [p for p in group["params"] if "exp_avg" in optimiser.state[p]]
            means = [optimiser.state[p].setdefault(EMA, p.detach().clone()) for p in moved]
            move_towards(means, [p.detach() for p in moved], 1 - decay)


@contextmanager
def averaged_weights(optimiser: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, the model has the moving averages of its weights, if the optimiser keeps them."""
    pairs = [(p, state[EMA]) for p, state in optimiser.state.items() if EMA in state]
    _exchange(pairs)
    try:
        yield
    finally:
        _exchange(pairs)


@torch.no_grad()
def _exchange(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """In place: captured graphs know the addresses of both."""
    for parameter, mean in pairs:
        own = parameter.detach().clone()
        parameter.copy_(mean)
        mean.copy_(own)


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
