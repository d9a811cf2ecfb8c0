"""Small models of the experiments, as trees."""

from __future__ import annotations

from typing import Any

import torch

from allyouneed.config import parse, preset_tree
from allyouneed.nn.models.base import Model

FFN = {"kind": "ffn", "hidden": 256}


def attention(heads: int = 4, **keys: Any) -> dict[str, Any]:
    return {"kind": "attention", "heads": heads, "pattern": "causal"} | keys


def decoder(mixer: Any = None, layers: int = 2, width: int = 64, vocab: int = 64, **keys: Any) -> dict[str, Any]:
    """A decoder of equal layers; `wiring`, `channel`, `share` and `cross` are keys of a layer."""
    own = {name: keys.pop(name) for name in ("wiring", "channel", "share") if name in keys}
    layer = {"repeat": layers, "wiring": "pre-norm", "mixer": mixer or attention(), "channel": FFN} | own
    return {"kind": "decoder", "vocab": vocab, "width": width, "decoder": [layer]} | keys


def config(tree: Any) -> Any:
    return parse(Model, preset_tree(tree) if isinstance(tree, str) else tree)  # type: ignore[type-abstract]


def built(tree: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return config(tree).build()


def slope(found: dict[float, float]) -> float:
    """The slope of a line through the logarithms of x and y."""
    x, y = (torch.tensor(list(side), dtype=torch.double).log() for side in (found.keys(), found.values()))
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())
