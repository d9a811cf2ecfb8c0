"""Embedding slot, and token embeddings."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.config import Part
from allyouneed.errors import UserError
from allyouneed.nn.batch import Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.dropout import Dropout
from allyouneed.nn.norms import Norm
from allyouneed.nn.observe import observe
from allyouneed.nn.positions.absolute import NoPositions, Positions

Size = Annotated[int, Field(gt=0)]


class Embed(Part, slot="embedding", default="tokens"):
    reads: ClassVar[type] = Rows  # input type: Rows or Signal
    medium: ClassVar[Literal["text", "images", "audio"]] = "text"  # what its input is made of

    @property
    def is_text(self) -> bool:
        """Whether it embeds tokens one by one, as a decoder needs."""
        return self.reads is Rows

    @property
    def ties(self) -> bool:
        """Whether the output projection shares the embedding matrix."""
        return False

    def vector(self, common: Common) -> int:
        """Width of a token vector."""
        return common.width

    @abstractmethod
    def build(self, common: Common, vocab: int | None, tokens: nn.Embedding | None = None) -> EmbedModule:
        """`tokens`: embedding matrix to share."""

    @abstractmethod
    def cost(self, common: Common, vocab: int | None, shared: bool = False) -> Cost:
        """`shared`: without the token matrix, which another embedding owns."""

    @property
    def limit(self) -> int | None:
        """Maximum sentence length; None: unlimited."""
        return None

    def problems(self, common: Common, vocab: int | None) -> list[tuple[str, str]]:
        return []


class EmbedModule(nn.Module):
    tokens: nn.Embedding  # text embeddings only

    @abstractmethod
    def layout(self, given: Any) -> TokenLayout:
        """Layout of the tokens of this input."""

    @abstractmethod
    def forward(self, given: Any, layout: TokenLayout) -> Tensor:
        """(batch, time, width)"""


class TokenEmbed(Embed):
    """A vector per token, times √width (the paper, 3.4), plus positions, then dropout (5.4).

    `types`: number of token types with an added vector each (BERT: Devlin et al. 2019, figure 2); the first is the
    default. `norm` normalises the sum (BERT, BLOOM). `inner`: token vectors of this width, projected to the model width
    (ALBERT's factorisation: Lan et al. 2020, 3.1). `asks`: a learned initial vector for the query stream (see
    models/two_stream.py; XLNet: Yang et al. 2019, 2.3, w). `chosen: first`: the first token of each sentence is global
    unless the batch marks others (Longformer classification: Beltagy et al. 2020, 3.1).
    """

    kind: Literal["tokens"] = "tokens"
    positions: Positions = NoPositions()
    """Absolute positions added to the token vectors."""
    scale: Literal["sqrt-width", "none"] = "sqrt-width"
    """Multiply the token vectors by √width (the paper, 3.4), or not."""
    tied: bool = True
    """Share the (target) embedding matrix with the head (the paper, 3.4)."""
    types: Size | None = None
    """Number of token types, each with an added vector (BERT's segments); default: none."""
    norm: Norm | None = None
    """Norm of the sum (BERT, BLOOM); default: none."""
    inner: Size | None = None
    """Width of the token vectors, projected to the model width (ALBERT); default: the model width."""
    asks: bool = False
    """Learn an initial vector for the query stream of permutation language models (XLNet)."""
    chosen: Literal["none", "first"] = "none"
    """`first`: the first token of each sentence is global, unless the batch marks others (Longformer)."""

    def inputs(self) -> dict[str, bool]:
        return {"tokens": True, "lengths": False} | ({} if self.types is None else {"types": False})

    @property
    def ties(self) -> bool:
        return self.tied

    @property
    def limit(self) -> int | None:
        return self.positions.limit

    def vector(self, common: Common) -> int:
        """Width of the vectors that are summed."""
        return self.inner or common.width

    def build(self, common: Common, vocab: int | None, tokens: nn.Embedding | None = None) -> EmbedModule:
        assert vocab is not None
        return TokenEmbedModule(self, common, vocab, tokens)

    def cost(self, common: Common, vocab: int | None, shared: bool = False) -> Cost:
        assert vocab is not None
        width = self.vector(common)
        total = Cost(parameters=(0 if shared else vocab * width) + ((self.types or 0) + self.asks) * width)
        total += self.positions.cost(width)
        if self.norm is not None:
            total += self.norm.cost(width)
        if self.inner is not None:
            total += common.linear.cost(width, common.width, True)
        return total

    def problems(self, common: Common, vocab: int | None) -> list[tuple[str, str]]:
        found = [] if vocab is not None else [("kind", "token embeddings require vocab")]
        at = self.positions.problems(self.vector(common))
        return found + [(f"positions.{key}", text) for key, text in at]


class TokenEmbedModule(EmbedModule):
    def __init__(self, config: TokenEmbed, common: Common, vocab: int, tokens: nn.Embedding | None) -> None:
        super().__init__()
        width = config.vector(common)
        self.tokens = nn.Embedding(vocab, width) if tokens is None else tokens
        self.positions = config.positions.build(width)
        self.types = None if config.types is None else nn.Embedding(config.types, width)
        self.asking = nn.Embedding(1, width) if config.asks else None
        self.norm = None if config.norm is None else config.norm.build(width)
        self.widen = None if config.inner is None else common.linear.build(width, common.width, True)
        self.scale = common.width**0.5 if config.scale == "sqrt-width" else 1.0
        self.limit, self.chosen = config.limit, config.chosen
        self.dropout = Dropout(common.dropout)

    def layout(self, given: Rows) -> TokenLayout:
        layout = TokenLayout.of(given)
        if self.chosen == "none" or layout.chosen is not None:
            return layout
        first = layout.positions == 0
        return replace(layout, chosen=first if layout.real is None else first & layout.real)

    def check_length(self, layout: TokenLayout, positions: Tensor) -> None:
        """Synchronizes with the device only if the batch shape does not bound the length."""
        least = (layout.start or 0) + layout.time if layout.start is not None or layout.packed else None
        if self.limit is None or not positions.numel() or (least is not None and least <= self.limit):
            return
        if (longest := int(positions.max()) + 1) > self.limit:
            raise UserError(f"sentence of {longest} tokens exceeds the model's {self.limit} learned positions")

    def forward(self, given: Rows, layout: TokenLayout) -> Tensor:
        return self.project(self.vectors(given, layout))

    def vectors(self, given: Rows, layout: TokenLayout, positions: bool = True) -> Tensor:
        """Vectors of tokens before they are projected to the model width, with absolute positions or without."""
        x: Tensor = self.tokens(given.tokens)
        if given.vectors is not None and given.slots is not None:
            x = torch.where((given.slots > 0)[..., None], given.vectors.to(x.dtype), x)
        x = observe(self, "tokens", x if self.scale == 1.0 else x * self.scale)
        if self.asking is not None and layout.order is not None:
            x = torch.where((layout.order < 0)[..., None], self.asking.weight.to(x.dtype), x)
        return self.add_positions(x, layout, given.types, positions)

    def project(self, x: Tensor) -> Tensor:
        return observe(self, "", x if self.widen is None else self.widen(x))

    def place(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """Vectors (batch, time, width) other than those of tokens, with positions and types added."""
        return self.project(self.add_positions(x, layout))

    def position_vectors(self, positions: Tensor, bound: int | None) -> Tensor | None:
        """(batch or 1, time, width)"""
        if bound is not None and positions.numel() > bound and getattr(self.positions, "per_position", False):
            every: Tensor = self.positions(torch.arange(bound, device=positions.device)[None])[0]
            return every[positions]
        return self.positions(positions)

    def add_positions(
        self, x: Tensor, layout: TokenLayout, types: Tensor | None = None, absolute: bool = True
    ) -> Tensor:
        positions = layout.real_positions  # padding must not exceed the learned positions
        self.check_length(layout, positions)
        added = self.position_vectors(positions, layout.position_bound) if absolute else None
        if added is not None:
            x = x + observe(self, "positions", added.to(x.dtype))
        if self.types is not None:
            x = x + self.types(torch.zeros_like(x[..., 0], dtype=torch.long) if types is None else types)
        if self.norm is not None:
            x = self.norm(x, Context(layout))
        return self.dropout(x)
