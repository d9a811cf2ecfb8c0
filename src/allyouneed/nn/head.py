"""From vectors to scores over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from allyouneed.config import Config
from allyouneed.nn.common import Common
from allyouneed.nn.cost import Cost
from allyouneed.nn.crossentropy import linear_cross_entropy


class Head(Config):
    """A linear map to the vocabulary, sharing the embedding's matrix when tied (the paper, 3.4)."""

    tied: bool = True

    def build(self, common: Common, vocab: int, embed: nn.Module) -> HeadModule:
        return HeadModule(common.width, vocab, embed.tokens.weight if self.tied else None)  # type: ignore[union-attr, arg-type]

    def cost(self, common: Common, vocab: int) -> Cost:
        return Cost(parameters=0 if self.tied else vocab * common.width, flops=2 * vocab * common.width)


class HeadModule(nn.Module):
    def __init__(self, width: int, vocab: int, tied: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, width).normal_(std=width**-0.5)) if tied is None else tied

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype))

    def loss(self, x: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        """Sums over all labelled tokens: the (smoothed) loss to train on, and the plain negative log-likelihood."""
        return linear_cross_entropy(x.flatten(0, -2), self.weight, labels.flatten(), smoothing)
