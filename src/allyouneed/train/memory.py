"""How much memory a run will need, from its config alone, and how much there is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from allyouneed.nn.heads.vocabulary import VocabularyHead
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.retro import Retro
from allyouneed.nn.ops.cross_entropy import chunk_bytes
from allyouneed.train.cuda.machine import Machine
from allyouneed.train.distributed.process_group import ALONE, Team
from allyouneed.train.recipe import Recipe

# What a sub-layer keeps for its backward pass besides the outputs of its linear maps, in units of width per token:
# its input, the sum and the normalised sum of its residual connection, the dropout mask.
AROUND = 3.0
STACKS = ("encoder", "decoder", "first", "second")


@dataclass(frozen=True)
class Estimate:
    """Bytes."""

    weights: int  # and their gradients
    optimiser: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.optimiser + self.activations + self.logits

    def text(self) -> str:
        return (
            f"{size(self.total)} (weights and gradients {size(self.weights)}, optimiser {size(self.optimiser)}, "
            f"activations {size(self.activations)}, logits {size(self.logits)})"
        )


def estimate(recipe: Recipe, model: Model, machine: Machine, team: Team = ALONE) -> Estimate:
    """Of one process."""
    parameters = model.cost().parameters
    if team.tensor > 1:  # the matrices of blocks are split, the rest is not
        blocks = sum(layer.cost(model, 1).parameters for name in STACKS for layer in getattr(model, name, ()))
        parameters -= blocks - blocks // team.tensor
    if recipe.parallel.kind == "fsdp":
        parameters = -(-parameters // team.readers)
    vocab = _target_vocab(model)
    rows = -(-recipe.batch.rows // team.readers)
    tokens = rows * recipe.batch.row, rows * recipe.batch.source
    if isinstance(model, Retro):  # each neighbour is as long as two chunks
        tokens = tokens[0], 2 * model.neighbours * tokens[0]
    passes = recipe.task.sides if not hasattr(model, "decoder") or not hasattr(model, "encoder") else 1
    number = 2 if machine.bf16 else 4
    cells = min(chunk_bytes(machine.device) // 4, vocab * tokens[0])
    chunk = cells * (number if machine.cuda else 4)
    return Estimate(
        weights=parameters * (8 + (2 if machine.bf16 else 0)),
        optimiser=parameters * 4 * recipe.optimiser.moments,
        activations=int(passes * _activations(model, *tokens, team.tensor) * number),
        logits=2 * chunk + 2 * 4 * vocab * model.width,
    )


def _activations(model: Model, target: int, source: int, ways: int = 1) -> float:
    """Numbers kept for the backward pass. A linear map from `width` costs 2 · width FLOPs per output, so FLOPs of a
    part that looks at one token only count its outputs. `ways`: over how many processes these are split."""
    total = 0.0
    for name, tokens in zip(STACKS, (source, target, target, target), strict=True):
        for layer in getattr(model, name, ()):
            parts = layer.sublayers
            flops = layer.channel.cost(model).flops if layer.channel is not None else 0.0
            if layer.mixer is not None:
                flops += layer.mixer.cost(model, 1).flops
            if layer.cross is not None:
                flops += layer.cross.cost(model, 1, cross=True).flops
                total += layer.repeat * source * layer.cross.source_flops(model) / (2 * model.width * ways)
            total += layer.repeat * tokens * (flops / (2 * model.width * ways) + AROUND * model.width * len(parts))
    return total


def _target_vocab(model: Model) -> int:
    """How many tokens the head scores; none where it scores something else."""
    if not isinstance(getattr(model, "head", None), VocabularyHead) or model.vocabs is None:
        return 0
    return model.vocabs.target


def available(device: torch.device) -> int | None:
    """Bytes that are free now; None when nobody can say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _meminfo("MemAvailable")
    limit = _number("/sys/fs/cgroup/memory.max")  # of the container, if there is one
    rooms = [room for room in (free, limit) if room is not None]
    return min(rooms, default=None)


def in_use(device: torch.device) -> int | None:
    """The most bytes this run has held so far on a GPU; what it holds now on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * 4096


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit in ("B", "kB", "MB") else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _meminfo(key: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":")), None)


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
