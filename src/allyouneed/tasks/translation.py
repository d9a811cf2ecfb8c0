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

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        assert batch.labels is not None
        head: Any = model.head
        smoothed, plain = head.loss(model(batch), batch.labels, self.smoothing)
        return Loss(smoothed, plain.detach(), (batch.labels != IGNORE).sum())
