"""Encoder models: BERT, ViT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torch import Tensor, nn

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
from allyouneed.nn.models.weights import assign_weights, meta_model, named_tensors
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
    generator: Encoder | None = None
    """A smaller encoder whose guesses this one tells from the text, in training only; they share the vectors of tokens,
    positions and types (ELECTRA: Clark et al. 2020, 3.2)."""

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
        if self.generator is not None:
            other = self.generator
            own, shared = other.cost(length), other.embed.cost(other, self.vocab).parameters
            if other.embed.vector(other) != other.width:
                shared -= other.linear.cost(other.embed.vector(other), other.width, True).parameters
            total += Cost(own.parameters - shared, own.flops)
        return Cost(total.parameters, total.flops)  # an encoder has no decoding state

    def problems(self) -> Iterator[Problem]:
        yield from stack_problems("encoder", self.encoder, self, has_source=False, decodes=False, widens=True)
        yield from outer_problems(self.embed, self.head, self, self.vocab, self.encoder)
        if self.generator is not None:
            yield from self._generator_problems(self.generator)
        if getattr(self.head, "distilled", False) and not getattr(self.embed, "distillation_token", False):
            yield ("head", "distilled"), "requires embed.distillation_token"

    def _generator_problems(self, other: Encoder) -> Iterator[Problem]:
        if not isinstance(self.embed, TokenEmbed) or not isinstance(other.embed, TokenEmbed):
            yield ("generator",), "both encoders must read tokens"
        elif other.vocab != self.vocab or other.embed.vector(other) != self.embed.vector(self):
            yield (
                ("generator",),
                f"needs vocab: {self.vocab} and embed.inner: {self.embed.vector(self)}, which it shares",
            )
        elif other.embed.model_dump(exclude=OWN) != self.embed.model_dump(exclude=OWN):
            yield ("generator", "embed"), "must be as the model's, whose vectors it shares"


OWN = {"inner", "tied", "chosen", "asks", "scale"}  # keys of an embedding that a generator has of its own
SHARED = ("tokens", "positions", "types", "norm")  # parts of it that a generator does not


def without_generator(model: nn.Module) -> nn.Module:
    """The same encoder alone, with the same tensors."""
    config: Any = model.config
    if getattr(config, "generator", None) is None:
        return model
    alone = meta_model(config.model_copy(update={"generator": None}))
    known = named_tensors(model)
    assign_weights(alone, {name: known[name].detach() for name in named_tensors(alone)})
    return alone.eval()


class EncoderModel(ModelModule):
    def __init__(self, config: Encoder) -> None:
        super().__init__()
        self.config = config
        self.embed = config.embed.build(config, config.vocab)
        self.encoder = Stack(config.encoder, config, Depth(count_layers(config.encoder), 0, "encoder"))
        tied = self.embed.tokens.weight if config.embed.ties else None
        self.head = config.head.build(behind(config.encoder, config), config.vocab, tied)
        self.generator = None if config.generator is None else config.generator.build()
        if self.generator is not None:
            for name in SHARED:
                setattr(self.generator.embed, name, getattr(self.embed, name))
            if config.generator is not None and config.generator.embed.ties:
                self.generator.head.weight = self.embed.tokens.weight
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
