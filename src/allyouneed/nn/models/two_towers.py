"""Two-tower models: CLIP."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.batch import Batch, Input, Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.heads.sentence import PooledHead
from allyouneed.nn.models.base import Model, ModelModule, Problem, Vocab
from allyouneed.nn.models.encoder import Encoder
from allyouneed.nn.observe import observe

Positive = Annotated[float, Field(gt=0)]


class TwoTowers(Model):
    """Radford et al. 2021, "Learning Transferable Visual Models From Natural Language Supervision", figure 3.

    Each tower is an encoder with its own width, norm, … and a `pooled` head that gives one vector of `width`, the joint
    embedding space. `temperature` divides the cosines; it is learned, from this initial value, and the scale is capped
    at `max_scale` (2.5).
    """

    TOWERS: ClassVar[tuple[str, str]] = ("image", "text")

    kind: Literal["two-towers"] = "two-towers"
    image: Encoder
    """The encoder of images, with its own width."""
    text: Encoder
    """The encoder of texts, with its own width."""
    temperature: Positive = 0.07
    """Initial value of the learned divisor of the cosines."""
    max_scale: Positive = 100.0
    """Upper bound of 1 / temperature."""
    bias: float | None = None
    """Initial value of a learned bias of the scores (SigLIP: Zhai et al. 2023, eq. 1); default: none."""
    end: Annotated[int, Field(ge=0)] | Literal["largest"] | None = None
    """Where a text ends if the batch gives no lengths: at the first token with this id, or at the largest id; default:
    at the end of its row."""

    @property
    def vocabs(self) -> Vocab | None:
        return self.text.vocabs

    @property
    def limit(self) -> int | None:
        return self.text.limit

    def build(self) -> TwoTowersModel:
        return TwoTowersModel(self)

    def cost(self, length: int = 1024) -> Cost:
        """FLOPs of one image token and one text token together."""
        own = 1 if self.bias is None else 2
        total = self.image.cost(length) + self.text.cost(length) + Cost(parameters=own)
        return replace(total, flops=total.flops + 2 * self.width)

    def problems(self) -> Iterator[Problem]:
        for name in self.TOWERS:
            head = getattr(self, name).head
            if not isinstance(head, PooledHead):
                yield (name, "head", "kind"), "a tower needs head.kind: pooled"
            elif (head.width or getattr(self, name).width) != self.width:
                yield (name, "head", "width"), f"must be {self.width}, the width of the joint space"
        if not self.text.embed.is_text:
            yield ("text", "embed", "kind"), "the text tower needs embed.kind: tokens"
        for name, field in Common.model_fields.items():
            if name != "width" and getattr(self, name) != field.get_default():
                yield (name,), "set it under `image` or `text`: each tower has its own"


class TwoTowersModel(ModelModule):
    """The target of a batch is the texts, the source the matching images, in the same order."""

    def __init__(self, config: TwoTowers) -> None:
        super().__init__()
        self.config = config
        self.image = config.image.build()
        self.text = config.text.build()
        self.log_scale = nn.Parameter(torch.tensor(-math.log(config.temperature)))
        self.bias = None if config.bias is None else nn.Parameter(torch.tensor(float(config.bias)))
        self.most, self.end = math.log(config.max_scale), config.end

    @property
    def scale(self) -> Tensor:
        """1 / temperature, capped; the gradient passes through the cap."""
        return (self.log_scale - (self.log_scale - self.most).clamp(min=0).detach()).exp()

    def vectors(self, tower: Literal["image", "text"], given: Input) -> Tensor:
        """(batch, width), normalised."""
        if tower == "text" and isinstance(given, Rows):
            given = self.find_ends(given)
        made: Tensor = (self.image if tower == "image" else self.text).logits(Batch(target=given))
        return observe(self, f"{tower}.vector", nn.functional.normalize(made, dim=-1))

    def find_ends(self, rows: Rows) -> Rows:
        """Texts without `lengths` end at their end token, by the rule `end`."""
        if self.end is None or rows.lengths is not None or rows.segments is not None:
            return rows
        tokens = rows.tokens
        last = (tokens if self.end == "largest" else (tokens == self.end).int()).argmax(1)  # the first of equal ones
        return replace(rows, lengths=last + 1)

    def logits(self, batch: Batch, losses: list[Tensor] | None = None) -> Tensor:
        """Scores: (images, texts); matching pairs are on the diagonal."""
        assert batch.source is not None, "two towers need images as the source and texts as the target"
        scores = self.scores(self.vectors("image", batch.source), self.vectors("text", batch.target))
        return observe(self, "logits", scores)

    def scores(self, images: Tensor, texts: Tensor) -> Tensor:
        """Scaled cosines of the vectors, plus the bias if there is one."""
        scaled = self.scale * images @ texts.T
        return scaled if self.bias is None else scaled + self.bias

    def forward(self, source: Batch | Tensor, *rest: Any, **more: Any) -> Tensor:
        return self.logits(source) if isinstance(source, Batch) else super().forward(source, *rest, **more)

    def run(self, batch: Batch, losses: list[Tensor] | None) -> tuple[Tensor, TokenLayout]:
        raise NotImplementedError("two-tower models have no joint hidden states; use logits() or vectors()")
