"""Model folders made in seconds by training on dates: good enough to tell one translation from another."""

from __future__ import annotations

import datetime
import io
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from allyouneed.cli.tour import dates
from allyouneed.training import load_recipe, train

HEADS = {"kind": "attention", "heads": 2}
FFN = {"kind": "ffn", "hidden": 32}
RECIPE: dict[str, Any] = {
    "model": {
        "kind": "encoder-decoder",
        "vocab": 1,
        "width": 16,
        "encoder": [{"mixer": HEADS, "channel": FFN}],
        "decoder": [{"mixer": HEADS | {"pattern": "causal"}, "cross": HEADS, "channel": FFN}],
    },
    "data": {"train": "train.tsv", "max_tokens": 48},
    "tokenizer": {"vocab": 300},
    "batch": {"rows": 8, "row": 96},
    "schedule": {"kind": "inverse-sqrt", "peak": 0.01, "warmup": 10},
    "steps": 60,
    "save": {"every": 60, "keep": 1},
    "average": 0,
    "device": "cpu",
    "precision": "fp32",
    "output": "run",
}


def write_recipe(folder: Path, **changes: Any) -> Path:
    """recipe.yaml and its data. The model goes to `folder / "run" / "model"`."""
    dates.write(folder, train=1000, valid=10, test=20)
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE | changes, sort_keys=False), encoding="utf-8")
    return recipe


def small_folder(folder: Path) -> Path:
    """Reads dates, writes ISO dates, most of them wrong ones."""
    return train(load_recipe(write_recipe(folder)), console=Console(file=io.StringIO())).model


def multilingual_folder(folder: Path) -> Path:
    """From English dates into ISO ("iso") or into Chinese ("zh")."""
    days = [datetime.date.fromisoformat(iso) for _, iso in dates.generate(500)]
    targets = {"iso": datetime.date.isoformat, "zh": dates.CHINESE[0]}
    for name, write in targets.items():
        lines = [f"{dates.ENGLISH[0](day)}\t{write(day)}\n" for day in days]
        (folder / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
    data = {"train": [{"path": f"{name}.tsv", "from": "en", "to": name} for name in targets], "max_tokens": 48}
    return train(load_recipe(write_recipe(folder, data=data, steps=250)), console=Console(file=io.StringIO())).model
