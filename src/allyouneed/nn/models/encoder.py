"""Encoder models: BERT, ViT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from torch import Tensor

from allyouneed.nn.batch import Batch, Input, Rows
from allyouneed.nn.context import Context, Memory, TokenLayout, WeightRecord
from allyouneed.nn.cost import Cost
from allyouneed.nn.embed.tokens import Embed, TokenEmbed
from allyouneed.nn.heads.vocabulary import Head, VocabularyHead
from allyouneed.nn.init.depth import Depth
from allyouneed.nn.models.base import (
    Layers,
    Model,
    ModelModule,
    Problem,
    Size,
    Vocab,
    count_layers,
    outer_problems,
    recorded_weights,
    request_weights,
    stack_problems,
    text_limit,
)
from allyouneed.nn.models.stack import Stack, behind, stack_cost
from allyouneed.nn.models.two_stream import advance_segment
from allyouneed.nn.states.base import States


class Encoder(Model):
    """Embeddings, a stack, a head (Devlin et al. 2019, 3; Dosovitskiy et al. 2021, eq. 1-4)."""

    kind: Literal["encoder"] = "encoder"
    vocab: Size | None = None
    """Number of tokens; training sets it from the tokenizer; null for images and audio."""
    embed: Embed = TokenEmbed()
    """How the input becomes vectors."""
    encoder: Layers
    """The stack's layers: a list of layers, or text over the names defined under `layers`."""
    head: Head = VocabularyHead()
    """What the model outputs: token logits, classes, tags, one vector, or hidden states."""

    @property
    def vocabs(self) -> Vocab | None:
        return None if self.vocab is None else Vocab(source=self.vocab, target=self.vocab)

    @property
    def limit(self) -> int | None:
        return text_limit(self.embed, self.encoder)

    def build(self) -> EncoderModel:
        return EncoderModel(self)

    def cost(self, length: int = 1024) -> Cost:
        total = self.embed.cost(self, self.vocab) + stack_cost(self.encoder, self, length)
        total += self.head.cost(behind(self.encoder, self), self.vocab, self.embed.vector(self), self.embed.ties)
        return Cost(total.parameters, total.flops)  # an encoder has no decoding state

    def problems(self) -> Iterator[Problem]:
        yield from stack_problems("encoder", self.encoder, self, has_source=False, decodes=False, widens=True)
        yield from outer_problems(self.embed, self.head, self, self.vocab, self.encoder)
        if getattr(self.head, "distilled", False) and not getattr(self.embed, "distillation_token", False):
            yield ("head", "distilled"), "requires embed.distillation_token"


class EncoderModel(ModelModule):
    def __init__(self, config: Encoder) -> None:
        super().__init__()
        self.config = config
        self.embed = config.embed.build(config, config.vocab)
        self.encoder = Stack(config.encoder, config, Depth(count_layers(config.encoder), 0, "encoder"))
        tied = self.embed.tokens.weight if config.embed.ties else None
        self.head = config.head.build(behind(config.encoder, config), config.vocab, tied)
        config.init.start(self, config.width)

    def encode(self, given: Input, record: WeightRecord | None = None, losses: list[Tensor] | None = None) -> Memory:
        layout: TokenLayout = self.embed.layout(given)
        x = self.embed(given, layout)
        return Memory(self.encoder(x, Context(layout, record=record, losses=losses)), layout)

    def run(self, batch: Batch, losses: list[Tensor] | None) -> tuple[Tensor, TokenLayout]:
        memory = self.encode(batch.target, losses=losses)
        return memory.hidden, memory.layout

    def start(self, rows: int) -> States:
        """Empty states for `rows` texts read in segments."""
        device = next(self.parameters()).device
        return States(self.encoder.new_states(segments=True), rows, device, None)

    def advance(
        self, new: Rows, states: States, query_stream: Rows | None = None, losses: list[Tensor] | None = None
    ) -> Tensor:
        """The next segment of every row: see `advance_segment`."""
        return advance_segment(self.embed, self.encoder, new, states, query_stream, losses)

    def attention(
        self, batch: Batch, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
    ) -> dict[int, Tensor]:
        """Attention weights by layer: (batch, heads, queries, keys)."""
        modules, record = request_weights(self.encoder, "mixer", layers, heads)
        self.encode(batch.target, record)
        return recorded_weights(self.encoder, "mixer", modules, record)
