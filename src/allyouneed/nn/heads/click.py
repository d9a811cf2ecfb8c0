"""The head that predicts a click (Chen et al. 2019, "Behavior Sequence Transformer", 2.3)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.dropout import Dropout
from allyouneed.nn.heads.pooling import Pool, pool
from allyouneed.nn.heads.vocabulary import Head, HeadModule
from allyouneed.nn.linear.dense import Dense
from allyouneed.nn.ops.activations import ACTIVATIONS, Activation


class ClickHead(Head):
    """2.3: the vector of the item to recommend, the last of the sequence, and those of the other features (user,
    context) side by side, through fully connected layers, to the log-odds of a click.

    `pool: mean` reads the whole sequence instead. The paper's figure 1 joins the vectors of all items, which needs
    sequences of one length.
    """

    kind: Literal["click"] = "click"
    features: NonNegativeInt = 0
    """Other features, besides the sequence; training sets it from the data."""
    hidden: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1024, 512, 256)
    """Sizes of the hidden layers."""
    activation: Activation = "leaky-relu"
    """Activation of the hidden layers."""
    pool: Pool = "last"
    """Which vectors represent the sequence: the last (the item to recommend), the first, or the mean of all."""

    def build(self, common: Common, vocab: int | None, tied: Tensor | None) -> HeadModule:
        assert vocab is not None
        return ClickHeadModule(self, common, vocab, tied)

    def sizes(self, common: Common, inner: int) -> list[tuple[int, int]]:
        """Inputs and outputs of each layer; `inner`: width of a feature's vector."""
        inputs = [common.width + self.features * inner, *self.hidden]
        return list(zip(inputs, [*self.hidden, 1], strict=True))

    def cost(self, common: Common, vocab: int | None, inner: int, tied: bool) -> Cost:
        """FLOPs are per sequence and not counted per token."""
        assert vocab is not None
        width = inner if tied else common.width
        total = Cost(parameters=0 if tied or not self.features else vocab * width)
        for inputs, outputs in self.sizes(common, width):
            total += Cost(parameters=Dense().cost(inputs, outputs, True).parameters)
        return total

    def problems(self, common: Common, vocab: int | None) -> list[tuple[str, str]]:
        return [] if vocab is not None else [("kind", "features and items require vocab")]


class ClickHeadModule(HeadModule):
    def __init__(self, config: ClickHead, common: Common, vocab: int, tied: Tensor | None) -> None:
        super().__init__()
        self.pool: Pool = config.pool
        self.features = config.features
        width = common.width if tied is None else tied.shape[1]
        self.values: Tensor | None = None
        if self.features:
            own = torch.empty(vocab, width).normal_(std=width**-0.5) if tied is None else None
            self.values = tied if own is None else nn.Parameter(own)
        self.layers = nn.ModuleList(nn.Linear(*size) for size in config.sizes(common, width))
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = Dropout(common.dropout)

    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """(sequences,): log-odds of a click."""
        assert layout is not None, "pooling needs the token layout"
        vectors = pool(x, layout, self.pool)  # (sequences, width)
        if self.values is not None:
            # a batch without features has padding instead, token 0
            details = x.new_zeros(*x.shape[:2], self.features, dtype=torch.long)
            if layout.details is not None:
                details = layout.details[..., layout.details.shape[-1] - self.features :]
            ids = pool(details, layout, "last")  # (sequences, features)
            values = nn.functional.embedding(ids, self.values)
            vectors = torch.cat([vectors, self.dropout(values.flatten(1))], -1)
        for layer in self.layers[:-1]:
            vectors = self.dropout(self.activation(layer(vectors)))
        scores: Tensor = self.layers[-1](vectors)
        return scores.squeeze(-1)
