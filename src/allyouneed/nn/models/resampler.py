"""Resamplers: the many vectors of an encoder become a few of the model's width, which take the slots of an image or a
sound in a text (models/interleaved.py)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.config import Part
from allyouneed.nn.channels.feedforward import FFN
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, Memory, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import Attention, CrossAttention

Size = Annotated[int, Field(gt=0)]


class Resampler(Part, slot="resampler"):
    """Builds a module (batch, time, inputs) -> (batch, slots, width)."""

    slots: Size
    """Vectors of an image or a sound in the text."""
    heads: Size
    """Number of attention heads."""

    @abstractmethod
    def build(self, common: Common, inputs: int) -> nn.Module:
        """`inputs`: features of the encoder's vectors."""

    @abstractmethod
    def cost(self, common: Common, inputs: int) -> Cost:
        """Parameters."""

    def problems(self, common: Common) -> list[tuple[str, str]]:
        return Attention(heads=self.heads).problems(common)


class AttentivePooling(Resampler):
    """Huang et al. 2023, "Language Is Not All You Need", 2.2, as in the authors' code: one attention of learned latents
    q to the projected vectors and themselves,

        slots = MultiHead(q, [x W; q], [x W; q])
    """

    kind: Literal["attentive-pooling"] = "attentive-pooling"

    def build(self, common: Common, inputs: int) -> nn.Module:
        return AttentivePoolingModule(self, common, inputs)

    def cost(self, common: Common, inputs: int) -> Cost:
        attention = Attention(heads=self.heads).cost(common, 1, cross=True).parameters
        return Cost(attention + common.linear.cost(inputs, common.width, True).parameters + self.slots * common.width)


class AttentivePoolingModule(nn.Module):
    def __init__(self, config: AttentivePooling, common: Common, inputs: int) -> None:
        super().__init__()
        self.project = common.linear.build(inputs, common.width, True)
        self.latents = nn.Embedding(config.slots, common.width)
        self.attention = CrossAttention(Attention(heads=config.heads), common)

    def forward(self, x: Tensor) -> Tensor:
        return attend_with_latents(self.attention, expand(self.latents, x), self.project(x))


class Perceiver(Resampler):
    """Alayrac et al. 2022, "Flamingo: a Visual Language Model for Few-Shot Learning", figure 5: in each layer learned
    latents h attend to the projected vectors and themselves, then a feed-forward layer,

        h = h + MultiHead(LN(h), [LN(x W); LN(h)], [LN(x W); LN(h)])
        h = h + FFN(LN(h))

    and a last norm.
    """

    kind: Literal["perceiver"] = "perceiver"
    layers: Size = 6
    """Number of layers."""
    hidden: Size | None = None
    """Features of the feed-forward layers; default: 4 · width."""

    def ffn(self, common: Common) -> FFN:
        return FFN(hidden=self.hidden or 4 * common.width, activation="gelu", bias=False)

    def attention(self) -> Attention:
        return Attention(heads=self.heads, bias=False)

    def build(self, common: Common, inputs: int) -> nn.Module:
        return PerceiverModule(self, common, inputs)

    def cost(self, common: Common, inputs: int) -> Cost:
        layer = self.attention().cost(common, 1, cross=True) + self.ffn(common).cost(common)
        layer += common.norm.cost(common.width) * 3
        total = layer * self.layers + common.norm.cost(common.width)
        total += common.linear.cost(inputs, common.width, True)
        return Cost(total.parameters + self.slots * common.width)


class PerceiverModule(nn.Module):
    def __init__(self, config: Perceiver, common: Common, inputs: int) -> None:
        super().__init__()
        self.project = common.linear.build(inputs, common.width, True)
        self.latents = nn.Embedding(config.slots, common.width)
        self.layers = nn.ModuleList(PerceiverLayer(config, common) for _ in range(config.layers))
        self.norm = common.norm.build(common.width)

    def forward(self, x: Tensor) -> Tensor:
        x, h = self.project(x), expand(self.latents, x)
        for layer in self.layers:
            h = layer(h, x)
        return self.norm(h, Context(layout_of(h)))


class PerceiverLayer(nn.Module):
    def __init__(self, config: Perceiver, common: Common) -> None:
        super().__init__()
        self.norms = nn.ModuleList(common.norm.build(common.width) for _ in range(3))  # of x, h, h
        self.attention = CrossAttention(config.attention(), common)
        self.channel = config.ffn(common).build(common)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        of_x, of_h, before_ffn = self.norms
        context = Context(layout_of(h))
        h = h + attend_with_latents(self.attention, of_h(h, context), of_x(x, Context(layout_of(x))))
        added: Tensor = self.channel(before_ffn(h, context), context)
        return h + added


def attend_with_latents(attention: CrossAttention, latents: Tensor, x: Tensor) -> Tensor:
    """Latents (batch, slots, width) attend to x (batch, time, width) and to themselves."""
    both = torch.cat([x, latents], 1)
    return attention(latents, Context(layout_of(latents), memory=Memory(both, layout_of(both))))


def expand(latents: nn.Embedding, x: Tensor) -> Tensor:
    """(batch of x, slots, width)"""
    return latents.weight.to(x.dtype).expand(len(x), -1, -1)


def layout_of(x: Tensor) -> TokenLayout:
    return TokenLayout(torch.arange(x.shape[1], device=x.device)[None], start=0)
