"""Rows of a table of places that are never used: RoBERTa has as many as the number of its padding token and one more. A
model that was trained with another padding token is the same model without them, and can be said where there are none.
"""

from __future__ import annotations

from typing import Any

from allyouneed.config import override, parse, tree_of
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.weights import assign_weights, meta_model, named_tensors

TABLE = "embed.positions.weight"


def from_the_first(config: Model) -> Model:
    """The same model without such rows; any other model as it is."""
    tree = tree_of(config)
    positions = (tree.get("embed") or {}).get("positions") or {}
    if positions.get("kind") != "learned" or not positions["offset"]:
        return config
    return parse(Model, override(tree, ["embed.positions.offset=0"]))  # type: ignore[type-abstract]


def with_places_from_the_first(model: Any) -> Any:
    """That model with its weights; it is the one given where nothing is to be done."""
    config = from_the_first(model.config)
    if config is model.config:
        return model
    unused = model.config.embed.positions.offset
    found = meta_model(config)
    own = named_tensors(model)
    assign_weights(
        found, {name: tensor.detach() for name, tensor in own.items()} | {TABLE: own[TABLE].detach()[unused:]}
    )
    return found.eval()
