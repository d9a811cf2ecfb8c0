"""From tokens to vectors."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

from torch import Tensor, nn

from allyouneed.config import Part
from allyouneed.errors import UserError
from allyouneed.nn.common import Common
from allyouneed.nn.cost import Cost
from allyouneed.nn.dropout import Dropout
from allyouneed.nn.positions import NoPositions, Positions


class Embed(Part, slot="embedding", default="tokens"):
    @abstractmethod
    def build(self, common: Common, vocab: int) -> nn.Module: ...

    @abstractmethod
    def cost(self, common: Common, vocab: int) -> Cost: ...


class TokenEmbed(Embed):
    """A vector per token, times √width (the paper, 3.4), plus positions, then dropout (5.4)."""

    kind: Literal["tokens"] = "tokens"
    positions: Positions = NoPositions()
    scale: Literal["sqrt-width", "none"] = "sqrt-width"
    tied: bool = True  # the output projection is the (target) embedding matrix

    def build(self, common: Common, vocab: int) -> nn.Module:
        return TokenEmbedModule(self, common, vocab)

    def cost(self, common: Common, vocab: int) -> Cost:
        return Cost(parameters=vocab * common.width) + self.positions.cost(common.width)


class TokenEmbedModule(nn.Module):
    def __init__(self, config: TokenEmbed, common: Common, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, common.width)
        self.positions = config.positions.build(common.width)
        self.scale = common.width**0.5 if config.scale == "sqrt-width" else 1.0
        self.limit = config.positions.limit
        self.dropout = Dropout(common.dropout)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if self.limit is not None and (longest := int(positions.max()) + 1) > self.limit:
            raise UserError(f"a sentence of {longest} tokens is longer than the model's {self.limit} learned positions")
        x: Tensor = self.tokens(tokens) * self.scale
        added = self.positions(positions)
        return self.dropout(x if added is None else x + added.to(x.dtype))
