"""A whole update as one CUDA graph, launched by a single call.

Rows are packed, so all batches have one shape, and nothing in an update synchronises with the device (step.py): every
update launches the same kernels. They are captured once and replayed; batches, learning rate and token count are copied
into the captured inputs. Where capturing is not possible or fails, updates run eagerly, from the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import shorten
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.nn.batch import Batch
from allyouneed.nn.models.block import Block
from allyouneed.runtime.cuda.graphs import capture_graph
from allyouneed.runtime.process import forbid_cuda_sync
from allyouneed.training.backend import Backend
from allyouneed.training.distributed.objective import Objective
from allyouneed.training.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from allyouneed.training.prefetch import Update
from allyouneed.training.random_state import RandomState
from allyouneed.training.step import PendingStep, run_update, update_model

# eager updates per shape before capturing: they compile and create the optimiser state
WARMUP_UPDATES = 3
# of the GPU's memory an update may use: a graph keeps its own pool beside validation's
MEMORY_FRACTION = 0.4


@dataclass
class _CapturedUpdate:
    """`replay()` reads `batches`, `tokens` and `rate` and returns (loss, plain, norm) in a fixed tensor."""

    replay: Callable[[], Tensor]
    shape: Any
    batches: list[Batch]
    tokens: Tensor
    rate: Tensor


class CapturedUpdates:
    """Runs updates; the first shape that repeats is captured and replayed."""

    def __init__(
        self,
        model: Any,
        task: Objective,
        optimiser: torch.optim.Optimizer,
        clip: float | None,
        backend: Backend,
        processes: ProcessGroup = SINGLE_PROCESS,
        report: Callable[[str], None] = print,
        capture: bool = True,
    ) -> None:
        self.model, self.task, self.optimiser, self.clip = model, task, optimiser, clip
        self.backend, self.processes, self.report = backend, processes, report
        self.update: _CapturedUpdate | None = None
        possible = capture and backend.cuda and backend.compiled and processes.is_single
        self.obstacle = _what_varies(model) if possible else "not asked for"  # why updates are not captured
        self.enabled = self.obstacle is None
        self.seen: dict[str, int] = {}

    def run(self, update: Update, step: int, rate: float) -> PendingStep:
        shape = [_tensors(batch, like=True) for batch in update.batches]
        if not self.enabled or any(batch.labels is None or batch.labels.ndim != 2 for batch in update.batches):
            return self._run_eager(update, step, rate)  # sequence labels vary in number
        if self.update is not None:
            known = shape == self.update.shape
            return self._replay(update, step, rate) if known else self._run_eager(update, step, rate)
        self.seen[repr(shape)] = times = self.seen.get(repr(shape), 0) + 1
        if times <= WARMUP_UPDATES:
            return self._warm_up(update, step, rate, last=times == WARMUP_UPDATES)
        self._capture(update, shape)
        return self.run(update, step, rate)

    def reset(self) -> None:
        """Capture again: weights or optimiser state have moved."""
        self.update, self.seen = None, {}

    def _give_up(self, obstacle: str) -> None:
        self.enabled, self.obstacle = False, obstacle

    def _run_eager(self, update: Update, step: int, rate: float) -> PendingStep:
        return run_update(
            self.model, self.task, self.optimiser, update, step, rate, self.clip, self.backend, self.processes
        )

    def _warm_up(self, update: Update, step: int, rate: float, last: bool) -> PendingStep:
        """Run eagerly on a side stream; the last time, synchronising is an error, because a capture cannot
        synchronise."""
        try:
            with _side_stream(), forbid_cuda_sync() if last else nullcontext():
                return self._run_eager(update, step, rate)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            self._give_up(f"{_place_of(error)} waits for the GPU")
            return self._run_eager(update, step, rate)

    def _capture(self, update: Update, shape: Any) -> None:
        device = self.backend.device
        if _is_memory_tight(device):
            self._give_up("the GPU's memory is too small for a graph beside validation")
            return
        try:
            batches = [batch.each(torch.clone) for batch in update.batches]
            tokens, rate = torch.ones((), device=device), torch.zeros((), device=device)
            work = partial(
                update_model, self.model, self.task, self.optimiser, batches, tokens, rate, self.clip, self.backend,
                self.processes,
            )  # fmt: skip
            with _undone_on_error(self.optimiser), _capturable(self.optimiser):
                replay = _capture_graph(work, device)
        except Exception as error:  # what fails in a capture differs by driver, torch version and other load on the GPU
            reason = shorten((str(error).splitlines() or [""])[0], 200, placeholder=" …")
            self._give_up(f"{type(error).__name__}: {reason} ({_place_of(error)})")
            self.report(
                f"warning: capturing an update as a CUDA graph failed ({type(error).__name__}: {reason}); continuing "
                "without, which is slower but computes the same; compile: blocks avoids the attempt"
            )
            return
        self.update = _CapturedUpdate(replay, shape, batches, tokens, rate)

    def _replay(self, update: Update, step: int, rate: float) -> PendingStep:
        known = self.update
        assert known is not None
        for there, new in zip(known.batches, update.batches, strict=True):
            for into, tensor in zip(_tensors(there), _tensors(new), strict=True):
                into.copy_(tensor, non_blocking=True)
        known.tokens.fill_(update.tokens)
        known.rate.fill_(rate)
        return PendingStep(step, update.positions, update.tokens, rate, known.replay().clone())


@contextmanager
def _capturable(optimiser: torch.optim.Optimizer) -> Iterator[None]:
    for group in optimiser.param_groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in optimiser.param_groups:
            group["capturable"] = False


@contextmanager
def _undone_on_error(optimiser: torch.optim.Optimizer) -> Iterator[None]:
    """Restore what an incomplete capture has changed on the host: random states, the optimiser's references to tensors,
    gradients. Kernels are only recorded, so weights and moments on the device still have their values."""
    random = RandomState.capture()
    state = {parameter: dict(tensors) for parameter, tensors in optimiser.state.items()}
    rates = [group["lr"] for group in optimiser.param_groups]
    optimiser.zero_grad(set_to_none=True)
    try:
        yield
    except Exception:
        optimiser.zero_grad(set_to_none=True)
        optimiser.state.clear()
        optimiser.state.update(state)
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate
        fused: Any = optimiser
        fused.grad_scale = fused.found_inf = None
        random.restore()
        raise


def _what_varies(model: Any) -> str | None:
    """Why updates may not all run the same kernels; None: all blocks can be captured, and no memory is carried over."""
    blocks = [module for module in model.modules() if isinstance(module, Block)] if isinstance(model, nn.Module) else []
    if not blocks:
        return f"{type(model).__name__} is no model of blocks without memory"
    block = next((block for block in blocks if not block.capturable), None)
    if block is None:
        return None
    part = next((part for part in block.sublayers.values() if not (part.traceable or part.capturable)), block.wiring)
    return f"{type(part).__name__} branches on data"


def _place_of(error: BaseException) -> str:
    """Where in this package an error came from."""
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in extract_tb(error.__traceback__)
              if "allyouneed" in frame.filename and "training" not in Path(frame.filename).parts]  # fmt: skip
    return places[-1] if places else type(error).__name__


def _capture_graph(work: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Capture `work`; returns a function that replays it and returns its output tensor."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with capture_graph(graph):  # other threads may keep using CUDA
        result = work()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def _is_memory_tight(device: torch.device) -> bool:
    return (
        torch.cuda.max_memory_allocated(device)
        > MEMORY_FRACTION * torch.cuda.get_device_properties(device).total_memory
    )


def _tensors(batch: Batch, like: bool = False) -> list[Any]:
    """All tensors of a batch in order; `like`: their shapes and dtypes."""
    found: list[Any] = []

    def note(tensor: Tensor) -> Tensor:
        found.append((tuple(tensor.shape), tensor.dtype) if like else tensor)
        return tensor

    batch.each(note)
    return found


@contextmanager
def _side_stream() -> Iterator[None]:
    """Run on a side stream, as during capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)
