"""What a model is trained for: an objective. One file per task."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

from torch import Tensor, nn

from allyouneed.config import Part
from allyouneed.nn.batch import Batch


class Loss(NamedTuple):
    """Sums over the labelled tokens of a batch, so that batches and processes add up exactly."""

    total: Tensor  # what is minimised
    plain: Tensor  # negative log-likelihood without smoothing: exp(plain / tokens) is the perplexity
    tokens: Tensor  # how many tokens were labelled


class Task(Part, slot="task"):
    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Loss: ...
