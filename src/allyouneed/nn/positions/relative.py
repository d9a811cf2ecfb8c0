"""Positions inside attention: what a score knows about how far apart query and key stand.

A part may turn queries, keys and values before they meet (rotary), add to their scores (ALiBi, T5's buckets, Shaw,
Transformer-XL), or add to what the values bring (Shaw). Each is a file of its own; this one holds the slot.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from typing import ClassVar, Literal

from torch import Tensor, nn

from allyouneed.config import Part
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost


class Heads:
    """The sizes of an attention that a part inside it has to know."""

    def __init__(self, heads: int, kv_heads: int, head_width: int, causal: bool) -> None:
        self.heads, self.kv_heads, self.head_width, self.causal = heads, kv_heads, head_width, causal

    @property
    def inner(self) -> int:
        return self.heads * self.head_width


class Relative(Part, slot="attention positions"):
    crosses: ClassVar[bool] = False  # does it make sense between two sentences?
    bilinear: ClassVar[bool] = False  # does it mean what it says only where a score is q·k?

    @property
    def features(self) -> int:
        """By how much `turn` widens every query and key."""
        return 0

    @abstractmethod
    def build(self, heads: Heads, common: Common) -> RelativeModule: ...

    def cost(self, heads: Heads, common: Common, keys: float) -> Cost:
        """Of each layer, where a query sees so many keys on average."""
        return Cost()

    def shared(self, heads: Heads, common: Common) -> dict[Hashable, Cost]:
        """Of the whole stack, by a key: layers that say the same share it."""
        return {}

    def problems(self, heads: Heads, common: Common) -> list[tuple[str, str]]:
        """(key, what is wrong with it in this attention)."""
        return []


class RelativeModule(nn.Module):
    """Tensors are (batch, heads, time, head_width); positions are whole numbers (batch or 1, time)."""

    one_per_stack: Hashable = None  # a key: all layers of a stack whose modules have the same one share the first
    sharpness: float = 1.0  # what the scale of the scores is multiplied by
    adds_bias: bool = False
    adds_values: bool = False

    @property
    def static(self) -> Hashable:
        """A key: the bias does not depend on q, and modules with the same key have the same bias."""
        return None

    def prepare(self, context: Context) -> None:
        """Make what `turn` would ask `context.plan` for."""

    def turn(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and new keys and values, which stand at the same places, before the latter are stored."""
        return q, k, v

    def bias(self, q: Tensor, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        """What to add to the scores, of any shape that broadcasts to (batch, heads, queries, keys); q as turned."""
        raise NotImplementedError

    def values(self, weights: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """What to add to weights @ v, given the weights (batch, heads, queries, keys)."""
        raise NotImplementedError


def distances(queries: Tensor, keys: Tensor) -> Tensor:
    """How far each key lies behind each query: (batch or 1, queries, keys)."""
    return queries[:, :, None] - keys[:, None, :]


class NoRelative(Relative):
    """Attention does not ask where tokens stand; the embeddings may say it."""

    crosses: ClassVar[bool] = True

    kind: Literal["none"] = "none"

    def build(self, heads: Heads, common: Common) -> RelativeModule:
        return RelativeModule()
