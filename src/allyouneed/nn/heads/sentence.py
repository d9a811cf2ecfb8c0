"""Heads for sentences and tokens: classification, tagging, one pooled vector, or none.

Their FLOPs are per sentence and are not counted per token.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.dropout import Dropout
from allyouneed.nn.heads.pooling import Pool, pool
from allyouneed.nn.heads.vocabulary import Head, HeadModule
from allyouneed.nn.linear.dense import Dense
from allyouneed.nn.ops.activations import ACTIVATIONS, Activation

Count = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


def _parameters(inputs: int, outputs: int, bias: bool) -> Cost:
    return Cost(parameters=Dense().cost(inputs, outputs, bias).parameters)


class ClassesHead(Head):
    """Class scores per sentence: softmax(W h + b), h a pooled vector.

    `hidden`: a dense layer with this activation first; with `tanh` it is BERT's pooler (Devlin et al. 2019, 4.1 and the
    authors' code). `dropout`: before the last map; default: the model's. `distilled`: a second map for the distillation
    token of an image; the scores of both are averaged (DeiT: Touvron et al. 2021, 4, "Classification with our
    approach").
    """

    kind: Literal["classes"] = "classes"
    labels: Count
    """Number of classes; training sets it from the data."""
    pool: Pool = "first"
    """Which token vectors make the sentence vector: the first, the last, or the mean of all."""
    hidden: Activation | None = None
    """Activation of a dense layer before the classes (`tanh`: BERT's pooler); default: no such layer."""
    dropout: Share | None = None
    """Dropout before the last map; default: the model's."""
    bias: bool = True
    """Whether the map to the classes has a bias."""
    distilled: bool = False
    """Add a second map for the distillation token and average both scores (DeiT)."""

    def build(self, common: Common, vocab: int | None, tied: Tensor | None) -> HeadModule:
        return ClassesHeadModule(self, common)

    def cost(self, common: Common, vocab: int | None, inner: int, tied: bool) -> Cost:
        total = _parameters(common.width, self.labels, self.bias)
        if self.distilled:
            total += _parameters(common.width, self.labels, self.bias)
        return total if self.hidden is None else total + _parameters(common.width, common.width, True)

    def problems(self, common: Common, vocab: int | None) -> list[tuple[str, str]]:
        if self.distilled and (vocab is not None or self.hidden is not None or self.pool != "first"):
            return [("distilled", "requires an image input, pool: first and no hidden")]
        return []


class ClassesHeadModule(HeadModule):
    def __init__(self, config: ClassesHead, common: Common) -> None:
        super().__init__()
        self.pool: Pool = config.pool
        self.hidden = None if config.hidden is None else nn.Linear(common.width, common.width)
        self.activation = ACTIVATIONS[config.hidden or "identity"]
        self.dropout = Dropout(common.dropout if config.dropout is None else config.dropout)
        self.classes = nn.Linear(common.width, config.labels, bias=config.bias)
        self.distilled = nn.Linear(common.width, config.labels, bias=config.bias) if config.distilled else None

    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """(sentences, labels)"""
        assert layout is not None, "pooling needs the token layout"
        vectors = pool(x, layout, self.pool)
        vectors = vectors if self.hidden is None else self.activation(self.hidden(vectors))
        scores: Tensor = self.classes(self.dropout(vectors))
        return scores if self.distilled is None else (scores + self.distilled(self.dropout(x[:, 1]))) / 2


class TagsHead(Head):
    """Tag scores per token (Devlin et al. 2019, 5.3).

    `hidden`: a dense layer with this activation first (ELECTRA's discriminator: Clark et al. 2020, the authors' code).
    """

    kind: Literal["tags"] = "tags"
    labels: Count
    """Number of tags; training sets it from the data."""
    hidden: Activation | None = None
    """Activation of a dense layer before the tags (ELECTRA); default: no such layer."""
    dropout: Share | None = None
    """Dropout before the last map; default: the model's."""

    def build(self, common: Common, vocab: int | None, tied: Tensor | None) -> HeadModule:
        return TagsHeadModule(self, common)

    def cost(self, common: Common, vocab: int | None, inner: int, tied: bool) -> Cost:
        total = Dense().cost(common.width, self.labels, True)
        return total if self.hidden is None else total + Dense().cost(common.width, common.width, True)


class TagsHeadModule(HeadModule):
    def __init__(self, config: TagsHead, common: Common) -> None:
        super().__init__()
        self.hidden = None if config.hidden is None else nn.Linear(common.width, common.width)
        self.activation = ACTIVATIONS[config.hidden or "identity"]
        self.dropout = Dropout(common.dropout if config.dropout is None else config.dropout)
        self.tags = nn.Linear(common.width, config.labels)

    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """(…, labels)"""
        x = x if self.hidden is None else self.activation(self.hidden(x))
        return self.tags(self.dropout(x))


class SpanHead(Head):
    """For each token, the scores that an answer begins and that it ends there (Devlin et al. 2019, 4.2)."""

    kind: Literal["span"] = "span"
    dropout: Share = 0.0
    """Dropout before the map."""

    def build(self, common: Common, vocab: int | None, tied: Tensor | None) -> HeadModule:
        return SpanHeadModule(self, common)

    def cost(self, common: Common, vocab: int | None, inner: int, tied: bool) -> Cost:
        return Dense().cost(common.width, 2, True)


class SpanHeadModule(HeadModule):
    def __init__(self, config: SpanHead, common: Common) -> None:
        super().__init__()
        self.dropout = Dropout(config.dropout)
        self.ends = nn.Linear(common.width, 2)

    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """(…, 2)"""
        scores: Tensor = self.ends(self.dropout(x))
        return scores


class PooledHead(Head):
    """One vector per sentence: the mean (Reimers, Gurevych 2019, 3), first or last of its tokens; projected to `width`
    if given (CLIP) and scaled to length 1 if `normalise`."""

    kind: Literal["pooled"] = "pooled"
    pool: Pool = "mean"
    """Which token vectors make the sentence vector: the first, the last, or the mean of all."""
    width: Count | None = None
    """Project the vector to this width (CLIP); default: no projection."""
    bias: bool = False
    """Whether that projection has a bias."""
    normalise: bool = False
    """Scale the vector to length 1."""

    def build(self, common: Common, vocab: int | None, tied: Tensor | None) -> HeadModule:
        return PooledHeadModule(self, common)

    def cost(self, common: Common, vocab: int | None, inner: int, tied: bool) -> Cost:
        return Cost() if self.width is None else _parameters(common.width, self.width, self.bias)

    def problems(self, common: Common, vocab: int | None) -> list[tuple[str, str]]:
        return [("bias", "needs a projection; set width")] if self.bias and self.width is None else []


class PooledHeadModule(HeadModule):
    def __init__(self, config: PooledHead, common: Common) -> None:
        super().__init__()
        self.pool: Pool = config.pool
        self.normalise = config.normalise
        width = config.width
        self.project = None if width is None else nn.Linear(common.width, width, bias=config.bias)

    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """(sentences, width)"""
        vectors = self.pooled(x, layout)
        return nn.functional.normalize(vectors, dim=-1) if self.normalise else vectors

    def pooled(self, x: Tensor, layout: TokenLayout | None) -> Tensor:
        """(sentences, width), of any length"""
        assert layout is not None, "pooling needs the token layout"
        vectors = pool(x, layout, self.pool)
        return vectors if self.project is None else self.project(vectors)


class NoHead(Head):
    """No head: the hidden states of the stack."""

    kind: Literal["none"] = "none"

    def build(self, common: Common, vocab: int | None, tied: Tensor | None) -> HeadModule:
        return NoHeadModule()

    def cost(self, common: Common, vocab: int | None, inner: int, tied: bool) -> Cost:
        return Cost()


class NoHeadModule(HeadModule):
    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        return x
