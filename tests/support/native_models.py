"""Small models for the native executor, and the steps by which it is compared with them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import any_part
from allyouneed.config import parse
from allyouneed.nn.batch import Rows
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.precision import quantize, to_int8

SOURCES = [[1, 2, 3], [4, 5, 6, 7, 8], [3]]
STARTS = [[1, 2], [3], [4, 5, 6]]


def build_stored(name: str, stored: str = "int8") -> nn.Module:
    """`single`: as built, in single precision."""
    model = any_part.build(any_part.CASES[name]).float()
    return model if stored == "single" else quantize(model, stored)


def language_model(**keys: object) -> nn.Module:
    """Like Llama, with grouped keys and values."""
    tree = {
        "kind": "decoder",
        "vocab": 31,
        "width": 24,
        "norm": {"kind": "rms"},
        "embed": {"scale": "none", **keys},
        "decoder": [
            {
                "repeat": 2,
                "wiring": "pre-norm",
                "mixer": {
                    "kind": "attention",
                    "heads": 6,
                    "kv_heads": 2,
                    "pattern": "causal",
                    "bias": False,
                    "positions": {"kind": "rotary"},
                },
                "channel": {"kind": "glu", "hidden": 40},
            }
        ],
    }
    torch.manual_seed(0)
    return to_int8(parse(Model, tree).build())  # type: ignore[type-abstract]


def decode(model: object, given: object, starts: list[list[int]]) -> list[Tensor]:
    """Hidden states after each step, and the last scores."""
    states = model.start(given)  # type: ignore[attr-defined]
    found = [model.advance(Rows.of(starts), states, last=True)[:, 0]]  # type: ignore[attr-defined]
    for token in (4, 7, 2):
        found.append(model.advance(Rows(torch.full((len(starts), 1), token)), states)[:, -1])  # type: ignore[attr-defined]
    return [*found, model.head(found[-1])]  # type: ignore[attr-defined]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Up to float rounding, except where that decides how an input is quantized: then a token moves by one step."""
    for ours, theirs in zip(found, expected, strict=True):
        size, apart = theirs.abs().max(), (ours - theirs).abs()
        assert apart.median() < 2e-6 * size and apart.max() < 0.03 * size
