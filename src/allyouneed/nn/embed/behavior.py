"""Embedding of a user's behaviour: items with side information and times (Chen et al. 2019, "Behavior Sequence
Transformer for E-commerce Recommendation in Alibaba", arXiv:1905.06874, 2.1)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.batch import Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.dropout import Dropout
from allyouneed.nn.embed.tokens import Embed, EmbedModule
from allyouneed.nn.observe import observe
from allyouneed.nn.positions.absolute import NoPositions, Positions
from allyouneed.nn.positions.time_gaps import TimeGaps


class BehaviorEmbed(Embed):
    """2.1: the vectors of an item, of its side information (its category) and of its position side by side. All have
    the same width, an equal part of the model's; the first two come from one matrix, since all values share one
    vocabulary. The last item of a sequence is the one to recommend.
    """

    kind: Literal["behavior"] = "behavior"
    sides: Annotated[int, Field(ge=0)] = 0
    """Columns of side information of an item, such as its category; training sets it from the data."""
    positions: Positions = TimeGaps()
    """Positions by the time since each item, or by the number of items since, if the data has no times."""
    tied: bool = True
    """Share the matrix with a head that reads other features."""

    def inputs(self) -> dict[str, bool]:
        return {"tokens": True, "lengths": False}

    @property
    def is_text(self) -> bool:
        return False  # without times, positions are counted from the end of the sequence

    @property
    def ties(self) -> bool:
        return self.tied

    @property
    def limit(self) -> int | None:
        return self.positions.limit

    @property
    def parts(self) -> int:
        """Vectors side by side."""
        return 1 + self.sides + (not isinstance(self.positions, NoPositions))

    def vector(self, common: Common) -> int:
        return common.width // self.parts

    def build(self, common: Common, vocab: int | None, tokens: nn.Embedding | None = None) -> EmbedModule:
        assert vocab is not None
        return BehaviorEmbedModule(self, common, vocab, tokens)

    def cost(self, common: Common, vocab: int | None, shared: bool = False) -> Cost:
        assert vocab is not None
        width = self.vector(common)
        return Cost(parameters=0 if shared else vocab * width) + self.positions.cost(width)

    def problems(self, common: Common, vocab: int | None) -> list[tuple[str, str]]:
        found = [] if vocab is not None else [("kind", "embeddings of items require vocab")]
        if common.width % self.parts:
            text = f"a width of {common.width} cannot be divided among {self.parts} vectors: the item, {self.sides} "
            found.append(("kind", f"{text}of side information, its position; set another width"))
        at = self.positions.problems(self.vector(common))
        return found + [(f"positions.{key}", text) for key, text in at]


class BehaviorEmbedModule(EmbedModule):
    def __init__(self, config: BehaviorEmbed, common: Common, vocab: int, tokens: nn.Embedding | None) -> None:
        super().__init__()
        width = config.vector(common)
        self.tokens = nn.Embedding(vocab, width) if tokens is None else tokens
        self.positions = config.positions.build(width)
        self.sides = config.sides
        self.dropout = Dropout(common.dropout)

    def layout(self, given: Rows) -> TokenLayout:
        return TokenLayout.of(given)

    def forward(self, given: Rows, layout: TokenLayout) -> Tensor:
        ids = given.tokens[..., None]  # (batch, time, 1 + sides)
        if self.sides:
            # a batch without side information has padding instead, token 0
            details = torch.zeros_like(ids).expand(-1, -1, self.sides) if given.details is None else given.details
            ids = torch.cat([ids, details[..., : self.sides]], -1)
        x = observe(self, "tokens", self.tokens(ids).flatten(2))
        ages = items_since(layout, given.tokens.shape) if given.ages is None else given.ages
        added = self.positions(ages)
        if added is not None:
            x = torch.cat([x, observe(self, "positions", added.to(x.dtype))], -1)
        return observe(self, "", self.dropout(x))


def items_since(layout: TokenLayout, shape: torch.Size) -> Tensor:
    """How many items of the same sequence follow each (batch, time)."""
    segments = layout.segments if layout.segments is not None else torch.ones(shape, device=layout.device)
    same = segments[:, :, None] == segments[:, None, :]
    return same.triu(1).sum(-1).where(segments > 0, 0)
