"""Direct preference optimisation: learn from preferences without a reward model."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from allyouneed.data.batches.packing import Items, PaddedBatches
from allyouneed.errors import UserError
from allyouneed.nn.batch import IGNORE, Batch, Rows
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.feedback.preference import ComparisonItems, ComparisonTask, widen_half
from allyouneed.tasks.task import BUDGET, Loss


class DPO(ComparisonTask):
    """−log σ(β log π(y_chosen|x)/π_ref(y_chosen|x) − β log π(y_rejected|x)/π_ref(y_rejected|x)) (Rafailov et al. 2023,
    eq. 7). The reference is frozen: its part of every comparison is computed once, before training."""

    metrics: ClassVar[dict[str, bool]] = {"accuracy": True, "margin": True, "loss": False}
    decoding: ClassVar[dict[str, Any]] = {"method": "sample", "top_p": 0.9, "extra": 256}
    needs_start: ClassVar[bool] = True
    kind: Literal["dpo"] = "dpo"
    beta: Annotated[float, Field(gt=0)] = 0.1
    """β: how strongly the policy is held to the reference; lower allows it to move further."""
    free_keys: ClassVar[tuple[str, ...]] = ("reference",)
    reference: Path | None = None
    """Model folder of π_ref; default: the model to start from."""

    @classmethod
    def defaults_from(cls, start: Path) -> dict[str, Any]:
        return super().defaults_from(start) | {"reference": str(start)}

    def loss(self, model: Any, batch: Batch) -> Loss:
        """`labels` (comparisons,) are the reference's log π_ref(y_chosen|x) − log π_ref(y_rejected|x)."""
        assert batch.labels is not None
        losses: list[Tensor] = []
        margins = log_odds(model, batch, losses) - batch.labels
        return self.compare(self.beta * margins).with_auxiliary([loss / 2 for loss in losses])


def log_odds(model: Any, batch: Batch, losses: list[Tensor] | None = None) -> Tensor:
    """log π(y_chosen|x) − log π(y_rejected|x) of each comparison (comparisons,)."""
    assert batch.source is not None and batch.labels is not None
    chosen, rejected = (
        answer_log_probs(model, side, len(batch.labels), losses) for side in (batch.source, batch.target)
    )
    return chosen - rejected


def answer_log_probs(model: Any, rows: Any, count: int, losses: list[Tensor] | None = None) -> Tensor:
    """log π(answer|prompt) (count,) of the sequences of packed or padded rows, in order."""
    hidden, layout = model.run(Batch(rows), losses)
    labels = answer_labels(rows, layout)
    logits = widen_half(model.head(hidden))  # (batch, time, vocab)
    each = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")
    owners = sequence_numbers(layout, labels.shape).flatten().clamp(max=count)
    return -each.new_zeros(count + 1).index_add(0, owners, each)[:count]


def answer_labels(rows: Rows, layout: TokenLayout) -> Tensor:
    """The next token of each (batch, time), if it is part of the answer to the same prompt."""
    assert rows.prompt is not None
    segments = layout.segments if layout.segments is not None else torch.ones_like(rows.tokens)
    answer = ~rows.prompt.bool() & (segments > 0)
    labels = rows.tokens.new_full(rows.tokens.shape, IGNORE)
    follows = answer[:, 1:] & (segments[:, 1:] == segments[:, :-1])
    labels[:, :-1] = rows.tokens[:, 1:].where(follows, IGNORE)
    return labels


def sequence_numbers(layout: TokenLayout, shape: torch.Size) -> Tensor:
    """The number of each token's sequence in the batch, from 0 (batch, time); padding has a number too."""
    if layout.segments is None:
        return torch.arange(shape[0], device=layout.positions.device)[:, None].expand(shape)
    counts = layout.segments.amax(1)  # sequences of each row
    before = counts.cumsum(0) - counts
    return before[:, None] + (layout.segments - 1).clamp(min=0)


class Reference:
    """The frozen model π_ref. Its log-odds of every comparison of a store are computed once."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()
        self.known: dict[str, NDArray[np.float32]] = {}

    def apply(self, items: Items) -> Items:
        """The same items with the reference's log-odds."""
        assert isinstance(items, ComparisonItems)
        name = items.store.fingerprint
        if name not in self.known:
            self.known[name] = self.margins(items)
        made = copy(items)
        made.margins = self.known[name]
        return made

    @torch.no_grad()
    def margins(self, items: ComparisonItems) -> NDArray[np.float32]:
        longest = max(int(side.max(initial=0)) for side in items.lengths(0))
        batches = PaddedBatches(items, max(longest, BUDGET))
        found = np.zeros(len(items), np.float32)
        device = next(self.model.parameters()).device
        for step, batch in enumerate(batches.batches(0)):
            found[batches.describe(0, step)] = log_odds(self.model, batch.to(device)).float().cpu().numpy()
        return found


def reference_path(reference: Path | str | None) -> Path:
    if reference is None or not Path(reference).exists():
        raise UserError(f"{reference}: the reference of this model is missing; restore it, or set task.reference")
    return Path(reference)
