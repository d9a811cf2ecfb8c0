"""Patterns over token marks of the batch (`Rows.prompt`, `Rows.chosen`, `Rows.order`).

A prefix language model with one prefix per row (Raffel et al. 2020, 3.2.1) is `causal | prompt`; both of XLNet's
streams, content and query (Yang et al. 2019, 2.3), are `permuted`: see models/two_stream.py.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from allyouneed.nn.patterns.core import BlockRange, Pattern, TokenFields


def _mark(mark: Tensor | None, token: TokenFields) -> Tensor:
    """A mark as 0 or 1; all 0 when the batch has none."""
    return torch.zeros_like(token.position) if mark is None else mark.long()


class Chosen(Pattern):
    """Global tokens marked by the batch attend to all and are attended to by all: Longformer's global attention (3.1),
    BigBird-ETC."""

    kind: Literal["chosen"] = "chosen"

    def inputs(self) -> dict[str, bool]:
        return {"global_positions": False}

    def allowed(self, query: TokenFields, key: TokenFields) -> Tensor:
        return (self.feature(query) > 0) | (self.feature(key) > 0)

    def feature(self, token: TokenFields) -> Tensor:
        return _mark(token.chosen, token)

    def some(self, query: BlockRange, key: BlockRange) -> Tensor:
        return (query.bounds(self)[1] > 0) | (key.bounds(self)[1] > 0)

    def every(self, query: BlockRange, key: BlockRange) -> Tensor:
        return (query.bounds(self)[0] > 0) | (key.bounds(self)[0] > 0)

    def marks(self, token: TokenFields) -> list[Tensor]:
        return [] if token.chosen is None else [self.feature(token)]

    def leak(self) -> str:
        return "chosen lets global tokens attend to everything"


class Prompt(Pattern):
    """The prompt tokens marked by the batch: `causal | prompt` is a prefix language model."""

    kind: Literal["prompt"] = "prompt"

    def allowed(self, query: TokenFields, key: TokenFields) -> Tensor:
        return (self.feature(key) > 0) & (query.position == query.position)

    def feature(self, token: TokenFields) -> Tensor:
        return _mark(token.prompt, token)

    def some(self, query: BlockRange, key: BlockRange) -> Tensor:
        return key.bounds(self)[1] > 0

    def every(self, query: BlockRange, key: BlockRange) -> Tensor:
        return key.bounds(self)[0] > 0

    @property
    def ahead(self) -> float:
        return -math.inf


class Permuted(Pattern):
    """Tokens up to the own one in the batch's factorisation order (XLNet, 2.2); all tokens when it has none.

    Tokens of equal order attend to each other. A negative order n marks a query-stream token that predicts token number
    −1 − n (XLNet, 2.3): it attends to earlier tokens and no token attends to it.
    """

    kind: Literal["permuted"] = "permuted"

    def inputs(self) -> dict[str, bool]:
        return {"order": False, "targets": False}

    def allowed(self, query: TokenFields, key: TokenFields) -> Tensor:
        query_order, key_order = self.feature(query), self.feature(key)
        return (key_order >= 0) & (key_order <= torch.where(query_order >= 0, query_order, -2 - query_order))

    def feature(self, token: TokenFields) -> Tensor:
        return torch.zeros_like(token.position) if token.order is None else token.order

    def some(self, query: BlockRange, key: BlockRange) -> Tensor:
        (q_low, q_high), (k_low, k_high) = query.bounds(self), key.bounds(self)
        return (k_high >= 0) & (k_low.clamp(min=0) <= q_high.maximum(-2 - q_low))

    def every(self, query: BlockRange, key: BlockRange) -> Tensor:
        (q_low, _), (k_low, k_high) = query.bounds(self), key.bounds(self)
        return (q_low >= 0) & (k_low >= 0) & (k_high <= q_low)

    def leak(self) -> str:
        return "permuted attends to tokens at any position that come earlier in the order"
