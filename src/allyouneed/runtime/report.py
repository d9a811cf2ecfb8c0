"""Which executor decodes with a model on a CPU and on a GPU, and which parts keep it from the fast one. Works on built
models without weights (meta device) too."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from allyouneed.nn.models.weights import meta_model
from allyouneed.runtime.cpu.executor import lower_model
from allyouneed.runtime.cuda.capture import position_limit, step_blockers
from allyouneed.runtime.cuda.static_cache import StaticStates
from allyouneed.runtime.process import evaluation_mode
from allyouneed.runtime.program import Unsupported
from allyouneed.runtime.rules import Blocker
from allyouneed.runtime.trace import part_paths

NATIVE, CAPTURED, TORCH = "native program", "captured CUDA graph", "torch"
CAPACITY = 1024  # tokens of a row, in a step that only describes


class ExecutorChoice(NamedTuple):
    """`blockers`: parts that run in torch inside the executor, or, where it is torch, keep the model from another."""

    executor: str
    blockers: tuple[Blocker, ...] = ()

    def __str__(self) -> str:
        if not self.blockers:
            return self.executor
        between = "; in torch: " if self.executor == NATIVE else ": "
        return self.executor + between + "; ".join(summarize(self.blockers))


def cpu_choice(model: nn.Module) -> ExecutorChoice:
    """The executor on a CPU: native where the library is available (kernels/cpu/build.py), elsewhere torch."""
    try:
        with evaluation_mode(model):
            lowered = lower_model(model)
    except Unsupported as reason:
        return ExecutorChoice(TORCH, (Blocker("", str(reason)),))
    paths = part_paths(model)
    blockers = [Blocker(paths.get(id(call.part), "wiring"), call.reason) for call in lowered.decoder.calls]
    if "head" in lowered.reasons:
        blockers.append(Blocker("head", lowered.reasons["head"]))
    return ExecutorChoice(NATIVE, tuple(blockers))


def cuda_choice(model: nn.Module) -> ExecutorChoice:
    with evaluation_mode(model):
        blockers = tuple(step_blockers(model))
    return ExecutorChoice(TORCH if blockers else CAPTURED, blockers)


def kernel_choice(model: Any) -> str:
    """Which parts of a captured step have fused kernels, and which are called as they are; a step in half precision,
    made on the meta device, tells without a GPU."""
    from allyouneed.runtime.cuda.decode_step import DecodeStep

    model = meta_model(model.config).eval().to(torch.bfloat16)
    capacity = min(position_limit(model) or CAPACITY, CAPACITY)
    states = StaticStates(model, 1, 1, capacity, capacity if hasattr(model, "encode") else 0)
    paths = part_paths(model)
    made = [Blocker(paths.get(id(part), ""), reason) for part, reason in DecodeStep(model, states).setup.made]
    fused, plain = [one.path for one in made if not one.reason], [one for one in made if one.reason]
    said = [f"fused: {places(fused)}"] if fused else []
    return "; ".join(said + ([f"plain: {'; '.join(summarize(plain))}"] if plain else []))


def summarize(blockers: Iterable[Blocker]) -> list[str]:
    """One text for each reason: `decoder.blocks.0-5.mixer (RetentionModule has no native instructions)`."""
    by_reason: dict[str, list[str]] = {}
    for path, reason in dict.fromkeys(blockers):
        by_reason.setdefault(reason, []).append(path)
    return [f"{where} ({reason})" if (where := places(paths)) else reason for reason, paths in by_reason.items()]


def places(paths: Iterable[str]) -> str:
    """`decoder.blocks.0-5.mixer, decoder.blocks.0-5.channel`"""
    patterns: dict[str, list[int]] = {}
    for path in paths:
        number = re.search(r"\.(\d+)\.", path)
        pattern = path if number is None else f"{path[: number.start(1)]}%{path[number.end(1) :]}"
        patterns.setdefault(pattern, []).extend([] if number is None else [int(number[1])])
    return ", ".join(pattern.replace("%", ranges(numbers)) for pattern, numbers in patterns.items())


def ranges(numbers: list[int]) -> str:
    """1, 2, 3, 5 as 1-3,5"""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def executor_lines(model: Any) -> dict[str, str]:
    cuda = cuda_choice(model)
    kernels = {"GPU kernels ": kernel_choice(model)} if cuda.executor == CAPTURED else {}
    return {"CPU executor": str(cpu_choice(model)), "GPU executor": str(cuda)} | kernels
