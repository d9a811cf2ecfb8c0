"""Head slot, and logits over the vocabulary. Heads for sentences and tokens are in sentence.py."""

from __future__ import annotations

from abc import abstractmethod
from copy import copy
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.config import Config, Part
from allyouneed.nn.batch import IGNORE
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.norms import LayerNorm, Norm
from allyouneed.nn.ops.activations import ACTIVATIONS, Activation
from allyouneed.nn.ops.cross_entropy import linear_cross_entropy


class Head(Part, slot="head", default="vocabulary"):
    # it predicts the next token, so that no token of a decoder may attend to a later one
    causal: ClassVar[bool] = True

    @abstractmethod
    def build(self, common: Common, vocab: int | None, tied: Tensor | None) -> HeadModule:
        """`tied`: the embedding matrix to share."""

    @abstractmethod
    def cost(self, common: Common, vocab: int | None, inner: int, tied: bool) -> Cost:
        """`inner`: width of the token vectors, which a tied head projects back to."""

    def problems(self, common: Common, vocab: int | None) -> list[tuple[str, str]]:
        return []


class HeadModule(nn.Module):
    reads_source = False  # `read_source` adds to the hidden states

    def read_source(self, x: Tensor, context: Context) -> Tensor:
        """Hidden states of a decoder (batch, time, width), with what the head needs of the encoder's output."""
        return x

    @abstractmethod
    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """`layout`: token layout, for heads that pool."""


class Transform(Config):
    """BERT's layer before the output projection: Norm(activation(x W + b)) (Devlin et al. 2019, the authors' code)."""

    activation: Activation = "gelu"
    """Activation of the dense layer."""
    norm: Norm = LayerNorm()
    """Norm after the activation."""


class VocabularyHead(Head):
    """A linear map to the vocabulary, sharing the embedding matrix when tied (the paper, 3.4).

    `scale: inverse-sqrt-width` multiplies the input by width^-1/2 (T5 with tied embeddings). `maxout` l: a linear map
    to 2 l features and the maximum of each pair (Goodfellow et al. 2013; Bahdanau et al. 2015, A.2.2).
    """

    kind: Literal["vocabulary"] = "vocabulary"
    bias: bool = False
    """Add a learned bias to the logits."""
    scale: Literal["none", "inverse-sqrt-width"] = "none"
    """Multiply the input by width^-1/2 (T5 with tied embeddings), or not."""
    transform: Transform | None = None
    """A dense layer with activation and norm before the logits (BERT); default: none."""
    maxout: Annotated[int, Field(gt=0)] | None = None
    """Features after a maxout layer before the logits (RNNsearch); default: no such layer."""
    soft_cap: Annotated[float, Field(gt=0)] | None = None
    """Map a logit x to c·tanh(x / c) (Gemma 2, 2); default: no cap."""
    pair: Annotated[int, Field(ge=2)] | None = None
    """Add a tanh layer and this many classes of a pair of texts, read from the first token (BERT's pooler and next
    sentences, Devlin et al. 2019, 3.1; ALBERT's sentence order); default: none."""
    copy_: Annotated[bool, Field(alias="copy")] = False
    """Generate a token or copy one of the source (See et al. 2017); in an encoder-decoder with one vocabulary."""

    def build(self, common: Common, vocab: int | None, tied: Tensor | None) -> HeadModule:
        assert vocab is not None
        if not self.copy_:
            return VocabularyHeadModule(self, common, vocab, tied)
        from allyouneed.nn.heads.copying import CopyHeadModule

        return CopyHeadModule(self, common, vocab, tied)

    def cost(self, common: Common, vocab: int | None, inner: int, tied: bool) -> Cost:
        assert vocab is not None
        width = inner if tied else self.maxout or common.width
        total = Cost(parameters=(0 if tied else vocab * width) + self.bias * vocab, flops=2 * vocab * width)
        if self.copy_:
            total += common.linear.cost(common.width, common.width, False)
            total += Cost(parameters=3 * common.width + 1, flops=6 * common.width)  # the gate
        if self.pair is not None:
            total += Cost(parameters=(common.width + 1) * (common.width + self.pair))
        if self.transform is not None:
            total += common.linear.cost(common.width, width, True) + self.transform.norm.cost(width)
        return total if self.maxout is None else total + common.linear.cost(common.width, 2 * self.maxout, True)

    def problems(self, common: Common, vocab: int | None) -> list[tuple[str, str]]:
        found = [] if vocab is not None else [("kind", "the vocabulary head requires vocab")]
        if self.maxout is not None and self.transform is not None:
            found.append(("maxout", "maxout and transform are exclusive; set one"))
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
        self.product: nn.Module | None = None  # quantized replacement of `weight` (linear/int8.py)
        self.pooler = None if config.pair is None else nn.Linear(common.width, common.width)
        self.pair = None if config.pair is None else nn.Linear(common.width, config.pair)
        maxout = config.maxout
        self.maxout = None if maxout is None else common.linear.build(common.width, 2 * maxout, True)

    def project_input(self, x: Tensor) -> Tensor:
        x = x if self.transform is None else self.transform(x)
        if self.maxout is not None:
            x = self.maxout(x).unflatten(-1, (-1, 2)).amax(-1)  # (…, maxout)
        return x if self.scale == 1.0 else x * self.scale

    def pair_scores(self, x: Tensor) -> Tensor:
        """(…, pair): of hidden states of first tokens, the scores of the classes of a pair."""
        assert self.pooler is not None and self.pair is not None, "the head has no classes of pairs; set pair: 2"
        scores: Tensor = self.pair(torch.tanh(self.pooler(x)))
        return scores

    @property
    def narrows(self) -> bool:
        """Whether it has parts (`narrowed`)."""
        return not self.reads_source and (self.product is None or hasattr(self.product, "narrowed"))

    @property
    def vocab_size(self) -> int:
        return len(self.weight) if self.product is None else int(self.product.out_features)  # type: ignore[arg-type]

    def narrowed(self, tokens: Tensor) -> VocabularyHeadModule:
        """The part that computes the logits of these tokens (n,) alone, for inference."""
        found = copy(self)
        found._parameters, found._modules = dict(self._parameters), dict(self._modules)
        if self.product is not None:
            found.product = self.product.narrowed(tokens)  # type: ignore[operator]
            return found
        found.weight = nn.Parameter(self.weight.detach().index_select(0, tokens), requires_grad=False)
        found.bias = None if self.bias is None else nn.Parameter(self.bias.detach()[tokens], requires_grad=False)
        return found

    def set_product(self, product: nn.Module) -> None:
        """Replace weight and bias by this module."""
        del self.weight
        self.bias, self.product = None, product

    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        if self.product is not None:
            scores: Tensor = self.product(self.project_input(x))
        else:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            scores = nn.functional.linear(self.project_input(x), self.weight.to(x.dtype), bias)
        return scores if self.soft_cap is None else self.soft_cap * torch.tanh(scores / self.soft_cap)

    def loss(self, x: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        """Sums over labelled tokens: the (smoothed) training loss and the negative log-likelihood."""
        if self.product is not None:
            return _cross_entropy(self(x.flatten(0, -2)), labels.flatten(), smoothing)
        flat = self.project_input(x.flatten(0, -2))
        return linear_cross_entropy(flat, self.weight, labels.flatten(), smoothing, self.bias, self.soft_cap)


def _cross_entropy(scores: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy` for given logits."""
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
        positions = torch.zeros(1, x.shape[-2] if x.dim() > 2 else 1, dtype=torch.long, device=x.device)
        return self.norm(self.activation(self.linear(x)), Context(TokenLayout(positions)))
