"""A whole update as one CUDA graph: its kernels are launched by one call, and the GPU never waits for Python.

Rows are packed, so all batches have one shape, and nothing in an update waits for the device (step.py): what it does is
the same list of kernels each time. The list is recorded once and replayed; batches, rate and the count of tokens go
into places that the recording reads. Wherever it cannot be, updates run as they are written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch
from allyouneed.nn.models.block import Block
from allyouneed.runtime.cuda.graphs import capture_graph
from allyouneed.train.cuda.machine import Machine
from allyouneed.train.distributed.objective import Objective
from allyouneed.train.distributed.process_group import ALONE, Team
from allyouneed.train.feed import Update
from allyouneed.train.step import Pending, measured, run_update

REHEARSALS = 3  # updates of one shape that run as written first: they compile, and make what the optimiser remembers
ROOM = 0.4  # of the GPU's memory that an update may need: a recording keeps its own, beside that of validation


@dataclass
class _Recording:
    """`batches`, `tokens` and `rate` are read by what `replay` does; it gives what was measured, in one place."""

    replay: Callable[[], Tensor]
    shape: Any
    batches: list[Batch]
    tokens: Tensor
    rate: Tensor


class Updates:
    """Runs updates, of the first shape that comes often by a recording."""

    def __init__(
        self,
        model: Any,
        task: Objective,
        optimiser: torch.optim.Optimizer,
        clip: float | None,
        machine: Machine,
        team: Team = ALONE,
        asked: bool = True,
    ) -> None:
        self.model, self.task, self.optimiser, self.clip = model, task, optimiser, clip
        self.machine, self.team = machine, team
        self.recording: _Recording | None = None
        self.records = asked and machine.cuda and machine.compiled and team.alone and _same_each_time(model)
        self.seen: dict[str, int] = {}

    def run(self, update: Update, step: int, rate: float) -> Pending:
        shape = [_tensors(batch, like=True) for batch in update.batches]
        if not self.records or any(batch.labels is None or batch.labels.ndim != 2 for batch in update.batches):
            return self._written(update, step, rate)  # labels of whole texts are as many as there are texts
        if self.recording is not None:
            known = shape == self.recording.shape
            return self._replayed(update, step, rate) if known else self._written(update, step, rate)
        self.seen[repr(shape)] = times = self.seen.get(repr(shape), 0) + 1
        if times <= REHEARSALS:
            return self._rehearsed(update, step, rate, last=times == REHEARSALS)
        self._record(update, shape)
        return self.run(update, step, rate)

    def forget(self) -> None:
        """Weights or what the optimiser remembers have moved: record anew."""
        self.recording, self.seen = None, {}

    def _written(self, update: Update, step: int, rate: float) -> Pending:
        return run_update(self.model, self.task, self.optimiser, update, step, rate, self.clip, self.machine, self.team)

    def _rehearsed(self, update: Update, step: int, rate: float, last: bool) -> Pending:
        """As written; the last time nothing may ask the device, for a recording cannot wait for the answer."""
        try:
            with _aside(), _no_waiting() if last else nullcontext():
                return self._written(update, step, rate)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            self.records = False
            return self._written(update, step, rate)

    def _record(self, update: Update, shape: Any) -> None:
        device = self.machine.device
        if _crowded(device):
            self.records = False
            return
        batches = [batch.each(torch.clone) for batch in update.batches]
        tokens, rate = torch.ones((), device=device), torch.zeros((), device=device)
        self.optimiser.zero_grad(set_to_none=True)
        for group in self.optimiser.param_groups:
            group["capturable"] = True
        try:
            replay = _recorded(
                lambda: measured(
                    self.model, self.task, self.optimiser, batches, tokens, rate, self.clip, self.machine, self.team
                ),
                device,
            )
        except RuntimeError as error:
            raise UserError(
                f"an update could not be recorded as a CUDA graph ({str(error).splitlines()[0]}); "
                "say compile: blocks and run it again, it goes on from the last checkpoint"
            ) from error
        finally:
            for group in self.optimiser.param_groups:
                group["capturable"] = False
        self.recording = _Recording(replay, shape, batches, tokens, rate)

    def _replayed(self, update: Update, step: int, rate: float) -> Pending:
        known = self.recording
        assert known is not None
        for there, new in zip(known.batches, update.batches, strict=True):
            for into, tensor in zip(_tensors(there), _tensors(new), strict=True):
                into.copy_(tensor, non_blocking=True)
        known.tokens.fill_(update.tokens)
        known.rate.fill_(rate)
        return Pending(step, update.places, update.tokens, rate, known.replay().clone())


def _same_each_time(model: Any) -> bool:
    """No part of the model decides anything between two updates; of one that remembers or draws anew nobody knows."""
    if not isinstance(model, nn.Module):
        return False
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    return bool(blocks) and all(block.traceable for block in blocks)


def _recorded(work: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """What does this again, with whatever its inputs then hold; its result is always in the same place."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with capture_graph(graph):  # threads that prepare batches go on
        result = work()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def _crowded(device: torch.device) -> bool:
    return torch.cuda.max_memory_allocated(device) > ROOM * torch.cuda.get_device_properties(device).total_memory


def _tensors(batch: Batch, like: bool = False) -> list[Any]:
    """All tensors of a batch in order; `like`: what they look like."""
    found: list[Any] = []

    def note(tensor: Tensor) -> Tensor:
        found.append((tuple(tensor.shape), tensor.dtype) if like else tensor)
        return tensor

    batch.each(note)
    return found


@contextmanager
def _aside() -> Iterator[None]:
    """In a stream of its own, as a recording will be."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Inside, asking the device for a number is an error."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not find everything: a recording finds the rest
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
