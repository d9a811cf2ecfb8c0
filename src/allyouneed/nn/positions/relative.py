"""Relative positions inside attention.

A part may transform queries, keys and values (rotary), add a bias to the scores (ALiBi, T5, Shaw, Transformer-XL) or
add to the attended values (Shaw). Each is a file of its own; this one defines the slot.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable
from typing import ClassVar, Literal

from torch import Tensor, nn

from allyouneed.config import Part
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost


class Heads:
    """Sizes of an attention."""

    def __init__(self, heads: int, kv_heads: int, head_width: int, causal: bool) -> None:
        self.heads, self.kv_heads, self.head_width, self.causal = heads, kv_heads, head_width, causal

    @property
    def inner(self) -> int:
        return self.heads * self.head_width


class Relative(Part, slot="attention positions"):
    supports_cross: ClassVar[bool] = False  # works in cross-attention
    bilinear: ClassVar[bool] = False  # requires scores of the form q·k

    @property
    def features(self) -> int:
        """Features that `apply_positions` appends to every query and key."""
        return 0

    @property
    def reach(self) -> int | None:
        """Keys at this distance and beyond have no weight; None: no limit. What a trained module says (`visible`) may
        be less."""
        return None

    @abstractmethod
    def build(self, heads: Heads, common: Common) -> RelativeModule: ...

    def cost(self, heads: Heads, common: Common, keys: float) -> Cost:
        """Per layer, for `keys` keys per query on average."""
        return Cost()

    def shared(self, heads: Heads, common: Common) -> dict[Hashable, Cost]:
        """Shared by the whole stack, by key."""
        return {}

    def problems(self, heads: Heads, common: Common) -> list[tuple[str, str]]:
        """(field, error message) in this attention."""
        return []


class RelativeModule(nn.Module):
    """Tensors are (batch, heads, time, head_width); positions are integers (batch or 1, time)."""

    one_per_stack: Hashable = None  # layers of a stack with equal keys share one module
    score_scale: float = 1.0  # multiplies the scale of the scores
    adds_bias: bool = False
    adds_key_bias: bool = False
    adds_values: bool = False
    bias_by_distance: bool = False  # the bias depends on the distance only, and has gradients
    constant_from: int | None = None  # distance from which the bias is constant, on each side
    bias_by_query: bool = False  # the bias, and what is added to the values, depend on the query and the distance only
    traceable: bool = True  # `apply_positions` has no side effects

    @property
    def static(self) -> Hashable:
        """A key if the bias is independent of q; modules with equal keys have equal biases."""
        return None

    def visible(self) -> int | None:
        """Keys at this distance and beyond have no weight, so that decoding need not cache them; None: no limit."""
        return None

    def prepare(self, context: Context) -> None:
        """Fill `context.memo` with what `apply_positions` needs."""

    def apply_positions(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Encode positions into queries, keys and values of the new tokens, before they are cached."""
        return q, k, v

    def bias(self, q: Tensor, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        """Added to the scores; broadcasts to (batch, heads, queries, keys). q is the output of `apply_positions`."""
        raise NotImplementedError

    @property
    def pair_bias(self) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """The bias of single pairs, (head, query position, key position), if kernels can compute it."""
        return None

    def distance_bias(self, time: int) -> Tensor:
        """The bias of the distances 1 − time, …, time − 1 (positive for keys behind the query): (heads, 2 · time − 1).
        Only if `bias_by_distance`."""
        raise NotImplementedError

    def query_bias(self, q: Tensor, scale: float, causal: bool) -> tuple[Tensor, int, Tensor | None]:
        """The bias of each query by distance (batch, heads, queries, columns), the farthest distance, and what is added
        to the values by distance (columns, head_width). The first column is that of keys so far behind or farther, each
        one more is one token closer or ahead; the last is that of the query itself if `causal`, else also of all
        farther ahead. Only if `bias_by_query`."""
        raise NotImplementedError

    def key_bias(self, k: Tensor, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        """Added to the scores as `bias` is, but computed from the keys (batch, heads, keys, head_width)."""
        raise NotImplementedError

    def values(self, weights: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Added to weights @ v, given the weights (batch, heads, queries, keys)."""
        raise NotImplementedError


def distances(queries: Tensor, keys: Tensor) -> Tensor:
    """Query position − key position: (batch or 1, queries, keys)."""
    return queries[:, :, None] - keys[:, None, :]


class NoRelative(Relative):
    """No relative positions."""

    supports_cross: ClassVar[bool] = True

    kind: Literal["none"] = "none"

    def build(self, heads: Heads, common: Common) -> RelativeModule:
        return RelativeModule()
