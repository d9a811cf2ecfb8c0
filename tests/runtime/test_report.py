"""The report says which executor a model gets, and names the parts that keep it from the fast one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from allyouneed import model_config
from allyouneed.config import parse
from allyouneed.kernels.cpu import build as native
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.precision import quantize
from allyouneed.nn.models.weights import meta_model
from allyouneed.runtime.cpu.executor import CpuExecutor, cpu_executor
from allyouneed.runtime.cuda.capture import can_capture
from allyouneed.runtime.report import CAPTURED, NATIVE, TORCH, cpu_choice, cuda_choice, kernel_choice, ranges
from any_part import CASES, KIND_CASES, build, tree


def preset(name: str) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = model_config(name).build()
    return model


@pytest.mark.parametrize("name", ["transformer-base", "gpt2", "llama-7b", "whisper-tiny", "deepnet", "residual"])
def test_a_model_of_known_parts_is_native_and_captured(name: str) -> None:
    model = preset(name)
    assert str(cpu_choice(model)) == NATIVE and str(cuda_choice(model)) == CAPTURED
    assert model.training  # as it was


PARTS = {
    "retnet-1.3b": (NATIVE, CAPTURED),
    "mixtral-8x7b": (NATIVE, CAPTURED),
    "switch-base-8": ("(experts with a capacity have no", "(rows that are not in use would take room"),
    "t5-small": (NATIVE, CAPTURED),
    "universal-transformer": ("no sub-layer is native: recurrence in depth", CAPTURED),
    "infini": (NATIVE, CAPTURED),
    "mamba2-130m": (NATIVE, CAPTURED),
    "reformer": (NATIVE, CAPTURED),
    "longnet": (NATIVE, CAPTURED),
    "transformer-xl-base": ("decoder.blocks.0-15.mixer (a cache of hidden states has no", CAPTURED),
    "adaptive-span": ("AdaptiveSpan", CAPTURED),
    "bert-base": ("encoder models do not decode", "encoder models do not decode"),
    "yoco-3b": ("decoder-decoder models have no traced decode step", CAPTURED),
    "retro": ("have no traced decode step", "retro models have no traced decode step"),
}


@pytest.mark.parametrize("name", PARTS)
def test_other_parts_are_named_with_a_reason(name: str) -> None:
    model = preset(name)
    cpu, cuda = PARTS[name]
    found = str(cpu_choice(model))
    assert (found == NATIVE if cpu == NATIVE else cpu in found) and cuda in str(cuda_choice(model))


def test_formulas_of_a_wiring_are_named() -> None:
    found = str(cpu_choice(build(CASES["wiring reversible"]).float()))
    assert found == f"{NATIVE}; in torch: wiring (torch.div has no native instruction)"


@pytest.mark.parametrize("stored", ["int8", "bf16", "single"])
def test_the_report_agrees_with_the_executors(stored: str) -> None:
    if native.wait_for_build() is None:
        return
    for name in list(CASES)[::9]:
        model = build(CASES[name]).float()
        model = model if stored == "single" else quantize(model, stored)
        choice, executor = cpu_choice(model), cpu_executor(model)
        assert (choice.executor == NATIVE) == isinstance(executor, CpuExecutor)
        if isinstance(executor, CpuExecutor):
            head = executor.scores is None
            reasons = [call.reason for call in executor.decoder.calls]
            assert [reason for path, reason in choice.blockers if path != "head"] == reasons
            assert any(path == "head" for path, _ in choice.blockers) == head
        assert can_capture(model) == (cuda_choice(model).executor == CAPTURED)


@pytest.mark.parametrize("name", KIND_CASES)
def test_every_part_of_a_captured_step_is_fused_or_plain_with_a_reason(name: str) -> None:
    """Without a GPU and without Triton."""
    model: Any = meta_model(parse(Model, CASES[name]))  # type: ignore[type-abstract]
    if not can_capture(model) or model.decoder.recurrences:
        return
    found = kernel_choice(model)
    fused, plain = (re.findall(rf"{word}: (.*?)(?:; plain|$)", found) for word in ("fused", "plain"))
    for layer in model.config.decoder:
        for slot in layer.sublayers:
            assert any(f".{slot}" in text for text in (*fused, *plain)), (slot, found)
    assert not re.findall(r"for this device", found)
    assert all(re.fullmatch(r"\S.*? \(.+\)", text) for text in plain), found


def test_a_part_without_a_rule_is_plain_in_the_graph() -> None:
    keys: Any = tree(mixer={"kind": "branches", "left": {"kind": "lstm"}, "right": {"kind": "rwkv"}}, norm="scale")
    found = kernel_choice(meta_model(parse(Model, keys)))  # type: ignore[type-abstract]
    assert "decoder.blocks.0-1.channel" in found.partition("; plain: ")[0]
    assert "(ScaleNormModule has no kernel)" in found.partition("; plain: ")[2]


def test_weights_of_a_type_without_kernels_are_named() -> None:
    tree: Any = CASES["wiring pre-norm"]
    choice = cpu_choice(parse(Model, tree).build().double())  # type: ignore[type-abstract]
    assert str(choice) == f"{TORCH}: its weights are float64"


def test_numbers_in_a_row_are_a_range() -> None:
    assert ranges([3, 1, 2, 5, 7, 8]) == "1-3,5,7-8"
