"""Whole models: a stack or two between embeddings and a head. There is no class per architecture."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, TypeAdapter, ValidationError, WrapValidator
from pydantic_core import InitErrorDetails, PydanticCustomError
from torch import Tensor, nn

from allyouneed.config import Config, Part, model_validator
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.block import Layer
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, Facts, Memory, Record
from allyouneed.nn.cost import Cost
from allyouneed.nn.embed import Embed, TokenEmbed
from allyouneed.nn.head import Head
from allyouneed.nn.stack import Stack, stack_cost
from allyouneed.nn.state import States

Layers = tuple[Layer, ...]
Problem = tuple[tuple[str | int, ...], str]


class Vocab(Config):
    """Separate vocabularies of the two languages."""

    source: Annotated[int, Field(gt=0)]
    target: Annotated[int, Field(gt=0)]


_COUNT = TypeAdapter(Annotated[int, Field(gt=0)])


def _one_or_two(value: Any, _: Any) -> int | Vocab:
    """Chosen by what was written, so that a mistake is named by its own path and not once for each alternative."""
    return Vocab.model_validate(value) if isinstance(value, Mapping | Vocab) else _COUNT.validate_python(value)


class Model(Part, Common, slot="model"):
    """A config that builds a whole model."""

    @abstractmethod
    def build(self) -> nn.Module: ...

    @abstractmethod
    def cost(self, length: int = 1024) -> Cost:
        """Parameters; FLOPs per token and decoding state at this context length."""

    def problems(self) -> Iterator[Problem]:
        """Combinations that cannot work, by path."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_impossible(self) -> Self:
        details = [
            InitErrorDetails(type=PydanticCustomError("config", "{text}", {"text": text}), loc=loc, input=None)
            for loc, text in self.problems()
        ]
        if details:
            raise ValidationError.from_exception_data(type(self).__name__, details)
        return self


class EncoderDecoder(Model):
    """ "Attention Is All You Need", figure 1."""

    kind: Literal["encoder-decoder"] = "encoder-decoder"
    # one number: both languages share it, and one embedding matrix
    vocab: Annotated[int | Vocab, WrapValidator(_one_or_two)]
    embed: Embed = TokenEmbed()
    encoder: Layers
    decoder: Layers

    @property
    def vocabs(self) -> Vocab:
        return self.vocab if isinstance(self.vocab, Vocab) else Vocab(source=self.vocab, target=self.vocab)

    @property
    def joint(self) -> bool:
        return not isinstance(self.vocab, Vocab)

    @property
    def head(self) -> Head:
        return Head(tied=isinstance(self.embed, TokenEmbed) and self.embed.tied)

    def build(self) -> EncoderDecoderModel:
        return EncoderDecoderModel(self)

    def cost(self, length: int = 1024) -> Cost:
        """FLOPs of one source token and one target token together."""
        total = self.embed.cost(self, self.vocabs.target)
        if not self.joint:
            total += self.embed.cost(self, self.vocabs.source)
        encoder = stack_cost(self.encoder, self, length)
        total += Cost(encoder.parameters, encoder.flops)  # an encoder keeps nothing while decoding
        total += stack_cost(self.decoder, self, length)
        for layer in self.decoder:  # keys and values of the source, once per source token
            if layer.cross is not None:
                total += Cost(flops=layer.repeat * layer.cross.source_flops(self))
        return total + self.head.cost(self, self.vocabs.target)

    def problems(self) -> Iterator[Problem]:
        for name, layers in (("encoder", self.encoder), ("decoder", self.decoder)):
            for number, layer in enumerate(layers):
                for slot, part in layer.sublayers.items():
                    for key, text in part.problems(self):
                        yield (name, number, slot, key), text
                if not layer.sublayers:
                    yield (name, number), "a layer needs a mixer, a cross or a channel"
                if name == "encoder" and layer.cross is not None:
                    yield (name, number, "cross"), "an encoder has nothing to look across at"
                if layer.cross is not None and not layer.cross.crosses:
                    yield (name, number, "cross", "kind"), "cannot look at an encoder (attention can)"
                if name == "decoder" and layer.mixer is not None and not layer.mixer.causal:
                    yield (name, number, "mixer"), "a decoder must not see later tokens; give it a causal pattern"
            if not layers:
                yield (name,), "needs at least 1 layer"
        if self.decoder and not any(layer.cross for layer in self.decoder):
            yield ("decoder",), "no layer has a cross: the decoder would never see the source"


class EncoderDecoderModel(nn.Module):
    """`encode` once, then either the whole target at once (training) or tokens as they come, over `States`."""

    def __init__(self, config: EncoderDecoder) -> None:
        super().__init__()
        self.config = config
        self.embed = config.embed.build(config, config.vocabs.target)
        self.source_embed = None if config.joint else config.embed.build(config, config.vocabs.source)
        self.encoder = Stack(config.encoder, config)
        self.decoder = Stack(config.decoder, config)
        self.head = config.head.build(config, config.vocabs.target, self.embed)
        config.init.apply(self, config.width)

    def encode(self, source: Rows, record: Record | None = None) -> Memory:
        facts = Facts.of(source)
        embed = self.embed if self.source_embed is None else self.source_embed
        x = embed(source.tokens, facts.positions)
        return Memory(self.encoder(x, Context(facts, record=record)), facts)

    def decode(self, target: Rows, memory: Memory, record: Record | None = None) -> Tensor:
        facts = Facts.of(target)
        x = self.embed(target.tokens, facts.positions)
        hidden: Tensor = self.decoder(x, Context(facts, memory=memory, record=record))
        return hidden

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states of the target (batch, time, width); the task asks the head for a loss or for logits."""
        assert batch.source is not None, "an encoder-decoder needs a source"
        return self.decode(batch.target, self.encode(batch.source))

    def logits(self, batch: Batch) -> Tensor:
        scores: Tensor = self.head(self(batch))
        return scores

    @torch.no_grad()
    def attention(
        self,
        batch: Batch,
        where: Literal["encoder", "decoder", "cross"] = "cross",
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
    ) -> dict[int, Tensor]:
        """The weights of chosen layers and heads, recomputed: layer -> (batch, heads, queries, keys)."""
        assert batch.source is not None, "an encoder-decoder needs a source"
        stack, part = (self.encoder if where == "encoder" else self.decoder), ("cross" if where == "cross" else "mixer")
        found: list[Any] = [block.sublayers for block in stack.blocks]  # of layers without the part, nothing is shown
        numbers = [n for n, parts in enumerate(found) if part in parts] if layers is None else layers
        modules = {number: found[number][part] for number in numbers}
        record: Record = {module: heads for module in modules.values()}
        self.decode(batch.target, self.encode(batch.source, record), record)
        return {number: record[module] for number, module in modules.items()}

    def start(self, source: Rows) -> States:
        """Ready to decode these sources: nothing of the target seen yet."""
        return States(self.decoder.new_states(), len(source.tokens), source.tokens.device, self.encode(source))

    def advance(self, new: Rows, states: States) -> Tensor:
        """Take in the next tokens of every row (one or many, unequal lengths padded right); hidden states of them."""
        assert new.side == "right" and new.segments is None, "decoding takes one sentence a row, padded on the right"
        time, device = new.tokens.shape[1], new.tokens.device
        facts = Facts.following(states.lengths, time, device)
        end = max(states.lengths, default=0) + time
        slots = Facts(torch.arange(end, device=device)[None], start=0)
        places = facts.positions
        if new.lengths is not None:  # padding stands nowhere: it must not outgrow learned positions
            inside = torch.arange(time, device=device)[None] < new.lengths.to(device)[:, None]
            places = torch.where(inside, places, 0)
        x = self.embed(new.tokens, places)
        context = Context(facts, slots=slots, memory=states.memory)
        hidden: Tensor = self.decoder(x, context, states.layers)
        added = [time] * len(states.lengths) if new.lengths is None else new.lengths.tolist()
        states.lengths = [seen + count for seen, count in zip(states.lengths, added, strict=True)]
        return hidden
