"""Base of whole models: one or two stacks between embeddings and a head. There is no class per architecture.

The kinds: encoder.py, decoder.py, encoder_decoder.py, decoder_decoder.py, recurrent_memory.py, two_towers.py, retro.py,
interleaved.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError
from torch import Tensor, nn

from allyouneed.config import Config, Part, iter_parts, model_validator
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.common import Common, least
from allyouneed.nn.context import Context, MemoryBuilder, TokenLayout, WeightRecord, WeightRequest
from allyouneed.nn.cost import Cost
from allyouneed.nn.embed.tokens import Embed, TokenEmbed
from allyouneed.nn.heads.vocabulary import Head, VocabularyHead
from allyouneed.nn.models.block import Layer
from allyouneed.nn.models.calling import Lengths, tensor_batch
from allyouneed.nn.models.layer_text import MAX_LAYERS, expand_layers
from allyouneed.nn.models.stack import Stack, behind, changes
from allyouneed.nn.observe import observe
from allyouneed.nn.states.base import States


def _bounded(layers: Any) -> Any:
    if isinstance(layers, list | tuple) and len(layers) > MAX_LAYERS:  # before each of them is validated
        message = f"{len(layers):,} layers; at most {MAX_LAYERS:,} are supported"
        raise PydanticCustomError("config", "{text}", {"text": message})
    return layers


Layers = Annotated[tuple[Layer, ...], BeforeValidator(_bounded)]
Problem = tuple[tuple[str | int, ...], str]
Size = Annotated[int, Field(gt=0)]
STACKS = ("encoder", "decoder")
MAX_PARAMETERS = 10**14  # no machine holds as many


class Vocab(Config):
    """Separate source and target vocabularies."""

    source: Size
    """Tokens of the source vocabulary."""
    target: Size
    """Tokens of the target vocabulary."""


class Model(Part, Common, slot="model"):
    """A config that builds a whole model.

    `layers` names layers for stacks written as text: `decoder: "3×local, 1×full"`. The validated config holds the
    expanded stacks.
    """

    stacks: ClassVar[tuple[str, ...]] = STACKS  # fields that hold stacks

    @abstractmethod
    def build(self) -> nn.Module: ...

    @abstractmethod
    def cost(self, length: int = 1024) -> Cost:
        """Parameters; FLOPs per token and decoding state at this context length."""

    @property
    def vocabs(self) -> Vocab | None:
        """Vocabulary sizes; None for models without text."""
        return None

    @property
    def limit(self) -> int | None:
        """Maximum text length; None: unlimited."""
        return None

    @property
    def reads_types(self) -> bool:
        """Whether token types change what it computes: its embedding has several, or its positions compare them."""
        read = (name for part in iter_parts(self) if hasattr(part, "inputs") for name in part.inputs())
        return "types" in read and getattr(getattr(self, "embed", None), "types", None) != 1

    @property
    def generates(self) -> bool:
        """Whether it generates text token by token."""
        return False

    @property
    def bounded_state(self) -> bool:
        """Whether decoding takes constant memory for texts of any length, whatever its layers cache."""
        return False

    def problems(self) -> Iterator[Problem]:
        """Invalid combinations, as (path, message)."""
        yield from ()

    @model_validator(mode="before")
    @classmethod
    def _expand_stacks(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not any(isinstance(data.get(name), str) for name in cls.stacks):
            return data
        tree = dict(data)
        named = tree.pop("layers", {})
        for name in cls.stacks:
            if isinstance(tree.get(name), str):
                try:
                    tree[name] = expand_layers(tree[name], named)
                except ValueError as error:
                    raise _validation_error(cls, [((name,), str(error))]) from None
        return tree

    @model_validator(mode="after")
    def _check_problems(self) -> Self:
        if found := list(self.problems()):
            raise _validation_error(type(self), found)
        if (count := self.cost(1).parameters) > MAX_PARAMETERS:
            raise _validation_error(
                type(self), [((), f"{count:,.0f} parameters; at most {MAX_PARAMETERS:,} are supported")]
            )
        return self


def _validation_error(cls: type, problems: list[Problem]) -> ValidationError:
    details = [
        InitErrorDetails(type=PydanticCustomError("config", "{text}", {"text": text}), loc=loc, input=None)
        for loc, text in problems
    ]
    return ValidationError.from_exception_data(cls.__name__, details)


class GenerativeModel(Model):
    """A generative text model: one vocabulary, one embedding, one head."""

    vocab: Size
    """Number of tokens; training sets it from the tokenizer."""
    embed: Embed = TokenEmbed()
    """How the input becomes vectors."""
    head: Head = VocabularyHead()
    """What the model outputs: token logits, classes, tags, one vector, or hidden states."""

    @property
    def vocabs(self) -> Vocab:
        return Vocab(source=self.vocab, target=self.vocab)

    @property
    def limit(self) -> int | None:
        layers: Layers = sum((getattr(self, name) for name in self.stacks if hasattr(self, name)), ())
        return text_limit(self.embed, layers)

    @property
    def generates(self) -> bool:
        return isinstance(self.head, VocabularyHead)


def text_limit(embed: Embed, layers: Layers) -> int | None:
    """Tokens of the longest text that the embedding and the mixers can read; None: any number."""
    parts = [layer.mixer for layer in layers]
    return least(embed.limit, *(part.longest for part in parts if part is not None))


def stack_problems(
    name: str, layers: Layers, common: Common, has_source: bool, decodes: bool, widens: bool = False
) -> Iterator[Problem]:
    """Invalid combinations in a stack. `has_source`: cross-attention has a source. `decodes`: no token may attend to a
    later one. `widens`: the output may be wider than the model."""
    for number, layer in enumerate(layers):
        for slot, part in layer.sublayers.items():
            for key, text in part.problems(common):
                yield (name, number, slot, key), text
        for key, text in layer.problems(common):
            yield (name, number, key), text
        closes = number + 1 == len(layers) or changes(layer.wiring, layers[number + 1].wiring)
        if closes and layer.wiring.outputs(common) != common.width and not (widens and number + 1 == len(layers)):
            text = f"outputs {layer.wiring.outputs(common)} features; the next part needs {common.width}"
            yield (name, number, "wiring"), text
        if not layer.sublayers:
            yield (name, number), "empty layer; set mixer, cross or channel"
        if layer.mixer is not None and not layer.mixer.supports_self:
            yield (name, number, "mixer", "kind"), "needs an encoder; use it as cross"
        if layer.cross is not None and not has_source:
            yield (name, number, "cross"), "this stack has no source to attend to; remove cross"
        elif layer.cross is not None and not layer.cross.supports_cross:
            yield (name, number, "cross", "kind"), "does not support cross-attention; use attention"
        elif layer.cross is not None:
            for key, text in layer.cross.cross_problems(common):
                yield (name, number, "cross", key), text
        later = {"channel": layer.channel and layer.channel.leak(), "halt": layer.halt and layer.halt.leak()}
        for slot, reason in later.items():
            if decodes and reason is not None:
                yield (name, number, slot), f"a decoder must not look at later tokens: {reason}"
        if decodes and layer.mixer is not None and layer.mixer.supports_self and not layer.mixer.causal:
            why = layer.mixer.leak()
            text = "a decoder must not attend to later tokens" + (f", but {why}" if why else "")
            yield (name, number, "mixer"), text if why and ";" in why else f"{text}; set a causal pattern"
    if not layers:
        yield (name,), "needs at least 1 layer"
    if (count := count_layers(layers)) > MAX_LAYERS:
        yield (name,), f"{count:,} layers; at most {MAX_LAYERS:,} are supported"


def outer_problems(
    embed: Embed, head: Head, common: Common, vocab: int | None, layers: Layers = (), copies: bool = False,
    writes: bool = False,
) -> Iterator[Problem]:  # fmt: skip
    """Invalid combinations of embedding and head. `layers`: the stack read by the head, if it may widen. `copies`: the
    head can copy from a source with the same vocabulary. `writes`: the model generates text."""
    yield from ((("embed", key), text) for key, text in embed.problems(common, vocab))
    if writes and not embed.is_text:
        yield ("embed", "kind"), "a generative model needs embed.kind: tokens"
    common = behind(layers, common) if layers else common
    yield from ((("head", key), text) for key, text in head.problems(common, vocab))
    if not isinstance(head, VocabularyHead):
        return
    if head.copy_ and not copies:
        yield ("head", "copy"), "needs an encoder-decoder that reads text with the vocabulary it writes"
    vector = embed.vector(common)
    if embed.ties and head.maxout is not None:
        if head.maxout != vector:
            yield ("head", "maxout"), f"must be {vector}, the width of the tied token vectors"
    elif embed.ties and vector != common.width and head.transform is None:
        text = f"the tied token vectors have width {vector}; set head.transform to project back to it"
        yield ("head", "transform"), text


def count_layers(layers: Sequence[Layer]) -> int:
    return sum(layer.repeat for layer in layers)


def request_weights(
    stack: Stack, part: str, layers: Sequence[int] | None, heads: Sequence[int] | None
) -> tuple[Any, WeightRecord]:
    """(layer -> module, recording requests) for the attention of some layers; layers without it are skipped."""
    found: list[Any] = [block.sublayers for block in stack.blocks]
    numbers = [n for n, parts in enumerate(found) if part in parts] if layers is None else layers
    modules = {number: found[number][part] for number in numbers}
    return modules, {module: WeightRequest(heads) for module in modules.values()}


def recorded_weights(stack: Stack, part: str, modules: dict[int, nn.Module], record: WeightRecord) -> dict[int, Tensor]:
    """Recorded weights by layer: a shared module was called once per layer, in order."""
    sublayers: list[Any] = [block.sublayers for block in stack.blocks]
    all_modules = [parts[part] if part in parts else None for parts in sublayers]  # noqa: SIM401  # ModuleDict has no get
    return {
        number: record[module].weights[sum(other is module for other in all_modules[:number])]
        for number, module in modules.items()
        if record[module].weights  # other mixers record nothing
    }


def advance(
    embed: Any,
    stack: Callable[..., Tensor],
    new: Rows,
    states: States,
    last: bool = False,
    losses: list[Tensor] | None = None,
    memory_builder: MemoryBuilder | None = None,
) -> Tensor:
    """Prefill or decode: run the next tokens of every row (one or many, padded on the right) over `states`. Hidden
    states of all of them, or of the `last` of each row (batch, 1, width)."""
    assert new.side == "right" and new.segments is None, "decoding needs one sentence per row, padded on the right"
    time = new.tokens.shape[1]
    layout = TokenLayout.following(states.lengths, new)
    end = max(states.lengths, default=0) + time
    states.append_marks(layout, end)
    x = embed(new, layout)
    context = Context(layout, states.slot_layout(end), states.memory, x, losses=losses, memory_builder=memory_builder)
    hidden = stack(x, context, states.layers)
    if last:
        hidden = hidden.take_along_dim(last_positions(layout)[..., None], 1)
    added = [time] * len(states.lengths) if new.lengths is None else new.lengths.tolist()
    states.lengths = [seen + count for seen, count in zip(states.lengths, added, strict=True)]
    return hidden


def last_positions(new: TokenLayout) -> Tensor:
    """(batch or 1, 1): index of each row's last new token, 0 for rows without one."""
    if new.segments is None:
        return torch.full((1, 1), new.time - 1, device=new.device)
    return (new.segments.sum(1, keepdim=True) - 1).clamp(min=0)


class ModelModule(nn.Module):
    """`model(source, target)` or `model(tokens)`, of tensors, gives the output of the head: logits of tokens or
    classes, or vectors. `model(batch)` gives hidden states, `logits(batch)` the output of the head."""

    steps_by_stack: ClassVar[bool]  # set by a class whose decode step is its embedding, decoder stack and head
    config: Model
    head: Any

    @abstractmethod
    def run(self, batch: Batch, losses: list[Tensor] | None) -> tuple[Tensor, TokenLayout]:
        """Hidden states (batch, time, width) and their layout."""

    def forward(
        self,
        source: Batch | Tensor,
        target: Tensor | list[Tensor] | None = None,
        *,
        lengths: Lengths = None,
        target_lengths: Lengths = None,
        types: Tensor | None = None,
        losses: list[Tensor] | None = None,
    ) -> Tensor:
        """Tensors (see `tensor_batch`): the output of the head. `lengths`: tokens of each row before right padding.
        `losses` collects auxiliary losses of parts (experts), to be added to the loss.

        A `Batch`: hidden states, with `losses` second; tasks use the head for losses or logits."""
        if isinstance(source, Batch):
            return self.run(source, target if isinstance(target, list) else losses)[0]
        assert not isinstance(target, list)
        return self.logits(tensor_batch(self.config, source, target, lengths, target_lengths, types), losses)

    def logits(self, batch: Batch, losses: list[Tensor] | None = None) -> Tensor:
        return observe(self.head, "", self.head(*self.run(batch, losses)))
