"""Whole models: a stack or two between embeddings and a head. There is no class per architecture.

The kinds are files of their own: encoder.py, decoder.py, encoder_decoder.py, decoder_decoder.py, two_towers.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError
from torch import Tensor, nn

from allyouneed.config import Config, Part, model_validator
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Asks, Context, Record, TokenLayout, Wanted
from allyouneed.nn.cost import Cost
from allyouneed.nn.embed.tokens import Embed, TokenEmbed
from allyouneed.nn.heads.vocabulary import Head, VocabularyHead
from allyouneed.nn.models.block import Layer
from allyouneed.nn.models.layer_text import written_out
from allyouneed.nn.models.stack import Stack, behind, changes
from allyouneed.nn.states.base import States

Layers = tuple[Layer, ...]
Problem = tuple[tuple[str | int, ...], str]
Size = Annotated[int, Field(gt=0)]
STACKS = ("encoder", "decoder")


class Vocab(Config):
    """Separate vocabularies of the two languages."""

    source: Size
    target: Size


class Model(Part, Common, slot="model"):
    """A config that builds a whole model.

    `layers` names layers, so that a stack can be written as a text: `decoder: "3×local, 1×full"`. The config itself
    holds the stacks written out.
    """

    stacks: ClassVar[tuple[str, ...]] = STACKS  # the keys under which stacks can stand

    @abstractmethod
    def build(self) -> nn.Module: ...

    @abstractmethod
    def cost(self, length: int = 1024) -> Cost:
        """Parameters; FLOPs per token and decoding state at this context length."""

    @property
    def vocabs(self) -> Vocab | None:
        """How many different tokens it reads and says; None when it reads no text."""
        return None

    @property
    def limit(self) -> int | None:
        """The longest text it can place; None when there is no limit."""
        return None

    @property
    def generates(self) -> bool:
        """Whether it can say something token by token."""
        return False

    def problems(self) -> Iterator[Problem]:
        """Combinations that cannot work, by path."""
        yield from ()

    @model_validator(mode="before")
    @classmethod
    def _write_out_stacks(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not any(isinstance(data.get(name), str) for name in cls.stacks):
            return data
        tree = dict(data)
        named = tree.pop("layers", {})
        for name in cls.stacks:
            if isinstance(tree.get(name), str):
                try:
                    tree[name] = written_out(tree[name], named)
                except ValueError as error:
                    raise _refusal(cls, [((name,), str(error))]) from None
        return tree

    @model_validator(mode="after")
    def _refuse_impossible(self) -> Self:
        if found := list(self.problems()):
            raise _refusal(type(self), found)
        return self


def _refusal(cls: type, problems: list[Problem]) -> ValidationError:
    details = [
        InitErrorDetails(type=PydanticCustomError("config", "{text}", {"text": text}), loc=loc, input=None)
        for loc, text in problems
    ]
    return ValidationError.from_exception_data(cls.__name__, details)


class Writer(Model):
    """A model that goes on writing a text: one vocabulary, one embedding, one head."""

    vocab: Size
    embed: Embed = TokenEmbed()
    head: Head = VocabularyHead()

    @property
    def vocabs(self) -> Vocab:
        return Vocab(source=self.vocab, target=self.vocab)

    @property
    def limit(self) -> int | None:
        return self.embed.limit

    @property
    def generates(self) -> bool:
        return isinstance(self.head, VocabularyHead)


def stack_problems(
    name: str, layers: Layers, common: Common, crosses: bool, decodes: bool, widens: bool = False
) -> Iterator[Problem]:
    """What cannot work in a stack. `crosses`: there is a source to look at. `decodes`: nothing may see the future.
    `widens`: what reads it may be wider than the model."""
    for number, layer in enumerate(layers):
        for slot, part in layer.sublayers.items():
            for key, text in part.problems(common):
                yield (name, number, slot, key), text
        for key, text in layer.problems(common):
            yield (name, number, key), text
        closes = number + 1 == len(layers) or changes(layer.wiring, layers[number + 1].wiring)
        if closes and layer.wiring.outputs(common) != common.width and not (widens and number + 1 == len(layers)):
            text = f"ends {layer.wiring.outputs(common)} wide, where {common.width} features are expected"
            yield (name, number, "wiring"), text
        if not layer.sublayers:
            yield (name, number), "a layer needs a mixer, a cross or a channel"
        if layer.mixer is not None and not layer.mixer.mixes:
            yield (name, number, "mixer", "kind"), "looks at an encoder, and at nothing else: let it be the cross"
        if layer.cross is not None and not crosses:
            yield (name, number, "cross"), "an encoder has nothing to look across at"
        elif layer.cross is not None and not layer.cross.crosses:
            yield (name, number, "cross", "kind"), "cannot look at an encoder (attention can)"
        elif layer.cross is not None:
            for key, text in layer.cross.cross_problems(common):
                yield (name, number, "cross", key), text
        if decodes and layer.mixer is not None and layer.mixer.mixes and not layer.mixer.causal:
            why = layer.mixer.leak()
            text = "a decoder must not see later tokens" + (f", and {why}" if why else "")
            yield (name, number, "mixer"), f"{text}; give it a causal pattern"
    if not layers:
        yield (name,), "needs at least 1 layer"


def outer_problems(
    embed: Embed, head: Head, common: Common, vocab: int | None, layers: Layers = ()
) -> Iterator[Problem]:
    """What cannot work before and after the stacks. `layers`: those that the head reads, if they may widen."""
    yield from ((("embed", key), text) for key, text in embed.problems(common, vocab))
    common = behind(layers, common) if layers else common
    yield from ((("head", key), text) for key, text in head.problems(common, vocab))
    if not isinstance(head, VocabularyHead):
        return
    vector = embed.vector(common)
    if embed.ties and head.maxout is not None:
        if head.maxout != vector:
            yield ("head", "maxout"), f"tied to token vectors of width {vector}, it must be {vector}"
    elif embed.ties and vector != common.width and head.transform is None:
        text = f"tied to token vectors of width {vector}, it must come back to it: set head.transform"
        yield ("head", "transform"), text


def count_layers(layers: Sequence[Layer]) -> int:
    return sum(layer.repeat for layer in layers)


def watched(stack: Stack, part: str, layers: Sequence[int] | None, heads: Sequence[int] | None) -> tuple[Any, Record]:
    """(layer number -> module, what to record) for the attention of some layers; of layers without it, nothing."""
    found: list[Any] = [block.sublayers for block in stack.blocks]
    numbers = [n for n, parts in enumerate(found) if part in parts] if layers is None else layers
    modules = {number: found[number][part] for number in numbers}
    return modules, {module: Wanted(heads) for module in modules.values()}


def weights_of(stack: Stack, part: str, modules: dict[int, nn.Module], record: Record) -> dict[int, Tensor]:
    """What was recorded, by layer: a module that layers share was called once by each of them, in order."""
    sublayers: list[Any] = [block.sublayers for block in stack.blocks]
    all_modules = [parts[part] if part in parts else None for parts in sublayers]  # noqa: SIM401  # ModuleDict has no get
    return {
        number: record[module].found[sum(other is module for other in all_modules[:number])]
        for number, module in modules.items()
        if record[module].found  # a mixer of another kind has no weights to show
    }


def advance(
    embed: Any,
    stack: Callable[..., Tensor],
    new: Rows,
    states: States,
    last: bool = False,
    losses: list[Tensor] | None = None,
    asks: Asks | None = None,
) -> Tensor:
    """Take in the next tokens of every row (one or many, unequal lengths padded right); hidden states of them, or of
    each row's `last` one only (batch, 1, width)."""
    assert new.side == "right" and new.segments is None, "decoding takes one sentence a row, padded on the right"
    time = new.tokens.shape[1]
    layout = TokenLayout.following(states.lengths, new)
    end = max(states.lengths, default=0) + time
    states.mark(layout, end)
    x = embed(new, layout)
    context = Context(layout, states.slots(end), states.memory, x, losses=losses, asks=asks)
    hidden = stack(x, context, states.layers)
    if last:
        hidden = hidden.take_along_dim(last_places(layout)[..., None], 1)
    added = [time] * len(states.lengths) if new.lengths is None else new.lengths.tolist()
    states.lengths = [seen + count for seen, count in zip(states.lengths, added, strict=True)]
    return hidden


def last_places(new: TokenLayout) -> Tensor:
    """(batch or 1, 1): where each row's last new token stands; rows without one say the first place."""
    if new.segments is None:
        return torch.full((1, 1), new.time - 1, device=new.device)
    return (new.segments.sum(1, keepdim=True) - 1).clamp(min=0)


class ModelModule(nn.Module):
    """What every model answers: `model(batch)` gives hidden states, `logits` what the head makes of them."""

    config: Model
    head: Any

    @abstractmethod
    def run(self, batch: Batch, losses: list[Tensor] | None) -> tuple[Tensor, TokenLayout]:
        """Hidden states (batch, time, width) and where they stand."""

    def forward(self, batch: Batch, losses: list[Tensor] | None = None) -> Tensor:
        """`losses` collects what parts add to the loss; the task asks the head for a loss or for logits."""
        return self.run(batch, losses)[0]

    def logits(self, batch: Batch) -> Tensor:
        scores: Tensor = self.head(*self.run(batch, None))
        return scores
