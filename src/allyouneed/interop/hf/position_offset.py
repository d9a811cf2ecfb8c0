"""Unused rows at the start of a position table: RoBERTa has `pad_token_id` + 1 of them. A model with another padding
token is equivalent without these rows, and can then be written for families that have none.
"""

from __future__ import annotations

from typing import Any

from allyouneed.config import override, parse, tree_of
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.weights import assign_weights, meta_model, named_tensors

TABLE = "embed.positions.weight"


def without_offset(config: Model) -> Model:
    """The equivalent config without such rows; any other config unchanged."""
    tree = tree_of(config)
    positions = (tree.get("embed") or {}).get("positions") or {}
    if positions.get("kind") != "learned" or not positions["offset"]:
        return config
    return parse(Model, override(tree, ["embed.positions.offset=0"]))  # type: ignore[type-abstract]


def model_without_offset(model: Any) -> Any:
    """The model of that config with its weights; the same object where nothing changes."""
    config = without_offset(model.config)
    if config is model.config:
        return model
    unused = model.config.embed.positions.offset
    found = meta_model(config)
    own = named_tensors(model)
    assign_weights(
        found, {name: tensor.detach() for name, tensor in own.items()} | {TABLE: own[TABLE].detach()[unused:]}
    )
    return found.eval()
