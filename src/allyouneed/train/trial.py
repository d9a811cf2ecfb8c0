"""The worst batch first: one forward and backward pass before the start, so that memory runs out now or never.

Rows are packed, so every batch has the same shape and the first is as large as any. The trial leaves no trace:
gradients, buffers and random states are as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from allyouneed.errors import UserError
from allyouneed.nn.states.segment_memory import SegmentMemory
from allyouneed.train.feed import labelled
from allyouneed.train.loop import Trainer
from allyouneed.train.memory import available, estimate, size
from allyouneed.train.randomness import untouched
from allyouneed.train.recipe import Recipe
from allyouneed.train.step import accumulate_gradients


def try_worst_batch(trainer: Trainer) -> None:
    """Say what memory is needed and there, then try."""
    recipe, machine = trainer.recipe, trainer.machine
    need, there = estimate(recipe, trainer.config, machine, trainer.team), available(machine.device)
    trainer.reporter.say(f"memory: about {need.text()}" + (f" of {size(there)} free" if there is not None else ""))
    if there is not None and need.total > there:
        trainer.reporter.say(f"this may not fit; {_advice(recipe)} would need less")
    try:
        _try(trainer)
    except Exception as error:
        if out_of_memory(error):
            free = f" ({size(there)} were free)" if there is not None else ""
            raise UserError(f"a full batch does not fit into memory{free}; {_advice(recipe)}") from None
        if not machine.compiled:
            raise
        torch.compiler.set_stance("force_eager")
        trainer.reporter.say(f"compiling failed, going on without it: {str(error).splitlines()[0]}")
        _try(trainer)


def _try(trainer: Trainer) -> None:
    model, machine = trainer.model, trainer.machine
    # of the epoch that will be read next: its packing is then ready
    batch = next(trainer.data.batches(trainer.standing.place.epoch))
    tokens = trainer.team.total(labelled(batch))
    batch = batch.to(machine.device)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    moments = 0 if trainer.optimiser.state else trainer.recipe.optimiser.moments
    try:
        with untouched():
            # what the optimiser will take at its first step is taken already now
            held = [torch.empty_like(p) for p in model.parameters() for _ in range(moments)]
            task, batches = trainer.task, [batch]
            if trainer.recipe.task.has_memory:  # once more, over what is remembered of the first time
                batches.append(replace(batch, begins=False))
            with _forgetful(trainer.reader):
                accumulate_gradients(trainer.trained, task, batches, tokens, machine)
            if machine.cuda:
                torch.cuda.synchronize()
            del held
    finally:
        trainer.optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])


@contextmanager
def _forgetful(reader: Any) -> Iterator[None]:
    """Whatever a model remembers inside was never there, and what it remembered is."""
    if not isinstance(reader, SegmentMemory):
        yield
        return
    before, reader.states = reader.states, None
    try:
        yield
    finally:
        reader.states = before


def _advice(recipe: Recipe) -> str:
    rows, accumulate = recipe.batch.rows, recipe.accumulate
    if rows > 1:
        return (
            f"batch.rows: {rows // 2} with accumulate: {accumulate * -(-rows // (rows // 2))} gives the same updates "
            "in smaller pieces"
        )
    return "shorter rows (batch.row, and data.max_tokens with it) or a smaller model"


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
