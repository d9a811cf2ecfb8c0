"""A run small enough to be made dozens of times: dates, one block a side, width 16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allyouneed.training import Recipe
from toy_texts import Listener as Listener

BLOCK = {"mixer": {"kind": "attention", "heads": 2}, "channel": {"kind": "ffn", "hidden": 32}}
MODEL: dict[str, Any] = {
    "kind": "encoder-decoder",
    "vocab": 1,
    "width": 16,
    "dropout": 0.1,
    "embed": {"positions": "sinusoidal"},
    "encoder": [BLOCK],
    "decoder": [
        BLOCK
        | {"mixer": {"kind": "attention", "heads": 2, "pattern": "causal"}, "cross": {"kind": "attention", "heads": 2}}
    ],
}
RECIPE: dict[str, Any] = {
    "model": MODEL,
    "data": {"train": "train.tsv", "max_tokens": 48},
    "tokenizer": {"vocab": 300},
    "batch": {"rows": 4, "row": 64},
    "schedule": {"kind": "inverse-sqrt", "peak": 0.01, "warmup": 10},
    "steps": 12,
    "save": {"every": 4, "keep": 3},
    "average": 3,
    "validate": {"every": 6, "metric": "loss", "sentences": 0},
    "device": "cpu",
    "precision": "fp32",
    "output": "run",
}

Make = Callable[..., Recipe]
