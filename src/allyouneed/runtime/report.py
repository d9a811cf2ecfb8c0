"""Which executor decodes with a model on a CPU and on a GPU, and which parts keep it from the fast one. Works on built
models without weights (meta device) too."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from allyouneed.runtime.cpu.executor import lower_model
from allyouneed.runtime.cuda.capture import step_blockers
from allyouneed.runtime.program import Unsupported
from allyouneed.runtime.rules import Blocker
from allyouneed.runtime.trace import part_paths

NATIVE, CAPTURED, TORCH = "native program", "captured CUDA graph", "torch"


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
    was_training = model.training
    try:
        lowered = lower_model(model.eval())
    except Unsupported as reason:
        return ExecutorChoice(TORCH, (Blocker("", str(reason)),))
    finally:
        model.train(was_training)
    paths = part_paths(model)
    blockers = [Blocker(paths.get(id(call.part), "wiring"), call.reason) for call in lowered.decoder.calls]
    if "head" in lowered.reasons:
        blockers.append(Blocker("head", lowered.reasons["head"]))
    return ExecutorChoice(NATIVE, tuple(blockers))


def cuda_choice(model: nn.Module) -> ExecutorChoice:
    was_training = model.training
    try:
        blockers = tuple(step_blockers(model.eval()))
    finally:
        model.train(was_training)
    return ExecutorChoice(TORCH if blockers else CAPTURED, blockers)


def summarize(blockers: Iterable[Blocker]) -> list[str]:
    """One text for each reason: `decoder.blocks.0-5.mixer (RetentionModule has no native instructions)`."""
    by_reason: dict[str, dict[str, list[int | None]]] = {}
    for path, reason in dict.fromkeys(blockers):
        number = re.search(r"\.(\d+)\.", path)
        pattern = path if number is None else f"{path[: number.start(1)]}%{path[number.end(1) :]}"
        by_reason.setdefault(reason, {}).setdefault(pattern, []).append(None if number is None else int(number[1]))
    found = []
    for reason, patterns in by_reason.items():
        where = ", ".join(path.replace("%", ranges([n for n in ns if n is not None])) for path, ns in patterns.items())
        found.append(f"{where} ({reason})" if where else reason)
    return found


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
    return {"CPU executor": str(cpu_choice(model)), "GPU executor": str(cuda_choice(model))}
