"""Attention with a number for each query and distance equals the mask and bias written out. (Packed rows:
tests/invariants/test_packed_rows.py; the kernel: bench/check/kernels.py, by the interpreter where there is Triton.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allyouneed.config import parse
from allyouneed.nn.batch import Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.ops.attention import by_distance
from allyouneed.nn.sublayer import Mixer

WIDTH, TIME = 12, 23
POSITIONS: dict[str, Any] = {
    "shaw": {"kind": "shaw", "distance": 3},
    "shaw without values": {"kind": "shaw", "distance": 3, "values": False},
    "shaw beyond the rows": {"kind": "shaw", "distance": 50},
    "transformer-xl": {"kind": "transformer-xl"},
    "transformer-xl, clamped": {"kind": "transformer-xl", "clamp": 4},
    "xlnet": {"kind": "xlnet"},
}


@pytest.mark.parametrize("pattern", ["causal", "full"])
@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize("lengths", [None, [TIME, 9]])
def test_scores_by_distance_of_whole_and_of_padded_rows(
    kind: str, pattern: str, lengths: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    keys = {"kind": "attention", "heads": 2, "pattern": pattern, "positions": POSITIONS[kind]}
    part: Any = parse(Mixer, keys).build(Common(width=WIDTH)).double()  # type: ignore[type-abstract]
    for parameter in part.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    x = torch.randn(2, TIME, WIDTH, dtype=torch.double, requires_grad=True)
    rows = Rows(torch.zeros(2, TIME, dtype=torch.long), lengths=None if lengths is None else torch.tensor(lengths))
    layout = TokenLayout.of(rows)
    real = torch.ones(2, TIME, 1) if layout.real is None else layout.real[..., None]
    slope = torch.randn(2, TIME, WIDTH, dtype=torch.double) * real

    def run() -> list[torch.Tensor]:
        out = part(x, Context(layout)) * real
        return [out, *torch.autograd.grad((out * slope).sum(), [x, *part.parameters()])]

    expected, asked = run(), []
    monkeypatch.setattr(by_distance, "has_kernels", lambda layout: asked.append(layout) or True)
    torch.testing.assert_close(run(), expected, atol=1e-9, rtol=1e-9)
    assert asked
