"""Mixed chunk attention by the interpreter: outputs and states are those of the plain definition after every token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from allyouneed.config import parse
from allyouneed.kernels.cpu import build as native
from allyouneed.nn.batch import Rows
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.precision import quantize
from allyouneed.runtime.cpu.executor import CpuExecutor, cpu_executor

CHUNK = 6
LENGTHS = [CHUNK - 1, CHUNK, 2 * CHUNK + 1, 2]  # prompts: they end before, at and after the end of a chunk
SETTINGS: dict[str, dict[str, Any]] = {
    "both positions": {"key_width": 6, "hidden": 70},
    "rotary": {"key_width": 34, "hidden": 130, "positions": "rotary"},
    "bias": {"key_width": 4, "hidden": 16, "positions": "bias", "length": 9},
}
CLOSE = {"single": 2e-5, "int8": 0.03, "bf16": 0.05}  # of the largest; the plain model rounds more often in bf16


@pytest.fixture(autouse=True)
def _without_gradients():
    native.wait_for_build()
    with torch.inference_mode():
        yield


def build(stored: str, **keys: Any) -> Any:
    mixer = {"kind": "mixed-chunk", "chunk": CHUNK, **keys}
    layers = [{"repeat": 2, "wiring": "pre-norm", "mixer": mixer, "channel": {"kind": "ffn", "hidden": 30}}]
    torch.manual_seed(0)
    model: Any = parse(Model, {"kind": "decoder", "vocab": 31, "width": 24, "decoder": layers}).build().eval()  # type: ignore[type-abstract]
    for block in model.decoder.blocks:  # so that γ, β and the bias count
        mixer = block.sublayers["mixer"]
        for weight in (mixer.gains, mixer.offsets, *([] if mixer.bias is None else mixer.bias.parameters())):
            weight.add_(torch.randn_like(weight) / 3)
    return model if stored == "single" else quantize(model, stored)


def assert_close(ours: Tensor, theirs: Tensor, stored: str) -> None:
    assert (ours.float() - theirs.float()).abs().max() <= CLOSE[stored] * theirs.float().abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("stored", CLOSE)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_token_gives_the_plain_output_and_state(name: str, stored: str) -> None:
    model = build(stored, **SETTINGS[name])
    executor = cpu_executor(model)
    if not isinstance(executor, CpuExecutor):
        return
    assert not executor.decoder.calls
    ours, plain = executor.start(len(LENGTHS)), model.start(len(LENGTHS))
    prompt = Rows.of([[(3 + row) * n % 31 for n in range(length)] for row, length in enumerate(LENGTHS)])
    for states in (ours, plain):
        model.advance(prompt, states)
    for step in range(2 * CHUNK + 1):
        new = Rows((torch.arange(len(LENGTHS))[:, None] * 7 + step * 3) % 31)
        assert_close(executor.advance(new, ours), model.advance(new, plain), stored)
        for layer, expected in zip(ours.layers, plain.layers, strict=True):
            state: Any = layer["mixer"]
            count, lines, sums = state.now
            known, filled, total = expected["mixer"].now  # type: ignore[attr-defined]
            assert count.dtype is torch.int32 and count.equal(known)
            inside = torch.arange(CHUNK) < known % CHUNK  # lines after the last token may hold anything
            assert_close(lines * inside[..., None], filled, stored)
            assert_close(sums, total, stored)
