"""A Transformer whose features stand in another order is the same Transformer: attention, channels and norms do not
know which feature is which, only sinusoids do. So a model with the paper's sinusoids (a sine, its cosine, the next
sine, …) can be said by those who have all sines before all cosines, once all weights are put into that order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allyouneed.config import override, parse, tree_of
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.weights import assign_weights, meta_model, named_tensors

# of these maps the columns are features of the model, of those the rows; a norm has nothing else
FROM = ("tokens", "q", "k", "v", "qkv", "kv", "up", "gate_up", "head")
INTO = ("out", "down")
NORMS = ("norms", "end", "norm")


def sines_first(config: Model) -> Model:
    """The same model in the order of those who have all sines first; any other model as it is."""
    tree = tree_of(config)
    given = [name for name in ("embed", "source_embed") if _interleaved(tree.get(name))]
    if not given:
        return config
    return parse(Model, override(tree, [f"{name}.positions.order=halves" for name in given]))  # type: ignore[type-abstract]


def _interleaved(embed: Any) -> bool:
    positions = embed.get("positions") if isinstance(embed, dict) else None
    return isinstance(positions, dict) and positions.get("order") == "interleaved" and positions["kind"] == "sinusoidal"


def with_sines_first(model: Any) -> Any:
    """That model with its weights; it is the one given where nothing is to be done."""
    config = sines_first(model.config)
    if config is model.config:
        return model
    places = torch.cat([torch.arange(0, config.width, 2), torch.arange(1, config.width, 2)])
    found = meta_model(config)
    assign_weights(
        found,
        {
            name: _moved(name, tensor.detach(), places.to(tensor.device))
            for name, tensor in named_tensors(model).items()
        },
    )
    return found.eval()


def _moved(name: str, tensor: Tensor, places: Tensor) -> Tensor:
    path = name.split(".")
    module, kind = path[-2], path[-1]
    if module in FROM:
        return tensor[:, places] if kind == "weight" else tensor
    if module in INTO or any(word in NORMS for word in path[:-1]):
        return tensor[places]
    raise AssertionError(f"{name}: which of its numbers are features?")  # asked only of models that Marian can say
