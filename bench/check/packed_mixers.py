"""Whole mixers over packed rows in training on a GPU, in single precision, against the same on a CPU in double
precision, which reads one sentence after another; a part of kernels.py. It has nothing to say without a GPU."""

from __future__ import annotations

from typing import Any

import torch

from allyouneed.config import parse
from allyouneed.nn.batch import Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.sublayer import Mixer
from bench.check.report import Check, random_starts

WIDTH, TIME, LIMIT = 64, 700, 2e-4
CAUSAL = {"kind": "attention", "heads": 4, "pattern": "causal"}
MIXERS: dict[str, dict[str, Any]] = {
    "shaw": CAUSAL | {"positions": {"kind": "shaw", "distance": 16}},
    "transformer-xl": CAUSAL | {"positions": "transformer-xl"},
    "lsh": {"kind": "lsh", "heads": 4, "buckets": 8},
    "gau": {"kind": "gau", "pattern": "causal", "key_width": 16},
    "dynamic-convolution": {"kind": "dynamic-convolution", "heads": 4, "size": 31, "sees": "past"},
    "s4": {"kind": "s4"},
    "s4 diagonal": {"kind": "s4", "matrix": "diagonal"},
    "s4 around": {"kind": "s4", "sees": "around"},
}


def packed_mixers(check: Check, cuda: bool) -> None:
    print("out, gradients of x and of each weight")
    for name, keys in MIXERS.items() if cuda else ():
        torch.manual_seed(0)
        part: Any = parse(Mixer, keys).build(Common(width=WIDTH))  # type: ignore[type-abstract]
        segments = random_starts(2, TIME, "cpu").long() + 1
        x, slope = torch.randn(2, 2, TIME, WIDTH)
        results = []
        for device, dtype in ((check.device, torch.float32), ("cpu", torch.float64)):
            part = part.to(device, dtype)
            layout = TokenLayout.of(Rows(torch.zeros_like(segments).to(device), segments=segments.to(device)))
            given, context = x.to(device, dtype).requires_grad_(), Context(layout)
            part.prepare(context, 2)
            out = part(given, context)
            loss = (out * slope.to(device, dtype)).sum()
            found = [out, *torch.autograd.grad(loss, [given, *part.parameters()], allow_unused=True)]
            results.append([one.detach().cpu() for one in found if one is not None])
        check.report(f"packed {name}", *results, LIMIT)
