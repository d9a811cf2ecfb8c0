"""One loop that trains any model on any generator of examples, in memory: probes and trained claims share it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn

from allyouneed.nn.batch import IGNORE, Batch, Rows
from allyouneed.training.optim.optimiser import Adam, apply_update, gradient_norm
from allyouneed.training.optim.schedule import Cosine

Sample = Callable[[Generator, int], tuple[Tensor, Tensor]]  # (dice, rows) -> tokens and labels (rows, time)
Loss = Callable[[Tensor, Tensor], Tensor]  # of logits and labels
ENOUGH, EVERY = 0.995, 50  # accuracy at which training stops, and how often it is looked at
CHECKED = 64  # rows that are looked at


@dataclass(frozen=True)
class Fit:
    """How a model is trained. `warmup`: share of the steps, 0: none."""

    rate: float = 5e-3
    steps: int = 400
    rows: int = 32
    weight_decay: float = 0.1
    warmup: float = 0.1
    clip: float | None = 1.0
    seed: int = 0
    device: str = "cpu"


@dataclass
class Trained:
    """`losses` by step, of training batches; `steps`: how many it took; `diverged`: at a loss that is not finite."""

    losses: dict[float, float] = field(default_factory=dict)
    steps: int = 0
    diverged: bool = False


def fit(
    net: nn.Module, sample: Sample, how: Fit, check: Sample | None = None, loss: Loss = nn.functional.cross_entropy
) -> Trained:
    """Train on fresh examples: AdamW, linear warm-up, then a cosine to zero; until it is accurate on `check`."""
    model: Any = net.to(how.device).train()
    dice, found = torch.Generator().manual_seed(1000 + how.seed), Trained()
    optimiser = Adam(weight_decay=how.weight_decay, eps=1e-8).build(model)
    schedule = Cosine(peak=how.rate, warmup=round(how.warmup * how.steps))
    fine = torch.zeros((), device=how.device)
    for step in range(1, how.steps + 1):
        tokens, labels = (side.to(how.device) for side in sample(dice, how.rows))
        optimiser.zero_grad(set_to_none=True)
        logits = answers(model, tokens, labels)
        wanted = labels[labels != IGNORE]
        mean = loss(logits.float(), wanted)
        mean.backward()
        norm = gradient_norm(model.parameters())
        apply_update(optimiser, schedule.rate(step, 0, how.steps), norm, how.clip, fine)
        found.steps = step
        if step % EVERY == 0 or step in (1, how.steps):
            found.losses[float(step)] = value = mean.item()
            if not math.isfinite(value) or not math.isfinite(norm.item()):
                found.diverged = True
                break
            if check is not None and score(model, check, CHECKED, seed=step)[1] >= ENOUGH:
                break
            model.train()
    return found


def answers(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Logits where a label is asked for: (labels, vocab)."""
    logits: Tensor = model.head(model(Batch(Rows(tokens)))[labels != IGNORE])
    return logits


@torch.no_grad()
def score(net: nn.Module, sample: Sample, rows: int = 256, seed: int = 0) -> tuple[float, float]:
    """Mean loss, and accuracy of the labels of fresh examples, which training has not seen."""
    model: Any = net.eval()
    tokens, labels = (
        side.to(next(net.parameters()).device) for side in sample(torch.Generator().manual_seed(seed), rows)
    )
    logits, wanted = answers(model, tokens, labels).float(), labels[labels != IGNORE]
    accuracy = (logits.argmax(-1) == wanted).float().mean()
    return float(nn.functional.cross_entropy(logits, wanted)), float(accuracy)
