"""A stack that goes on writing: GPT-2, Llama."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.context import Context, Record, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.models.base import (
    Layers,
    ModelModule,
    Problem,
    Writer,
    advance,
    count_layers,
    outer_problems,
    stack_problems,
    watched,
    weights_of,
)
from allyouneed.nn.models.stack import Stack, behind, stack_cost
from allyouneed.nn.states.base import States
from allyouneed.nn.wiring.residual import Depth


class Decoder(Writer):
    """Embeddings, a stack that never sees the future, a head (Radford et al. 2018, eq. 2)."""

    kind: Literal["decoder"] = "decoder"
    decoder: Layers

    def build(self) -> DecoderModel:
        return DecoderModel(self)

    def cost(self, length: int = 1024) -> Cost:
        total = self.embed.cost(self, self.vocab) + stack_cost(self.decoder, self, length)
        return total + self.head.cost(behind(self.decoder, self), self.vocab, self.embed.vector(self), self.embed.ties)

    def problems(self) -> Iterator[Problem]:
        yield from stack_problems("decoder", self.decoder, self, crosses=False, decodes=True, widens=True)
        yield from outer_problems(self.embed, self.head, self, self.vocab, self.decoder)
        if self.embed.reads is not Rows:
            yield ("embed", "kind"), "what is written is text; its embedding must be 'tokens'"


class DecoderModel(ModelModule):
    """The whole text at once (training), or tokens as they come, over `States`."""

    def __init__(self, config: Decoder) -> None:
        super().__init__()
        self.config = config
        self.embed = config.embed.build(config, config.vocab)
        self.decoder = Stack(config.decoder, config, Depth(0, count_layers(config.decoder), "decoder"))
        tied = self.embed.tokens.weight if config.embed.ties else None
        self.head = config.head.build(behind(config.decoder, config), config.vocab, tied)
        config.init.apply(self, config.width)

    def decode(self, target: Rows, record: Record | None = None, losses: list[Tensor] | None = None) -> Tensor:
        layout: TokenLayout = self.embed.layout(target)
        hidden: Tensor = self.decoder(self.embed(target, layout), Context(layout, record=record, losses=losses))
        return hidden

    def run(self, batch: Batch, losses: list[Tensor] | None) -> tuple[Tensor, TokenLayout]:
        return self.decode(batch.rows, losses=losses), self.embed.layout(batch.rows)

    def attention(
        self, batch: Batch, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
    ) -> dict[int, Tensor]:
        """Attention weights by layer: (batch, heads, queries, keys)."""
        modules, record = watched(self.decoder, "mixer", layers, heads)
        self.decode(batch.rows, record)
        return weights_of(self.decoder, "mixer", modules, record)

    def start(self, rows: int, device: torch.device | str | None = None) -> States:
        """Ready to write so many texts: nothing seen yet."""
        where = next(self.parameters()).device if device is None else torch.device(device)
        return States(self.decoder.new_states(), rows, where, None)

    def advance(self, new: Rows, states: States, last: bool = False, losses: list[Tensor] | None = None) -> Tensor:
        """Take in the next tokens of every row (one or many, unequal lengths padded right); hidden states of them, or
        of each row's `last` one only (batch, 1, width)."""
        return advance(self.embed, self.decoder, new, states, last, losses)
