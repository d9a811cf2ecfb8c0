"""Decoder-only models: GPT-2, Llama."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.context import Context, TokenLayout, WeightRecord
from allyouneed.nn.cost import Cost
from allyouneed.nn.init.depth import Depth
from allyouneed.nn.models.base import (
    GenerativeModel,
    Layers,
    ModelModule,
    Problem,
    advance,
    count_layers,
    outer_problems,
    recorded_weights,
    request_weights,
    stack_problems,
)
from allyouneed.nn.models.stack import Stack, behind, stack_cost
from allyouneed.nn.states.base import States


class DecoderStack(GenerativeModel):
    """Embeddings, a causal stack, a head (Radford et al. 2018, eq. 2)."""

    decoder: Layers
    """The stack's layers: a list of layers, or text over the names defined under `layers`."""

    def cost(self, length: int = 1024) -> Cost:
        total = self.embed.cost(self, self.vocab) + stack_cost(self.decoder, self, length)
        return total + self.head.cost(behind(self.decoder, self), self.vocab, self.embed.vector(self), self.embed.ties)

    def problems(self) -> Iterator[Problem]:
        yield from stack_problems("decoder", self.decoder, self, has_source=False, decodes=True, widens=True)
        yield from outer_problems(self.embed, self.head, self, self.vocab, self.decoder, writes=True)


class Decoder(DecoderStack):
    """Embeddings, a causal stack, a head (Radford et al. 2018, eq. 2)."""

    kind: Literal["decoder"] = "decoder"

    def build(self) -> DecoderModel:
        return DecoderModel(self)


class DecoderModel(ModelModule):
    """Runs whole texts (training) or new tokens over `States` (decoding)."""

    steps_by_stack: ClassVar[bool] = True

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embed = config.embed.build(config, config.vocab)
        self.decoder = Stack(config.decoder, config, Depth(0, count_layers(config.decoder), "decoder"))
        tied = self.embed.tokens.weight if config.embed.ties else None
        self.head = config.head.build(behind(config.decoder, config), config.vocab, tied)
        config.init.start(self, config.width)

    def decode(self, target: Rows, record: WeightRecord | None = None, losses: list[Tensor] | None = None) -> Tensor:
        layout: TokenLayout = self.embed.layout(target)
        return self.decoder(self.embed(target, layout), Context(layout, record=record, losses=losses))

    def rows(self, batch: Batch) -> Rows:
        """What the stack reads of a batch."""
        return batch.rows

    def run(self, batch: Batch, losses: list[Tensor] | None) -> tuple[Tensor, TokenLayout]:
        return self.decode(self.rows(batch), losses=losses), self.embed.layout(batch.rows)

    def attention(
        self, batch: Batch, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
    ) -> dict[int, Tensor]:
        """Attention weights by layer: (batch, heads, queries, keys)."""
        modules, record = request_weights(self.decoder, "mixer", layers, heads)
        self.decode(self.rows(batch), record)
        return recorded_weights(self.decoder, "mixer", modules, record)

    def start(self, rows: int, device: torch.device | str | None = None) -> States:
        """Empty states for `rows` texts."""
        where = next(self.parameters()).device if device is None else torch.device(device)
        return States(self.decoder.new_states(), rows, where, None)

    def advance(self, new: Rows, states: States, last: bool = False, losses: list[Tensor] | None = None) -> Tensor:
        """Prefill or decode the next tokens of every row: see `base.advance`."""
        return advance(self.embed, self.decoder, new, states, last, losses)
