"""Decoder-decoder models with one shared KV cache: YOCO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.context import Context, Memory, TokenLayout, WeightRecord
from allyouneed.nn.cost import Cost
from allyouneed.nn.init.depth import Depth
from allyouneed.nn.mixers.attention.attention import Attention
from allyouneed.nn.mixers.attention.shared_kv import SharedAttention, SharedKeys
from allyouneed.nn.models.base import (
    GenerativeModel,
    Layers,
    ModelModule,
    Problem,
    advance,
    count_layers,
    last_positions,
    outer_problems,
    recorded_weights,
    request_weights,
    stack_problems,
)
from allyouneed.nn.models.stack import Stack, stack_cost
from allyouneed.nn.states.base import State, States
from allyouneed.nn.states.kv_cache import KVCache, KVState


class DecoderDecoder(GenerativeModel):
    """Sun et al. 2024, "You Only Cache Once", figure 2: the output of the `first` stack (window attention, gated
    retention, …) is projected to keys and values once, and every layer of the `second` stack cross-attends to them.

    One KV cache grows with the text, whatever the number of layers, and only the last token of a prompt runs through
    the second stack. The `cross` of the layers defines how keys are projected and must agree in all of them.
    """

    shares_keys: ClassVar[bool] = True
    stacks: ClassVar[tuple[str, ...]] = ("first", "second")

    kind: Literal["decoder-decoder"] = "decoder-decoder"
    first: Layers
    """The first stack's layers: a list of layers, or text over the names defined under `layers`."""
    second: Layers
    """The second stack's layers: a list of layers, or text over the names defined under `layers`."""

    @property
    def reader(self) -> Attention:
        """The cross-attention that defines the shared keys."""
        return next(layer.cross for layer in self.second if isinstance(layer.cross, Attention))

    def build(self) -> DecoderDecoderModel:
        return DecoderDecoderModel(self)

    def cost(self, length: int = 1024) -> Cost:
        total = self.embed.cost(self, self.vocab) + SharedKeys.cost(self.reader, self)
        total += stack_cost(self.first, self, length) + stack_cost(self.second, self, length)
        return total + self.head.cost(self, self.vocab, self.embed.vector(self), self.embed.ties)

    def problems(self) -> Iterator[Problem]:
        yield from stack_problems("first", self.first, self, has_source=False, decodes=True)
        yield from stack_problems("second", self.second, self, has_source=True, decodes=True)
        readers = [(n, layer.cross) for n, layer in enumerate(self.second) if isinstance(layer.cross, Attention)]
        for number, layer in enumerate(self.second):
            if layer.mixer is not None:
                text = "not supported: only the last prompt token reaches the second stack; use it in the first stack"
                yield ("second", number, "mixer"), text
            if layer.cross is not None and layer.cross.supports_cross and not isinstance(layer.cross, Attention):
                yield ("second", number, "cross", "kind"), "must be attention, which can share keys"
        for number, cross in readers:
            if not cross.causal:
                text = "must not attend to later tokens; set a causal pattern"
                yield ("second", number, "cross", "pattern"), text
            if key_settings(cross, self) != key_settings(readers[0][1], self):
                text = "all layers share the keys, so kv_heads, head_width, positions, qk_norm and bias must agree"
                yield ("second", number, "cross"), text
        if self.second and not readers:
            yield ("second",), "no layer has a cross, so the output of the first stack would be unused; add one"
        yield from outer_problems(self.embed, self.head, self, self.vocab, writes=True)


def key_settings(cross: Attention, config: DecoderDecoder) -> tuple[object, ...]:
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
        config.init.start(self, config.width)

    def run_stacks(
        self, x: Tensor, context: Context, states: list[dict[str, State]] | None = None, last: bool = False
    ) -> Tensor:
        """Both stacks; `last`: the second one for each row's last token only."""
        count = len(self.first.blocks)
        x = self.first(x, context, None if states is None else states[:count])
        reader = next(part for part in self.second.modules() if isinstance(part, SharedAttention))
        (k, v), layout = self.keys(x, context, reader), context.queries
        if states is not None:
            cache = states[count]["keys"]
            assert isinstance(cache, KVState)
            k, v, layout = cache.append(k, v, context)
        if last:
            positions = last_positions(context.queries)
            x = x.take_along_dim(positions[..., None], 1)
            context = replace(context, queries=context.queries.at(positions), memo={})
        context = replace(context, memory=Memory(x, layout, (k, v)))
        return self.second(x, context, None if states is None else states[count + 1 :])

    def decode(self, target: Rows, record: WeightRecord | None = None, losses: list[Tensor] | None = None) -> Tensor:
        layout: TokenLayout = self.embed.layout(target)
        return self.run_stacks(self.embed(target, layout), Context(layout, record=record, losses=losses))

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
        modules, record = request_weights(stack, part, layers, heads)
        self.decode(batch.rows, record)
        return recorded_weights(stack, part, modules, record)

    def start(self, rows: int, device: torch.device | str | None = None) -> States:
        """Empty states for `rows` texts."""
        where = next(self.parameters()).device if device is None else torch.device(device)
        shared: list[dict[str, State]] = [{"keys": KVCache()}]
        return States([*self.first.new_states(), *shared, *self.second.new_states()], rows, where, None)

    def advance(self, new: Rows, states: States, last: bool = False) -> Tensor:
        """Prefill or decode the next tokens of every row: see `base.advance`. With `last`, the others skip the second
        stack."""
        return advance(self.embed, partial(self.run_stacks, last=last), new, states)
