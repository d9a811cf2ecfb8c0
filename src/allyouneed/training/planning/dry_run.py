"""One forward and backward pass before training starts, so that running out of memory shows at once.

Rows are packed, so every batch has the same shape and the first is as large as any. Gradients,
buffers and random states are restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from allyouneed.errors import UserError
from allyouneed.nn.states.segment_memory import SegmentMemory
from allyouneed.runtime.process import disable_compilation
from allyouneed.training.loop import Trainer
from allyouneed.training.planning.memory import advice, check_memory, format_bytes
from allyouneed.training.prefetch import count_labels
from allyouneed.training.random_state import preserve_random_state
from allyouneed.training.step import accumulate_gradients


def dry_run(trainer: Trainer) -> None:
    """Print required and available memory, then try."""
    recipe, backend = trainer.recipe, trainer.backend
    need, there = check_memory(recipe, trainer.config, backend, trainer.processes)
    trainer.reporter.print(
        f"memory: about {need.text()}" + (f" of {format_bytes(there)} free" if there is not None else "")
    )
    if there is not None and need.total > there:
        trainer.reporter.print(f"this may not fit; {advice(recipe)}")
    try:
        _try(trainer)
    except Exception as error:
        if out_of_memory(error):
            free = f" ({format_bytes(there)} were free)" if there is not None else ""
            raise UserError(f"a full batch does not fit into memory{free}; {advice(recipe)}") from None
        if not backend.compiled:
            raise
        disable_compilation()
        trainer.reporter.print(f"compiling failed, continuing without: {str(error).splitlines()[0]}")
        _try(trainer)


def _try(trainer: Trainer) -> None:
    model, backend = trainer.model, trainer.backend
    # of the epoch that is read next, so that its packing is cached
    batch = next(trainer.data.batches(trainer.state.position.epoch))
    tokens = trainer.processes.sum_count(count_labels(batch))
    batch = batch.to(backend.device)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    moments = 0 if trainer.optimiser.state else trainer.recipe.optimiser.moments
    try:
        with preserve_random_state():
            # allocate what the optimiser will need at its first step
            held = [torch.empty_like(p) for p in model.parameters() for _ in range(moments)]
            task, batches = trainer.task, [batch]
            if trainer.recipe.task.has_memory:  # again, attending to the memory of the first pass
                batches.append(replace(batch, begins=False))
            with _preserve_memory(trainer.stateful_model):
                accumulate_gradients(trainer.wrapped_model, task, batches, tokens, backend)
            if backend.cuda:
                torch.cuda.synchronize()
            del held
    finally:
        trainer.optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])


@contextmanager
def _preserve_memory(model: Any) -> Iterator[None]:
    """Start with an empty segment memory and restore it afterwards."""
    if not isinstance(model, SegmentMemory):
        yield
        return
    before, model.states = model.states, None
    try:
        yield
    finally:
        model.states = before


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
