"""Translation, and everything else that turns one sequence into another."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from torch import nn

from allyouneed.nn.batch import IGNORE, Batch
from allyouneed.tasks.task import Loss, Task


class Translation(Task):
    """Each target token given the source and the target before it, with label smoothing (the paper, 5.4)."""

    kind: Literal["translation"] = "translation"
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1
    consistency: Annotated[float, Field(ge=0)] = 0.0  # α of R-Drop (Liang et al. 2021); 0: one pass, as in the paper

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        assert batch.labels is not None
        head: Any = model.head
        tokens = (batch.labels != IGNORE).sum()
        hidden = model(batch)
        smoothed, plain = head.loss(hidden, batch.labels, self.smoothing)
        if not (self.consistency and model.training):
            return Loss(smoothed, plain.detach(), tokens)
        # R-Drop, eq. 4, halved so that its scale is that of one pass: two dropouts of one sentence should agree
        again = model(batch)
        total = (smoothed + head.loss(again, batch.labels, self.smoothing)[0]) / 2
        total = total + self.consistency / 4 * head.divergence(hidden, again, batch.labels)
        return Loss(total, plain.detach(), tokens)
