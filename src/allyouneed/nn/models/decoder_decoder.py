"""Two stacks that write, one after the other: the first remembers little, the second looks at one cache (YOCO)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.context import Context, Memory, Record, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import Attention
from allyouneed.nn.mixers.attention.shared_kv import SharedAttention, SharedKeys
from allyouneed.nn.models.base import (
    Layers,
    ModelModule,
    Problem,
    Writer,
    advance,
    count_layers,
    last_places,
    outer_problems,
    stack_problems,
    watched,
    weights_of,
)
from allyouneed.nn.models.stack import Stack, stack_cost
from allyouneed.nn.states.base import State, States
from allyouneed.nn.states.kv_cache import KVCache, KVState
from allyouneed.nn.wiring.residual import Depth


class DecoderDecoder(Writer):
    """Sun et al. 2024, "You Only Cache Once", figure 2: the output of the `first` stack (window attention, gated
    retention, …) makes keys and values once, and every layer of the `second` crosses over to them.

    So one cache grows with the text, whatever the number of layers. And of a prompt only the last token has to go
    through the second stack. The layers' `cross` says how the keys are made, in the same way in all of them.
    """

    shares_keys: ClassVar[bool] = True
    stacks: ClassVar[tuple[str, ...]] = ("first", "second")

    kind: Literal["decoder-decoder"] = "decoder-decoder"
    first: Layers
    second: Layers

    @property
    def reader(self) -> Attention:
        """One of those who look at the shared keys; the others want the same ones."""
        return next(layer.cross for layer in self.second if isinstance(layer.cross, Attention))

    def build(self) -> DecoderDecoderModel:
        return DecoderDecoderModel(self)

    def cost(self, length: int = 1024) -> Cost:
        total = self.embed.cost(self, self.vocab) + SharedKeys.cost(self.reader, self)
        total += stack_cost(self.first, self, length) + stack_cost(self.second, self, length)
        return total + self.head.cost(self, self.vocab, self.embed.vector(self), self.embed.ties)

    def problems(self) -> Iterator[Problem]:
        yield from stack_problems("first", self.first, self, crosses=False, decodes=True)
        yield from stack_problems("second", self.second, self, crosses=True, decodes=True)
        readers = [(n, layer.cross) for n, layer in enumerate(self.second) if isinstance(layer.cross, Attention)]
        for number, layer in enumerate(self.second):
            if layer.mixer is not None:
                text = "remembers tokens, and of a prompt only the last one comes here; say it in the first stack"
                yield ("second", number, "mixer"), text
            if layer.cross is not None and layer.cross.crosses and not isinstance(layer.cross, Attention):
                yield ("second", number, "cross", "kind"), "only attention looks at keys made for all layers"
        for number, cross in readers:
            if not cross.causal:
                text = "it looks at the text it is part of, and must not see later tokens; give it a causal pattern"
                yield ("second", number, "cross", "pattern"), text
            if keys_wanted(cross, self) != keys_wanted(readers[0][1], self):
                text = "all layers look at the same keys; kv_heads, head_width, positions, qk_norm and bias must agree"
                yield ("second", number, "cross"), text
        if self.second and not readers:
            yield ("second",), "no layer has a cross: nobody would look at what the first stack has made"
        yield from outer_problems(self.embed, self.head, self, self.vocab)
        if self.embed.reads is not Rows:
            yield ("embed", "kind"), "what is written is text; its embedding must be 'tokens'"


def keys_wanted(cross: Attention, config: DecoderDecoder) -> tuple[object, ...]:
    sizes, biases = cross.sizes(config), cross.biases
    return sizes.kv_heads, sizes.head_width, cross.positions, cross.qk_norm, biases.k, biases.v


class DecoderDecoderModel(ModelModule):
    def __init__(self, config: DecoderDecoder) -> None:
        super().__init__()
        self.config = config
        self.embed = config.embed.build(config, config.vocab)
        depth = Depth(0, count_layers(config.first) + count_layers(config.second), "decoder")
        self.first = Stack(config.first, config, depth)
        self.keys = SharedKeys(config.reader, config)
        self.second = Stack(config.second, config, depth)
        tied = self.embed.tokens.weight if config.embed.ties else None
        self.head = config.head.build(config, config.vocab, tied)
        config.init.apply(self, config.width)

    def through(
        self, x: Tensor, context: Context, states: list[dict[str, State]] | None = None, last: bool = False
    ) -> Tensor:
        """Both stacks; `last`: the second one only with each row's last token."""
        count = len(self.first.blocks)
        x = self.first(x, context, None if states is None else states[:count])
        reader = next(part for part in self.second.modules() if isinstance(part, SharedAttention))
        (k, v), layout = self.keys(x, context, reader), context.queries
        if states is not None:
            cache = states[count]["keys"]
            assert isinstance(cache, KVState)
            k, v, layout = cache.append(k, v, context)
        if last:
            places = last_places(context.queries)
            x = x.take_along_dim(places[..., None], 1)
            context = replace(context, queries=context.queries.at(places), plans={})
        context = replace(context, memory=Memory(x, layout, (k, v)))
        hidden: Tensor = self.second(x, context, None if states is None else states[count + 1 :])
        return hidden

    def decode(self, target: Rows, record: Record | None = None, losses: list[Tensor] | None = None) -> Tensor:
        layout: TokenLayout = self.embed.layout(target)
        return self.through(self.embed(target, layout), Context(layout, record=record, losses=losses))

    def run(self, batch: Batch, losses: list[Tensor] | None) -> tuple[Tensor, TokenLayout]:
        return self.decode(batch.rows, losses=losses), self.embed.layout(batch.rows)

    def attention(
        self,
        batch: Batch,
        where: Literal["first", "second"] = "second",
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
    ) -> dict[int, Tensor]:
        """Attention weights by layer: (batch, heads, queries, keys)."""
        stack, part = (self.first, "mixer") if where == "first" else (self.second, "cross")
        modules, record = watched(stack, part, layers, heads)
        self.decode(batch.rows, record)
        return weights_of(stack, part, modules, record)

    def start(self, rows: int, device: torch.device | str | None = None) -> States:
        """Ready to write so many texts: nothing seen yet."""
        where = next(self.parameters()).device if device is None else torch.device(device)
        shared: list[dict[str, State]] = [{"keys": KVCache()}]
        return States([*self.first.new_states(), *shared, *self.second.new_states()], rows, where, None)

    def advance(self, new: Rows, states: States, last: bool = False) -> Tensor:
        """Take in the next tokens of every row (one or many, unequal lengths padded right); hidden states of them, or
        of each row's `last` one only (batch, 1, width), which spares the others the second stack."""
        return advance(self.embed, partial(self.through, last=last), new, states)
