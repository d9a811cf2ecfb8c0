"""What several demonstrations share: pairs as files, a short training run on the CPU, and a small model for chats."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import allyouneed as ayn

ATTENTION = {
    "wiring": "pre-norm",
    "mixer": {"kind": "attention", "heads": 4, "pattern": "causal"},
    "channel": {"kind": "ffn", "hidden": 256},
}
# a short convolution shows each token those before it, so that attention learns to copy within minutes
BEFORE = {"wiring": "pre-norm", "mixer": {"kind": "convolution", "size": 3, "sees": "past", "separable": True}}
CHAT_MODEL = {
    "kind": "decoder",
    "vocab": 1,
    "width": 128,
    "embed": {"positions": "none"},
    "decoder": [BEFORE, ATTENTION, BEFORE, ATTENTION],
}


def write_pairs(path: Path, pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """A source of a recipe's `data`: this file, one pair of source and target per line."""
    path.write_text("".join(f"{a}\t{b}\n" for a, b in pairs), encoding="utf-8")
    return {"path": str(path)}


def write_chats(path: Path, chats: Iterable[Any]) -> None:
    """Each a list of messages."""
    lines = (json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in chats)
    path.write_text("".join(lines), encoding="utf-8")


def short_run(output: Path, steps: int, **recipe: Any) -> Any:
    """Train by a recipe without averaging, with one checkpoint at the end; what `ayn.train` returns."""
    ending = {"steps": steps, "save": {"every": steps, "keep": 1}, "average": 0}
    return ayn.train(recipe | ending | {"device": "cpu", "precision": "fp32", "output": str(output)})


def train_translator(output: Path, steps: int, data: dict[str, Any], **recipe: Any) -> Any:
    """A predictor trained on `data` (`train`, `valid`, `max_tokens`), validated once, at the end."""
    return ayn.load(short_run(output, steps, data=data, validate={"every": steps, "sentences": 1}, **recipe).model)
