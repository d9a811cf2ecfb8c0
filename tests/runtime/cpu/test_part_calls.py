"""Parts without native instructions run inside the native program, with the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from allyouneed.config import parse
from allyouneed.kernels.cpu import build as native
from allyouneed.nn.batch import Rows
from allyouneed.nn.models.base import Model
from allyouneed.runtime.cpu.executor import CpuExecutor, cpu_executor
from any_part import CASES, MOST_CASES
from native_models import SOURCES, STARTS, build_stored, decode


@pytest.fixture(autouse=True, scope="module")
def _native_library() -> None:
    native.wait_for_build()


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.inference_mode():
        yield


def decode_rows(model: object) -> list[Tensor]:
    """Hidden states of a prefill and of steps, with rows repeated, reordered, trimmed and joined between them."""
    found = []

    def advance(states: object, tokens: list[list[int]]) -> None:
        hidden = model.advance(Rows.of(tokens), states)  # type: ignore[attr-defined]
        found.extend(hidden[row, : len(new)].float() for row, new in enumerate(tokens))

    states = model.start(Rows.of(SOURCES[:2]))  # type: ignore[attr-defined]
    advance(states, [[1, 2, 3], [4]])
    advance(states, [[5], [6]])
    states.repeat_rows(2)
    advance(states, [[1], [2], [3], [4]])
    states.select([3, 2, 1, 1])
    advance(states, [[5], [6], [7], [8]])
    states.trim(3)
    advance(states, [[2], [3], [4], [5]])
    if states.joins:
        others = model.start(Rows.of(SOURCES[2:]))  # type: ignore[attr-defined]
        others.repeat_rows(2)
        advance(others, [[1], [2]])
        states.join(others)
        advance(states, [[n] for n in range(1, 7)])
    return found


@pytest.mark.parametrize("name", MOST_CASES)
def test_parts_without_instructions_run_inside_the_native_program(name: str) -> None:
    """Every registered part among native ones, in single precision: the same numbers as the model's."""
    model = build_stored(name, "single")
    executor = cpu_executor(model)
    if not isinstance(executor, CpuExecutor):
        return
    for ours, theirs in zip(decode_rows(executor), decode_rows(model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5 * float(theirs.abs().max()))


MIXED = [name for name in CASES if name.startswith(("mixer retention", "mixer rwkv", "channel moe", "norm scale"))]


@pytest.mark.parametrize("stored", ["int8", "bf16"])
@pytest.mark.parametrize("name", [*MIXED[::4], "wiring reversible", "wiring reversible join=concat"])
def test_parts_without_instructions_run_inside_quantized_programs(name: str, stored: str) -> None:
    if name not in CASES:
        return
    model = build_stored(name, stored)
    executor = cpu_executor(model)
    assert isinstance(executor, CpuExecutor) == (native.wait_for_build() is not None)
    for ours, theirs in zip(decode_rows(executor), decode_rows(model), strict=True):
        assert (ours - theirs).abs().max() < 0.08 * theirs.abs().max()


def with_one_other_mixer(mixer: dict) -> nn.Module:
    """Attention layers with one other mixer among them."""
    attention = {"kind": "attention", "heads": 4, "pattern": "causal"}
    layers = [
        {"wiring": "pre-norm", "mixer": part, "channel": {"kind": "ffn", "hidden": 48}}
        for part in (attention, mixer, attention)
    ]
    torch.manual_seed(0)
    tree = {"kind": "decoder", "vocab": 31, "width": 24, "embed": {"scale": "none"}, "decoder": layers}
    return parse(Model, tree).build().eval()  # type: ignore[type-abstract]


ROTATED = {"kind": "attention", "heads": 4, "pattern": "causal", "positions": {"kind": "rotary", "values": True}}
CALLED = {
    "cached hidden states": {"kind": "attention", "heads": 4, "pattern": "causal", "cache": "hidden"},
    "rotated values": ROTATED,
}


@pytest.mark.parametrize("name", CALLED)
def test_only_the_part_without_instructions_is_called(name: str) -> None:
    model = with_one_other_mixer(CALLED[name])
    executor = cpu_executor(model)
    if not isinstance(executor, CpuExecutor):
        return
    (call,) = executor.decoder.calls
    assert call.part is model.decoder.blocks[1].sublayers["mixer"] and call.reason  # type: ignore[union-attr, index]
    for found, expected in zip(decode(executor, 3, STARTS), decode(model, 3, STARTS), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
