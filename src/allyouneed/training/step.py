"""One update: forward and backward passes over its batches, gradient norm, optimiser step.

Nothing here synchronises with the device. Results stay there as one small tensor until `fetch_results`; a non-finite
loss or gradient makes the update a no-op on the device itself.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from allyouneed.nn.batch import Batch
from allyouneed.nn.states.segment_memory import SegmentMemory
from allyouneed.training.backend import Backend
from allyouneed.training.distributed.objective import Objective
from allyouneed.training.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from allyouneed.training.distributed.replicas import DataParallelModel, TensorParallelReplica
from allyouneed.training.optim.optimiser import apply_update, gradient_norm
from allyouneed.training.prefetch import DataPosition, Update

TrainedModel = nn.Module | SegmentMemory | DataParallelModel | TensorParallelReplica


@dataclass(frozen=True)
class StepResult:
    """The result of one update, on the host."""

    step: int
    positions: list[DataPosition]
    tokens: int
    rate: float
    loss: float  # per token, minimised
    plain: float  # per token, without label smoothing
    norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.plain, 700.0)) if math.isfinite(self.plain) else math.nan


@dataclass(frozen=True)
class PendingStep:
    """The same, still on the device: `numbers` is (loss, plain, norm)."""

    step: int
    positions: list[DataPosition]
    tokens: int
    rate: float
    numbers: Tensor


def accumulate_gradients(
    model: TrainedModel, task: Objective, batches: list[Batch], tokens: int | Tensor, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Gradients of the mean loss over all batches, equal to those of one batch of that size. `tokens`: labels of all
    batches and processes."""
    totals: list[Tensor] = []
    plains: list[Tensor] = []
    for left, batch in enumerate(batches, start=1 - len(batches)):
        with (
            model.sync_gradients(left < 0)
            if isinstance(model, DataParallelModel | TensorParallelReplica)
            else nullcontext()
        ):
            with backend.autocast():
                loss = (
                    model.loss(batch)
                    if isinstance(model, DataParallelModel | TensorParallelReplica)
                    else task.loss(model, batch)
                )
            mean = loss.total / tokens
            mean.backward()
        totals.append(mean.detach())
        plains.append(loss.plain.detach() / tokens)
    return torch.stack(totals).sum(), torch.stack(plains).sum()


def run_update(
    model: TrainedModel,
    task: Objective,
    optimiser: torch.optim.Optimizer,
    update: Update,
    step: int,
    rate: float,
    clip: float | None,
    backend: Backend,
    processes: ProcessGroup = SINGLE_PROCESS,
) -> PendingStep:
    numbers = update_model(model, task, optimiser, update.batches, update.tokens, rate, clip, backend, processes)
    return PendingStep(step, update.positions, update.tokens, rate, numbers)


def update_model(
    model: TrainedModel,
    task: Objective,
    optimiser: torch.optim.Optimizer,
    batches: list[Batch],
    tokens: int | Tensor,
    rate: float | Tensor,
    clip: float | None,
    backend: Backend,
    processes: ProcessGroup = SINGLE_PROCESS,
) -> Tensor:
    """One update on the device; returns (loss, plain, norm). `tokens` and `rate` may be device tensors."""
    optimiser.zero_grad(set_to_none=True)
    loss, plain = accumulate_gradients(model, task, batches, tokens, backend)
    if not processes.is_single:
        loss, plain = processes.sum(torch.stack([loss.float(), plain.float()])).unbind()
    norm = gradient_norm(model.parameters())
    bad = (~(loss.isfinite() & norm.isfinite())).float()
    apply_update(optimiser, rate, norm, clip, bad)
    return torch.stack([loss.float(), plain.float(), norm.float()])


def fetch_results(pending: list[PendingStep]) -> list[StepResult]:
    """Copy the results of several updates to the host at once: the only synchronisation with the device."""
    if not pending:
        return []
    numbers = torch.stack([p.numbers for p in pending]).tolist()
    return [
        StepResult(p.step, p.positions, p.tokens, p.rate, loss, plain, norm)
        for p, (loss, plain, norm) in zip(pending, numbers, strict=True)
    ]
