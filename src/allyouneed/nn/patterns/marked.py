"""Patterns that ask the batch which tokens are special (`Rows.prompt`, `Rows.chosen`, `Rows.order`).

A prefix language model with a prefix of its own in each row (Raffel et al. 2020, 3.2.1) is `causal | prompt`; XLNet's
content and query streams (Yang et al. 2019, 2.3) are `permuted`, both of them: see models/two_stream.py.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from allyouneed.nn.patterns.core import Place, Stretch
from allyouneed.nn.patterns.sparse import Anywhere


def _said(mark: Tensor | None, place: Place) -> Tensor:
    """A mark of the batch as 0 or 1; a batch that says nothing marks nothing."""
    return torch.zeros_like(place.position) if mark is None else mark.long()


class Chosen(Anywhere):
    """Tokens the batch has chosen see all and are seen by all: Longformer's global attention (3.1), BigBird-ETC."""

    kind: Literal["chosen"] = "chosen"

    def allowed(self, query: Place, key: Place) -> Tensor:
        return (self.feature(query) > 0) | (self.feature(key) > 0)

    def feature(self, place: Place) -> Tensor:
        return _said(place.chosen, place)

    def some(self, query: Stretch, key: Stretch) -> Tensor:
        return (query.bounds(self)[1] > 0) | (key.bounds(self)[1] > 0)

    def every(self, query: Stretch, key: Stretch) -> Tensor:
        return (query.bounds(self)[0] > 0) | (key.bounds(self)[0] > 0)

    def marks(self, place: Place) -> list[Tensor]:
        return [] if place.chosen is None else [self.feature(place)]

    def leak(self) -> str:
        return "chosen lets tokens of the batch's choice see everything"


class Prompt(Anywhere):
    """Everyone sees the tokens that the batch marks as its prompt: `causal | prompt` is a prefix language model."""

    kind: Literal["prompt"] = "prompt"

    def allowed(self, query: Place, key: Place) -> Tensor:
        return (self.feature(key) > 0) & (query.position == query.position)

    def feature(self, place: Place) -> Tensor:
        return _said(place.prompt, place)

    def some(self, query: Stretch, key: Stretch) -> Tensor:
        return key.bounds(self)[1] > 0

    def every(self, query: Stretch, key: Stretch) -> Tensor:
        return key.bounds(self)[0] > 0

    @property
    def ahead(self) -> float:
        return -math.inf


class Permuted(Anywhere):
    """Nobody sees what is said later in the batch's own order (XLNet, 2.2); everyone sees all where it gives none.

    Tokens of one number see each other. A negative number n is that of a token which only asks for the one said as
    number −1 − n (XLNet's query stream, 2.3): it sees what is said before that, and nobody sees it.
    """

    kind: Literal["permuted"] = "permuted"

    def allowed(self, query: Place, key: Place) -> Tensor:
        now, said = self.feature(query), self.feature(key)
        return (said >= 0) & (said <= torch.where(now >= 0, now, -2 - now))

    def feature(self, place: Place) -> Tensor:
        return torch.zeros_like(place.position) if place.order is None else place.order

    def some(self, query: Stretch, key: Stretch) -> Tensor:
        (q_low, q_high), (k_low, k_high) = query.bounds(self), key.bounds(self)
        return (k_high >= 0) & (k_low.clamp(min=0) <= q_high.maximum(-2 - q_low))

    def every(self, query: Stretch, key: Stretch) -> Tensor:
        (q_low, _), (k_low, k_high) = query.bounds(self), key.bounds(self)
        return (q_low >= 0) & (k_low >= 0) & (k_high <= q_low)

    def leak(self) -> str:
        return "permuted lets tokens see those said before them, wherever they stand"
