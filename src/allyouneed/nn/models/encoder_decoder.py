"""Encoder-decoder models: the paper, T5, Whisper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, WrapValidator
from torch import Tensor

from allyouneed.nn.batch import Batch, Input, Rows
from allyouneed.nn.common import least
from allyouneed.nn.context import Context, Memory, TokenLayout, WeightRecord
from allyouneed.nn.cost import Cost
from allyouneed.nn.embed.tokens import Embed, TokenEmbed
from allyouneed.nn.heads.vocabulary import Head, VocabularyHead
from allyouneed.nn.init.depth import Depth
from allyouneed.nn.models.base import (
    STACKS,
    Layers,
    Model,
    ModelModule,
    Problem,
    Size,
    Vocab,
    advance,
    count_layers,
    outer_problems,
    recorded_weights,
    request_weights,
    stack_problems,
    text_limit,
)
from allyouneed.nn.models.stack import Stack, stack_cost
from allyouneed.nn.observe import rename
from allyouneed.nn.states.base import State, States

_COUNT: TypeAdapter[int] = TypeAdapter(Size)


def _one_or_two(value: Any, _: Any) -> int | Vocab:
    """Validate by the type given, so that an error is reported once, by its own path."""
    return Vocab.model_validate(value) if isinstance(value, Mapping | Vocab) else _COUNT.validate_python(value)


class EncoderDecoder(Model):
    """ "Attention Is All You Need", figure 1.

    `source_embed`: a separate embedding of the source (BART's positions, Whisper's frames); default: as the target's.
    With a joint vocabulary both share the token matrix. `context`: an encoder of the sentences before the source
    (context_encoder.py).
    """

    stacks: ClassVar[tuple[str, ...]] = ("context", *STACKS)
    kind: Literal["encoder-decoder"] = "encoder-decoder"
    vocab: Annotated[int | Vocab, WrapValidator(_one_or_two)]
    """Number of tokens of a joint vocabulary with one embedding matrix, or `{source: …, target: …}`; training sets
    it."""
    embed: Embed = TokenEmbed()
    """How target tokens become vectors, and source tokens too unless `source_embed` is set."""
    source_embed: Embed | None = None
    """Another embedding of the source (BART's positions, Whisper's frames); default: `embed`."""
    encoder: Layers
    """The encoder's layers: a list of layers, or text over the names defined under `layers`."""
    decoder: Layers
    """The decoder's layers: a list of layers, or text over the names defined under `layers`."""
    context: Layers = ()
    """Layers of a second encoder, for the sentences before the source; layers with a `cross` of kind
    `context-attention` read it. Default: none."""
    separator: Annotated[int, Field(ge=0)] | None = None
    """Id of the token after each sentence of the context; training sets it."""
    head: Head = VocabularyHead()
    """What the model outputs: token logits, classes, tags, one vector, or hidden states."""

    def inputs(self) -> dict[str, bool]:
        return {"targets": False}

    @property
    def vocabs(self) -> Vocab:
        return self.vocab if isinstance(self.vocab, Vocab) else Vocab(source=self.vocab, target=self.vocab)

    @property
    def joint(self) -> bool:
        return not isinstance(self.vocab, Vocab)

    @property
    def limit(self) -> int | None:
        return text_limit(self.embed, self.decoder)

    @property
    def source_limit(self) -> int | None:
        read = text_limit(self.source_embed or self.embed, self.encoder)
        return least(read, *(layer.cross.longest for layer in self.decoder if layer.cross is not None))

    @property
    def generates(self) -> bool:
        return isinstance(self.head, VocabularyHead) and self.head.causal

    def build(self) -> EncoderDecoderModel:
        return EncoderDecoderModel(self)

    def cost(self, length: int = 1024) -> Cost:
        """FLOPs of one source token and one target token together."""
        total = self.embed.cost(self, self.vocabs.target)
        if not self.joint or self.source_embed is not None:
            total += (self.source_embed or self.embed).cost(self, self.vocabs.source, shared=self.joint)
        encoder = stack_cost(self.encoder, self, length)
        total += Cost(encoder.parameters, encoder.flops)  # an encoder has no decoding state
        total += stack_cost(self.decoder, self, length)
        if self.context:  # as many tokens of context as of the source
            context = stack_cost(self.context, self, length)
            total += Cost(context.parameters, context.flops)
        for layer in (*self.encoder, *self.decoder):  # keys and values, once per source token
            if layer.cross is not None:
                total += Cost(flops=layer.repeat * layer.cross.source_flops(self))
        return total + self.head.cost(self, self.vocabs.target, self.embed.vector(self), self.embed.ties)

    def problems(self) -> Iterator[Problem]:
        reads = bool(self.context)
        yield from stack_problems("encoder", self.encoder, self, has_source=reads, decodes=False)
        for number, layer in enumerate(self.encoder):
            if reads and layer.cross is not None and not reads_context(layer.cross):
                yield ("encoder", number, "cross", "kind"), "must be context-attention: an encoder reads no other text"
        if reads:
            yield from stack_problems("context", self.context, self, has_source=False, decodes=False)
            if self.separator is None:
                yield ("separator",), "missing: the id of the token after each sentence of the context"
            layers = (*self.encoder, *self.decoder)
            if not any(reads_context(layer.cross) for layer in layers):
                yield ("context",), "no layer has a cross of kind context-attention, so it would be ignored; add one"
            if (self.source_embed or self.embed).reads is not Rows:
                yield ("context",), "needs a source that is a text"
        yield from stack_problems("decoder", self.decoder, self, has_source=True, decodes=self.head.causal)
        mixers = [layer.mixer for layer in self.decoder if layer.mixer is not None]
        if not self.head.causal and all(mixer.causal for mixer in mixers):
            text = "no layer attends to later tokens, which this head needs; remove pattern: causal"
            yield ("decoder",), text
        if self.decoder and all(layer.cross is None or reads_context(layer.cross) for layer in self.decoder):
            yield ("decoder",), "no layer has a cross, so the decoder would ignore the source; add one"
        copies = self.joint and (self.source_embed or self.embed).reads is Rows
        yield from outer_problems(self.embed, self.head, self, self.vocabs.target, copies=copies, writes=True)
        if self.source_embed is not None:
            found = self.source_embed.problems(self, self.vocabs.source)
            yield from ((("source_embed", key), text) for key, text in found)


def reads_context(cross: Any) -> bool:
    """Whether a cross mixer reads the sentences before the source, not the source."""
    return getattr(cross, "reads_context", False)


class EncoderDecoderModel(ModelModule):
    """`encode` the source, then run whole targets (training) or new tokens over `States` (decoding)."""

    config: EncoderDecoder

    steps_by_stack: ClassVar[bool] = True

    def __init__(self, config: EncoderDecoder) -> None:
        super().__init__()
        self.config = config
        self.embed = config.embed.build(config, config.vocabs.target)
        self.source_embed = None
        if not config.joint or config.source_embed is not None:
            tokens = self.embed.tokens if config.joint else None
            self.source_embed = (config.source_embed or config.embed).build(config, config.vocabs.source, tokens)
        depths = (count_layers(config.encoder), count_layers(config.decoder))
        self.context: Stack | None = None
        if config.context:
            self.context = Stack(config.context, config, Depth(count_layers(config.context), depths[1], "encoder"))
        self.encoder = Stack(config.encoder, config, Depth(*depths, "encoder"))
        self.decoder = Stack(config.decoder, config, Depth(*depths, "decoder"))
        tied = self.embed.tokens.weight if config.embed.ties else None
        self.head = config.head.build(config, config.vocabs.target, tied)
        config.init.start(self, config.width)

    def encode(self, source: Input, record: WeightRecord | None = None, losses: list[Tensor] | None = None) -> Memory:
        embed = self.embed if self.source_embed is None else self.source_embed
        rename(embed, "source_embed")
        preceding = None
        if self.context is not None:
            assert isinstance(source, Rows) and self.config.separator is not None
            from allyouneed.nn.models.context_encoder import split_context

            before, source = split_context(source, embed.layout(source), self.config.separator)
            preceding = self.encode_context(before, embed, losses)
        layout: TokenLayout = embed.layout(source)
        x = embed(source, layout)
        context = Context(layout, inputs=x, record=record, losses=losses, encoder_preceding=preceding)
        tokens = source.tokens if isinstance(source, Rows) else None
        return Memory(self.encoder(x, context), layout, inputs=x, tokens=tokens, preceding=preceding)

    def encode_context(self, before: Rows, embed: Any, losses: list[Tensor] | None = None) -> Memory:
        """The sentences before the source."""
        assert self.context is not None
        layout: TokenLayout = embed.layout(before)
        x = embed(before, layout)
        return Memory(self.context(x, Context(layout, inputs=x, losses=losses)), layout)

    def decode(
        self, target: Rows, memory: Memory, record: WeightRecord | None = None, losses: list[Tensor] | None = None
    ) -> Tensor:
        layout: TokenLayout = self.embed.layout(target)
        x = self.embed(target, layout)
        context = Context(layout, memory=memory, inputs=x, record=record, losses=losses)
        return self._decode(x, context)

    def _decode(self, x: Tensor, context: Context, states: list[dict[str, State]] | None = None) -> Tensor:
        return self.head.read_source(self.decoder(x, context, states), context)

    def run(self, batch: Batch, losses: list[Tensor] | None) -> tuple[Tensor, TokenLayout]:
        assert batch.source is not None, "an encoder-decoder needs a source"
        hidden = self.decode(batch.rows, self.encode(batch.source, losses=losses), losses=losses)
        return hidden, self.embed.layout(batch.rows)

    def attention(
        self,
        batch: Batch,
        where: Literal["encoder", "decoder", "cross"] = "cross",
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
    ) -> dict[int, Tensor]:
        """Attention weights by layer: (batch, heads, queries, keys)."""
        assert batch.source is not None, "an encoder-decoder needs a source"
        stack, part = (self.encoder if where == "encoder" else self.decoder), ("cross" if where == "cross" else "mixer")
        modules, record = request_weights(stack, part, layers, heads)
        self.decode(batch.rows, self.encode(batch.source, record), record)
        return recorded_weights(stack, part, modules, record)

    def start(self, source: Input) -> States:
        """Encode these sources; states with an empty target."""
        memory = self.encode(source)
        return States(self.decoder.new_states(), len(memory.hidden), memory.hidden.device, memory)

    def advance(self, new: Rows, states: States, last: bool = False) -> Tensor:
        """Prefill or decode the next tokens of every row: see `base.advance`."""
        return advance(self.embed, self._decode, new, states, last)
