"""Estimate a run's memory from its config, and measure what is available and in use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from allyouneed.errors import UserError
from allyouneed.nn.heads.vocabulary import VocabularyHead
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.retro import Retro
from allyouneed.nn.ops.cross_entropy import chunk_bytes
from allyouneed.runtime.memory import available_memory as available_memory
from allyouneed.training.backend import Backend
from allyouneed.training.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from allyouneed.training.recipe.recipe import Recipe

# What a sub-layer stores for its backward pass besides the outputs of its linear maps, in units of width per token:
# its input, the residual sum and its normalisation, the dropout mask.
RESIDUAL_WIDTHS = 3.0
OFF = 2  # the estimate is within this factor of what is held
STACKS = ("context", "encoder", "decoder", "first", "second")


@dataclass(frozen=True)
class Estimate:
    """Estimated bytes of a run."""

    weights: int  # and their gradients
    optimiser: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.optimiser + self.activations + self.logits

    def text(self) -> str:
        return (
            f"{format_bytes(self.total)} (weights and gradients {format_bytes(self.weights)}, "
            f"optimiser {format_bytes(self.optimiser)}, activations {format_bytes(self.activations)}, "
            f"logits {format_bytes(self.logits)})"
        )


def check_memory(
    recipe: Recipe, model: Model, backend: Backend, processes: ProcessGroup = SINGLE_PROCESS
) -> tuple[Estimate, int | None]:
    """The estimate and the free bytes, if known. A run that cannot fit is refused, by arithmetic: nothing is built."""
    need, there = estimate(recipe, model, backend, processes), available_memory(backend.device)
    if there is not None and need.total > OFF * there:
        raise UserError(
            f"this run takes about {need.text()}; {format_bytes(there)} are free; "
            + advice(recipe, there / need.activations if need.activations > need.total / 2 else 0.0)
        )
    return need, there


def advice(recipe: Recipe, share: float = 0.5) -> str:
    """What takes less memory. `share`: of the activations that fits; 0: the model alone does not."""
    rows, accumulate = recipe.batch.rows or recipe.task.usual_rows, recipe.accumulate
    if share == 0:
        return "use a smaller model"
    if rows > 1 and (fewer := int(rows * min(share, 0.5))):
        return (
            f"batch.rows: {fewer} with accumulate: {accumulate * -(-rows // fewer)} gives the same updates with less "
            "memory"
        )
    return "use shorter rows (batch.row, and data.max_tokens with it) or a smaller model"


def estimate(recipe: Recipe, model: Model, backend: Backend, processes: ProcessGroup = SINGLE_PROCESS) -> Estimate:
    """Per process."""
    parameters = model.cost().parameters
    if processes.tensor > 1:  # only the matrices of blocks are split
        blocks = sum(layer.cost(model, 1).parameters for name in STACKS for layer in getattr(model, name, ()))
        parameters -= blocks - blocks // processes.tensor
    if recipe.parallel.kind == "fsdp":
        parameters = -(-parameters // processes.data_ranks)
    vocab = _target_vocab(model)
    rows = -(-(recipe.batch.rows or recipe.task.usual_rows) // processes.data_ranks)
    # all images of a model have as many tokens
    image = getattr(getattr(model, "source_embed", None) or getattr(model, "embed", None), "token_count", None)
    target = recipe.batch.row if image is None else recipe.max_tokens if recipe.task.has_texts else image
    tokens = rows * target, rows * (image or recipe.batch.source)
    if isinstance(model, Retro):  # a neighbour has two chunks
        tokens = tokens[0], 2 * model.neighbours * tokens[0]
    passes = recipe.task.sides if not hasattr(model, "decoder") or not hasattr(model, "encoder") else 1
    number = 2 if backend.bf16 else 4
    cells = min(chunk_bytes(backend.device) // 4, vocab * tokens[0])
    chunk = cells * (number if backend.cuda else 4)
    return Estimate(
        weights=parameters * (8 + (2 if backend.bf16 else 0)),
        optimiser=parameters * 4 * recipe.optimiser.moments,
        activations=int(
            passes * _activations(model, *tokens, processes.tensor, recipe.checkpoint_activations) * number
        ),
        logits=2 * chunk + 2 * 4 * vocab * model.width,
    )


def _activations(model: Model, target: int, source: int, degree: int = 1, checkpointed: bool = False) -> float:
    """Numbers stored for the backward pass. A linear map from `width` costs 2 · width FLOPs per output, so the FLOPs of
    a token-wise part count its outputs. `degree`: of tensor parallelism. `checkpointed`: every block keeps its input,
    and one block at a time the rest."""
    total = largest = 0.0
    for name, tokens in zip(STACKS, (source, source, target, target, target), strict=True):
        for layer in getattr(model, name, ()):
            parts = layer.sublayers
            flops = layer.channel.cost(model).flops if layer.channel is not None else 0.0
            if layer.mixer is not None:
                flops += layer.mixer.cost(model, 1).flops
            if layer.cross is not None:
                flops += layer.cross.cost(model, 1, cross=True).flops
                flops += layer.cross.source_flops(model) * source / tokens
            kept = tokens * (flops / (2 * model.width * degree) + RESIDUAL_WIDTHS * model.width * len(parts))
            total += layer.repeat * (tokens * model.width if checkpointed else kept)
            largest = max(largest, kept)
    return total + largest if checkpointed else total


def _target_vocab(model: Model) -> int:
    """Vocabulary size of the head; 0 for other heads."""
    if not isinstance(getattr(model, "head", None), VocabularyHead) or model.vocabs is None:
        return 0
    return model.vocabs.target


def memory_in_use(device: torch.device) -> int | None:
    """Bytes: the peak of this run on a GPU, the current use on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * 4096


def format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit in ("B", "kB", "MB") else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
