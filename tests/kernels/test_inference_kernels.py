"""In inference on a GPU, rotary positions run as one kernel, with the inputs of the definition. (bench/check/kernels.py
compares the kernel with the definition.)"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from allyouneed.config import override, parse, preset_tree
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from allyouneed.nn.ops.activations import ACTIVATIONS, fused_name
from allyouneed.nn.positions import rotary

CALLS: list[str] = []


def rotate(x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    CALLS.append("rotate")
    found = torch.empty_like(x)
    half = x.shape[-1] // 2
    for plane in range(half):
        a, b = (2 * plane, 2 * plane + 1) if interleaved else (plane, plane + half)
        cos, sin = table[..., plane]
        found[..., a], found[..., b] = x[..., a] * cos - x[..., b] * sin, x[..., b] * cos + x[..., a] * sin
    return found


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("allyouneed.kernels.triton.rotary")
    module.rotate = rotate
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(rotary, "usable_without_grad", lambda x: not torch.is_grad_enabled())
    CALLS.clear()


@pytest.mark.parametrize("order", ["halves", "interleaved"])
def test_fused_inference_gives_the_same_hidden_states(kernels: None, order: str) -> None:
    sizes = ["vocab=31", "width=32", "decoder[0].repeat=2", "decoder[0].mixer.heads=4", "decoder[0].channel.hidden=24"]
    kind = f"decoder[0].mixer.positions.order={order}"
    torch.manual_seed(0)
    model: Any = parse(Model, override(preset_tree("llama-15m"), [*sizes, kind])).build().eval()  # type: ignore[type-abstract]
    batch = Batch(Rows.of([[3, 4, 5, 6, 7], [8, 9]]))
    plain = model(batch)
    assert not CALLS  # somebody may want gradients
    with torch.no_grad():
        found = model(batch)
    assert torch.allclose(found, plain, atol=1e-6)
    assert set(CALLS) == {"rotate"}


def test_partial_rotary_uses_the_plain_path(kernels: None) -> None:
    sizes = ["vocab=31", "width=32", "decoder[0].mixer.heads=2", "decoder[0].mixer.positions.fraction=0.5"]
    torch.manual_seed(0)
    model: Any = parse(Model, override(preset_tree("llama-15m"), sizes)).build().eval()  # type: ignore[type-abstract]
    with torch.no_grad():
        model(Batch(Rows.of([[3, 4, 5]])))
    assert "rotate" not in CALLS


def test_activations_with_fused_kernels() -> None:
    assert {name for name in ACTIVATIONS if fused_name(ACTIVATIONS[name]) == name} == {
        "relu",
        "silu",
        "gelu",
        "gelu-tanh",
    }
    assert fused_name(ACTIVATIONS["mish"]) is None
