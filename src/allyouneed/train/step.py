"""One update: forward and backward over its batches, the norm of the gradients, and the verdict over both.

Nothing here waits for the device. What it measures stays on the device as one small tensor, to be fetched when it is
convenient; a non-finite loss or gradient makes the update a no-op on the device itself.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from allyouneed.nn.batch import Batch
from allyouneed.nn.states.segment_memory import SegmentMemory
from allyouneed.train.cuda.machine import Machine
from allyouneed.train.distributed.objective import Objective
from allyouneed.train.distributed.process_group import ALONE, Team
from allyouneed.train.distributed.replicas import Copy, Replica
from allyouneed.train.feed import Place, Update
from allyouneed.train.optimiser import apply_update, gradient_norm

Reader = nn.Module | SegmentMemory | Replica | Copy


@dataclass(frozen=True)
class Measured:
    """What one update was, on the host."""

    step: int
    places: list[Place]
    tokens: int
    rate: float
    loss: float  # per token, what is minimised
    plain: float  # per token, without smoothing and the like
    norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.plain, 700.0)) if math.isfinite(self.plain) else math.nan


@dataclass(frozen=True)
class Pending:
    """The same, still on the device: `numbers` is (loss, plain, norm)."""

    step: int
    places: list[Place]
    tokens: int
    rate: float
    numbers: Tensor


def accumulate_gradients(
    model: Reader, task: Objective, batches: list[Batch], tokens: int | Tensor, machine: Machine
) -> tuple[Tensor, Tensor]:
    """Gradients of the loss per token over all batches: the same as of one batch as large as all of them. `tokens`: of
    all of them, those of other processes counted."""
    totals: list[Tensor] = []
    plains: list[Tensor] = []
    for left, batch in enumerate(batches, start=1 - len(batches)):
        with model.gathering(left < 0) if isinstance(model, Replica | Copy) else nullcontext():
            with machine.autocast():
                loss = model.loss(batch) if isinstance(model, Replica | Copy) else task.loss(model, batch)
            share = loss.total / tokens
            share.backward()
        totals.append(share.detach())
        plains.append(loss.plain.detach() / tokens)
    return torch.stack(totals).sum(), torch.stack(plains).sum()


def run_update(
    model: Reader,
    task: Objective,
    optimiser: torch.optim.Optimizer,
    update: Update,
    step: int,
    rate: float,
    clip: float | None,
    machine: Machine,
    team: Team = ALONE,
) -> Pending:
    numbers = measured(model, task, optimiser, update.batches, update.tokens, rate, clip, machine, team)
    return Pending(step, update.places, update.tokens, rate, numbers)


def measured(
    model: Reader,
    task: Objective,
    optimiser: torch.optim.Optimizer,
    batches: list[Batch],
    tokens: int | Tensor,
    rate: float | Tensor,
    clip: float | None,
    machine: Machine,
    team: Team = ALONE,
) -> Tensor:
    """Do it all on the device, and what was measured: (loss, plain, norm). `tokens` and `rate` may lie there too."""
    optimiser.zero_grad(set_to_none=True)
    loss, plain = accumulate_gradients(model, task, batches, tokens, machine)
    if not team.alone:
        loss, plain = team.sum(torch.stack([loss.float(), plain.float()])).unbind()
    norm = gradient_norm(model.parameters())
    bad = (~(loss.isfinite() & norm.isfinite())).float()
    apply_update(optimiser, rate, norm, clip, bad)
    return torch.stack([loss.float(), plain.float(), norm.float()])


def fetch(pending: list[Pending]) -> list[Measured]:
    """Bring the numbers of several updates to the host at once: the only place where the host waits for the device."""
    if not pending:
        return []
    numbers = torch.stack([p.numbers for p in pending]).tolist()
    return [
        Measured(p.step, p.places, p.tokens, p.rate, loss, plain, norm)
        for p, (loss, plain, norm) in zip(pending, numbers, strict=True)
    ]
