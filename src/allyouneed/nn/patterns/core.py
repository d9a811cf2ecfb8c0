"""Attention patterns as an algebra: `Causal() & Window(256) | Global(0)`, or the same as text in YAML.

One object gives the dense mask (the definition), the empty and full blocks of that mask (so that sparse patterns cost
little, see ops/attention/block_mask.py), the block mask of FlexAttention, whether SDPA's `is_causal` applies, the keys
that decoding must cache, and a picture. A new pattern is a subclass with `allowed` and `reach`; the text language and
the tests find it by its kind. More patterns: sparse.py, marked.py.
"""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.config import Part

Positive = Annotated[int, Field(gt=0, lt=1 << 31)]
Natural = Annotated[int, Field(ge=0, lt=1 << 31)]


class TokenFields(NamedTuple):
    """Fields of tokens: position in the sentence, and index of the sentence in the row (0: padding).

    `prompt`, `chosen` and `order` are optional marks of the batch (see `Rows`).
    """

    position: Tensor
    segment: Tensor
    prompt: Tensor | None = None
    chosen: Tensor | None = None
    order: Tensor | None = None

    def along(self, axis: int) -> TokenFields:
        """Fields (time) that broadcast along this axis: 1 for queries, 0 for keys."""
        return TokenFields(*(None if field is None else field.unsqueeze(axis) for field in self))  # type: ignore[arg-type]


Allowed = Callable[[TokenFields, TokenFields], Tensor]


class BlockRange(Protocol):
    """Ranges of tokens whose minimum and maximum `feature` of a pattern are known."""

    def bounds(self, pattern: Pattern) -> tuple[Tensor, Tensor]: ...


class KVWindow(NamedTuple):
    """Keys that decoding must cache: the first positions, and the most recent ones (the newest included)."""

    first: int
    recent: int


class Pattern(Part, slot="pattern"):
    """A relation between query and key tokens."""

    @abstractmethod
    def allowed(self, query: TokenFields, key: TokenFields) -> Tensor:
        """True where the query may attend to the key; fields broadcast against each other."""

    def quick(self, longest: Callable[[], int], device: torch.device) -> Allowed:
        """`allowed` for a kernel that evaluates single pairs: expensive values are precomputed in a table of positions
        below `longest`."""
        return self.allowed

    @property
    def reach(self) -> tuple[float, float]:
        """Bounds on (key position − query position) that `allowed` may permit; infinities where there are none."""
        return -math.inf, math.inf

    # --- blocks: bounds for a range of queries and a range of keys

    def feature(self, token: TokenFields) -> Tensor:
        """The integer per token that this pattern decides by. A subclass that overrides it overrides `some` and
        `every`."""
        return token.position

    def some(self, query: BlockRange, key: BlockRange) -> Tensor:
        """False only where no query may attend to any key."""
        (q_low, q_high), (k_low, k_high) = query.bounds(self), key.bounds(self)
        back, ahead = self.reach
        near = torch.ones_like(k_low - q_high, dtype=torch.bool)
        if not math.isinf(ahead):  # integers: a float would round long distances
            near = near & (k_low - q_high <= int(ahead))
        if not math.isinf(back):
            near = near & (k_high - q_low >= int(back))
        return near if ahead > -math.inf else torch.zeros_like(near)

    def every(self, query: BlockRange, key: BlockRange) -> Tensor:
        """True only where every query may attend to every key."""
        (low, _), (_, high) = query.bounds(self), key.bounds(self)
        return torch.zeros_like(low - high, dtype=torch.bool)

    @property
    def modulus(self) -> int:
        """Query and key positions differ by a multiple of this, so tokens may be sorted by position % modulus."""
        return 1

    def marks(self, token: TokenFields) -> list[Tensor]:
        """Flags of scattered tokens with many queries or keys, which are best sorted together."""
        return []

    # --- decoding

    @property
    def causal(self) -> bool:
        """No query attends to a later key."""
        return self.reach[1] <= 0

    @property
    def ahead(self) -> float:
        """Upper bound of `reach` for keys outside the prompt."""
        return self.reach[1]

    @property
    def decodes(self) -> bool:
        """No query attends to a later key when the prompt is prefilled at once."""
        return self.ahead <= 0

    @property
    def kv_window(self) -> KVWindow | None:
        """Keys that a later query can reach; None if unbounded."""
        back = self.reach[0]
        return None if math.isinf(back) else KVWindow(0, max(0, int(-back) + 1))

    def leak(self) -> str | None:
        """Which part of the pattern attends to later tokens; None if none does."""
        return None if self.decodes else f"{self} attends to later tokens"

    # --- dense masks and pictures

    def mask(self, queries: int, keys: int) -> Tensor:
        """The mask of one sentence: (queries, keys) bool; queries are the last of the keys."""
        key = torch.arange(keys)[None, :]
        query = torch.arange(keys - queries, keys)[:, None]
        one = torch.ones((), dtype=torch.long)
        return self.allowed(TokenFields(query, one), TokenFields(key, one)).expand(queries, keys)

    def mean_keys(self, length: int, samples: int = 64) -> float:
        """Average number of keys per query in a sentence of this length, over evenly sampled queries."""
        return _mean_keys(self, length, samples)

    def picture(self, size: int = 16) -> str:
        """Rows are queries, columns are keys; a block is an allowed pair."""
        return "\n".join("".join("█" if seen else "·" for seen in row) for row in self.mask(size, size).tolist())

    # --- operators and text

    def __and__(self, other: Pattern) -> Pattern:
        return And(left=self, right=other)

    def __or__(self, other: Pattern) -> Pattern:
        return Or(left=self, right=other)

    def __invert__(self) -> Pattern:
        return Not(inner=self)

    def __str__(self) -> str:
        values = [str(getattr(self, name)) for name in type(self).__pydantic_fields__ if name != "kind"]
        return f"{self._kind}({', '.join(values)})" if values else self._kind

    @property
    def _kind(self) -> str:
        return str(type(self).__pydantic_fields__["kind"].default)

    @classmethod
    def from_text(cls, text: str) -> Pattern:
        from allyouneed.nn.patterns.parser import PatternParser

        return PatternParser(text).read()

    def to_text(self) -> str:
        return str(self)


@lru_cache(maxsize=4096)  # every layer of a model calls it with the same arguments
def _mean_keys(pattern: Pattern, length: int, samples: int) -> float:
    with torch.device("cpu"):
        query = ((torch.arange(min(samples, length)) + 0.5) * (length / min(samples, length))).floor().long()
        one = torch.ones((), dtype=torch.long)
        seen = pattern.allowed(TokenFields(query[:, None], one), TokenFields(torch.arange(length)[None, :], one))
        return float(seen.expand(len(query), length).sum(-1).double().mean())


class Full(Pattern):
    """All pairs (encoder self-attention, cross-attention)."""

    kind: Literal["full"] = "full"

    def allowed(self, query: TokenFields, key: TokenFields) -> Tensor:
        return (key.position == key.position) & (query.position == query.position)

    def every(self, query: BlockRange, key: BlockRange) -> Tensor:
        return self.some(query, key)


class Causal(Pattern):
    """Keys up to the query ("Attention Is All You Need", 3.2.3)."""

    kind: Literal["causal"] = "causal"

    def allowed(self, query: TokenFields, key: TokenFields) -> Tensor:
        return key.position <= query.position

    @property
    def reach(self) -> tuple[float, float]:
        return -math.inf, 0

    def every(self, query: BlockRange, key: BlockRange) -> Tensor:
        return key.bounds(self)[1] <= query.bounds(self)[0]


class Window(Pattern):
    """Keys fewer than `size` positions away, on both sides; `causal & window(n)` covers the query and n − 1 before."""

    kind: Literal["window"] = "window"
    size: Positive
    """Keys are fewer than this many positions away."""

    def allowed(self, query: TokenFields, key: TokenFields) -> Tensor:
        return (query.position - key.position).abs() < self.size

    @property
    def reach(self) -> tuple[float, float]:
        return 1 - self.size, self.size - 1

    def every(self, query: BlockRange, key: BlockRange) -> Tensor:
        (q_low, q_high), (k_low, k_high) = query.bounds(self), key.bounds(self)
        return (k_high - q_low < self.size) & (q_high - k_low < self.size)


class Prefix(Pattern):
    """The first `length` positions: `causal | prefix(n)` is the prefix language model of T5, 3.2.1."""

    kind: Literal["prefix"] = "prefix"
    length: Natural
    """Number of leading positions."""

    def allowed(self, query: TokenFields, key: TokenFields) -> Tensor:
        return (key.position < self.length) & (query.position == query.position)

    @property
    def reach(self) -> tuple[float, float]:
        return -math.inf, self.length - 1 if self.length else -math.inf

    def some(self, query: BlockRange, key: BlockRange) -> Tensor:
        return key.bounds(self)[0] < self.length

    def every(self, query: BlockRange, key: BlockRange) -> Tensor:
        return key.bounds(self)[1] < self.length

    @property
    def kv_window(self) -> KVWindow:
        return KVWindow(self.length, 0)

    def leak(self) -> str | None:
        return f"{self} lets the first {self.length} positions attend to each other" if self.length > 1 else None


class SameFeature(Pattern):
    """Pairs of tokens with the same `feature`."""

    def allowed(self, query: TokenFields, key: TokenFields) -> Tensor:
        return self.feature(query) == self.feature(key)

    def some(self, query: BlockRange, key: BlockRange) -> Tensor:
        (q_low, q_high), (k_low, k_high) = query.bounds(self), key.bounds(self)
        return (k_low <= q_high) & (q_low <= k_high)

    def every(self, query: BlockRange, key: BlockRange) -> Tensor:
        (q_low, q_high), (k_low, k_high) = query.bounds(self), key.bounds(self)
        return (q_low == k_high) & (q_high == k_low)


class SameSegment(SameFeature):
    """Sentences packed into one row do not attend to each other. Added automatically for packed batches."""

    kind: Literal["same-segment"] = "same-segment"

    def feature(self, token: TokenFields) -> Tensor:
        return token.segment


class Both(Pattern):
    """Two patterns, joined by an operator."""

    join: ClassVar[Callable[..., Any]]
    nearer: ClassVar[Callable[..., Any]]  # of two bounds of `reach`: the lower one, and
    farther: ClassVar[Callable[..., Any]]  # the upper one

    left: Pattern
    """A pattern."""
    right: Pattern
    """Another pattern."""

    def allowed(self, query: TokenFields, key: TokenFields) -> Tensor:
        return self.join(self.left.allowed(query, key), self.right.allowed(query, key))

    def quick(self, longest: Callable[[], int], device: torch.device) -> Allowed:
        left, right, join = self.left.quick(longest, device), self.right.quick(longest, device), self.join
        return lambda query, key: join(left(query, key), right(query, key))

    @property
    def reach(self) -> tuple[float, float]:
        (low, high), (other, another) = self.left.reach, self.right.reach
        return self.nearer(low, other), self.farther(high, another)

    def some(self, query: BlockRange, key: BlockRange) -> Tensor:
        return self.join(self.left.some(query, key), self.right.some(query, key))

    def every(self, query: BlockRange, key: BlockRange) -> Tensor:
        return self.join(self.left.every(query, key), self.right.every(query, key))

    def marks(self, token: TokenFields) -> list[Tensor]:
        return self.left.marks(token) + self.right.marks(token)

    @property
    def ahead(self) -> float:
        return self.farther(self.left.ahead, self.right.ahead)


class And(Both):
    """Pairs that both patterns allow: `left & right`."""

    join, nearer, farther = operator.and_, max, min

    kind: Literal["and"] = "and"

    @property
    def modulus(self) -> int:
        return math.lcm(self.left.modulus, self.right.modulus)

    @property
    def kv_window(self) -> KVWindow | None:
        bounds = [side.kv_window for side in (self.left, self.right)]
        return min((bound for bound in bounds if bound is not None), key=sum, default=None)

    def leak(self) -> str | None:
        return None if self.decodes else self.left.leak() or self.right.leak()

    def __str__(self) -> str:
        return " & ".join(f"({side})" if isinstance(side, Or) else str(side) for side in (self.left, self.right))


class Or(Both):
    """Pairs that one of the patterns allows: `left | right`."""

    join, nearer, farther = operator.or_, min, max

    kind: Literal["or"] = "or"

    @property
    def modulus(self) -> int:
        return math.gcd(self.left.modulus, self.right.modulus)

    @property
    def kv_window(self) -> KVWindow | None:
        left, right = self.left.kv_window, self.right.kv_window
        if left is None or right is None:
            return None
        return KVWindow(max(left.first, right.first), max(left.recent, right.recent))

    def leak(self) -> str | None:
        return self.left.leak() or self.right.leak()

    def __str__(self) -> str:
        return f"{self.left} | {self.right}"


class Not(Pattern):
    """Pairs that the pattern does not allow: `~inner`."""

    kind: Literal["not"] = "not"
    inner: Pattern
    """A pattern."""

    def allowed(self, query: TokenFields, key: TokenFields) -> Tensor:
        return ~self.inner.allowed(query, key)

    def quick(self, longest: Callable[[], int], device: torch.device) -> Allowed:
        inner = self.inner.quick(longest, device)
        return lambda query, key: ~inner(query, key)

    def some(self, query: BlockRange, key: BlockRange) -> Tensor:
        return ~self.inner.every(query, key)

    def every(self, query: BlockRange, key: BlockRange) -> Tensor:
        return ~self.inner.some(query, key)

    def marks(self, token: TokenFields) -> list[Tensor]:
        return self.inner.marks(token)

    def __str__(self) -> str:
        return f"~({self.inner})" if isinstance(self.inner, And | Or) else f"~{self.inner}"
