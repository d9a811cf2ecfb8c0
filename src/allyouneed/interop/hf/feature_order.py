"""Permuting the features of a Transformer gives the same Transformer: attention, channels and norms are permutation
equivariant, only sinusoids fix an order. So a model with the paper's sinusoids (sine, cosine, sine, cosine, …) can be
written for families that have all sines before all cosines, once its weights are permuted accordingly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allyouneed.config import override, parse, tree_of
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.weights import assign_weights, meta_model, named_tensors

# maps whose columns are model features, maps whose rows are, and norms
INPUT_MAPS = ("tokens", "q", "k", "v", "qkv", "kv", "up", "gate_up", "head")
OUTPUT_MAPS = ("out", "down")
NORMS = ("norms", "end", "norm")


def sines_first(config: Model) -> Model:
    """The equivalent config with all sines before all cosines; any other config unchanged."""
    tree = tree_of(config)
    embeds = [name for name in ("embed", "source_embed") if _is_interleaved(tree.get(name))]
    if not embeds:
        return config
    return parse(Model, override(tree, [f"{name}.positions.order=halves" for name in embeds]))  # type: ignore[type-abstract]


def _is_interleaved(embed: Any) -> bool:
    positions = embed.get("positions") if isinstance(embed, dict) else None
    return isinstance(positions, dict) and positions.get("order") == "interleaved" and positions["kind"] == "sinusoidal"


def model_with_sines_first(model: Any) -> Any:
    """The model of that config with permuted weights; the same object where nothing changes."""
    config = sines_first(model.config)
    if config is model.config:
        return model
    order = torch.cat([torch.arange(0, config.width, 2), torch.arange(1, config.width, 2)])
    found = meta_model(config)
    assign_weights(
        found,
        {
            name: _permute(name, tensor.detach(), order.to(tensor.device))
            for name, tensor in named_tensors(model).items()
        },
    )
    return found.eval()


def _permute(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    path = name.split(".")
    module, kind = path[-2], path[-1]
    if module in INPUT_MAPS:
        return tensor[:, order] if kind == "weight" else tensor
    if module in OUTPUT_MAPS or any(word in NORMS for word in path[:-1]):
        return tensor[order]
    raise AssertionError(f"{name}: feature dimension unknown")  # only called for models that Marian can express
