"""From vectors to what a task asks for: scores over the vocabulary here, of texts and words in sentence.py."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.config import Config, Part
from allyouneed.nn.batch import IGNORE
from allyouneed.nn.channels.feedforward import ACTIVATIONS, Activation
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.norms import LayerNorm, Norm
from allyouneed.nn.ops.cross_entropy import linear_cross_entropy


class Head(Part, slot="head", default="vocabulary"):
    @abstractmethod
    def build(self, common: Common, vocab: int | None, tied: Tensor | None) -> HeadModule:
        """`tied`: the embedding's matrix, if it is to be shared."""

    @abstractmethod
    def cost(self, common: Common, vocab: int | None, inner: int, tied: bool) -> Cost:
        """`inner`: the width of a token's vector in the embedding, which a tied head has to come back to."""

    def problems(self, common: Common, vocab: int | None) -> list[tuple[str, str]]:
        return []


class HeadModule(nn.Module):
    @abstractmethod
    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """`layout` say where the vectors stand, for heads that gather a sentence."""


class Transform(Config):
    """What BERT does before its output projection: Norm(activation(x W + b)) (Devlin et al. 2019, their own code)."""

    activation: Activation = "gelu"
    norm: Norm = LayerNorm()


class VocabularyHead(Head):
    """A linear map to the vocabulary, sharing the embedding's matrix when tied (the paper, 3.4).

    `scale: inverse-sqrt-width` multiplies the vectors by width^-1/2 first (T5, where the embedding is tied).
    `maxout` l: a linear map to 2 l features, and of each pair the larger one (Goodfellow et al. 2013; Bahdanau et al.
    2015, A.2.2).
    """

    kind: Literal["vocabulary"] = "vocabulary"
    bias: bool = False
    scale: Literal["none", "inverse-sqrt-width"] = "none"
    transform: Transform | None = None
    maxout: Annotated[int, Field(gt=0)] | None = None
    soft_cap: Annotated[float, Field(gt=0)] | None = None  # c·tanh(logit / c) (Gemma 2, 2)

    def build(self, common: Common, vocab: int | None, tied: Tensor | None) -> HeadModule:
        assert vocab is not None
        return VocabularyHeadModule(self, common, vocab, tied)

    def cost(self, common: Common, vocab: int | None, inner: int, tied: bool) -> Cost:
        assert vocab is not None
        width = inner if tied else self.maxout or common.width
        total = Cost(parameters=(0 if tied else vocab * width) + self.bias * vocab, flops=2 * vocab * width)
        if self.transform is not None:
            total += common.linear.cost(common.width, width, True) + self.transform.norm.cost(width)
        return total if self.maxout is None else total + common.linear.cost(common.width, 2 * self.maxout, True)

    def problems(self, common: Common, vocab: int | None) -> list[tuple[str, str]]:
        found = [] if vocab is not None else [("kind", "scores over a vocabulary need 'vocab', its size")]
        if self.maxout is not None and self.transform is not None:
            found.append(("maxout", "there is a transform already; say one of them"))
        return found


class VocabularyHeadModule(HeadModule):
    def __init__(self, config: VocabularyHead, common: Common, vocab: int, tied: Tensor | None) -> None:
        super().__init__()
        width = (config.maxout or common.width) if tied is None else tied.shape[1]
        self.weight = nn.Parameter(torch.empty(vocab, width).normal_(std=width**-0.5)) if tied is None else tied
        self.bias = nn.Parameter(torch.zeros(vocab)) if config.bias else None
        self.scale = common.width**-0.5 if config.scale == "inverse-sqrt-width" else 1.0
        self.soft_cap = config.soft_cap
        transform = config.transform
        self.transform = None if transform is None else TransformModule(transform, common, width)
        self.product: nn.Module | None = None  # what multiplies, where it is not `weight` (linear/int8.py)
        maxout = config.maxout
        self.maxout = None if maxout is None else common.linear.build(common.width, 2 * maxout, True)

    def prepared(self, x: Tensor) -> Tensor:
        x = x if self.transform is None else self.transform(x)
        if self.maxout is not None:
            x = self.maxout(x).unflatten(-1, (-1, 2)).amax(-1)  # (…, maxout)
        return x if self.scale == 1.0 else x * self.scale

    def put(self, product: nn.Module) -> None:
        """From here on this multiplies, bias included."""
        del self.weight
        self.bias, self.product = None, product

    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        if self.product is not None:
            scores: Tensor = self.product(self.prepared(x))
        else:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            scores = nn.functional.linear(self.prepared(x), self.weight.to(x.dtype), bias)
        return scores if self.soft_cap is None else self.soft_cap * torch.tanh(scores / self.soft_cap)

    def loss(self, x: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        """Sums over all labelled tokens: the (smoothed) loss to train on, and the plain negative log-likelihood."""
        if self.product is not None:
            return _cross_entropy(self(x.flatten(0, -2)), labels.flatten(), smoothing)
        flat = self.prepared(x.flatten(0, -2))
        return linear_cross_entropy(flat, self.weight, labels.flatten(), smoothing, self.bias, self.soft_cap)


def _cross_entropy(scores: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """As `linear_cross_entropy`, of scores that are there."""
    plain = nn.functional.cross_entropy(scores.float(), labels, ignore_index=IGNORE, reduction="sum")
    if not smoothing:
        return plain, plain
    total = nn.functional.cross_entropy(
        scores.float(), labels, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing
    )
    return total, plain


class TransformModule(nn.Module):
    def __init__(self, config: Transform, common: Common, width: int) -> None:
        super().__init__()
        self.linear = common.linear.build(common.width, width, True)
        self.activation = ACTIVATIONS[config.activation]
        self.norm = config.norm.build(width)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.zeros(1, x.shape[-2] if x.dim() > 2 else 1, dtype=torch.long, device=x.device)
        found: Tensor = self.norm(self.activation(self.linear(x)), Context(TokenLayout(places)))
        return found
