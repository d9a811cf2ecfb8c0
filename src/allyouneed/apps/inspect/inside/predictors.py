"""`inside` of predictors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from allyouneed.apps.inspect.inside.readers import read_input
from allyouneed.apps.inspect.inside.run import Run, record
from allyouneed.infer.predictors.base import Predictor


def inside(predictor: Predictor, given: Any, target: Any = None, **options: Any) -> Run:
    """Run the model on one input and record every value inside it by name (docs/inside.md). `target`: the text that
    a generative model is made to answer; default: its greedy answer. `options`: those of the predictor's main
    method: `to="de"`, `beam=4`, …"""
    reading = read_input(predictor, given, target, **options)
    changes = {} if target is None else {"target": target}
    shown = repr(given) if isinstance(given, str | tuple | Path) else "given"  # not an image or samples
    listed = ", ".join([shown, *(f"{name}={value!r}" for name, value in (changes | options).items())])
    return record(predictor.model, replace(reading, python=f"model.inside({listed})"))
