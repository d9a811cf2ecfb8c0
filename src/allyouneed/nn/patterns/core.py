"""Who may look at whom, as an algebra: `Causal() & Window(256) | Global(0)`, or the same words as text in YAML.

One object answers every question about itself: the dense mask (the truth), which tiles of that mask are empty or full
(so that a sparse pattern costs what it shows, see ops/attention/block_mask.py), the block mask of FlexAttention, whether SDPA's
`is_causal` fits, what decoding must remember, and its picture. A new pattern is a subclass with `allowed` and `reach`;
the text language and the tests find it by its kind. More of them: sparse.py.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.config import Part

Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]


class Place(NamedTuple):
    """Where tokens stand: position in their own sentence, and number of that sentence in the row (0: padding).

    `prompt`, `chosen` and `order` are what the batch may say besides (see `Rows`).
    """

    position: Tensor
    segment: Tensor
    prompt: Tensor | None = None
    chosen: Tensor | None = None
    order: Tensor | None = None


Allowed = Callable[[Place, Place], Tensor]


class Stretch(Protocol):
    """Many stretches of tokens, of which only the least and the greatest `feature` of a pattern are known."""

    def bounds(self, pattern: Pattern) -> tuple[Tensor, Tensor]: ...


class KVWindow(NamedTuple):
    """What decoding must remember: the first places of a sentence, and the most recent (the newest included)."""

    first: int
    recent: int


class Pattern(Part, slot="pattern"):
    """A relation between query and key places."""

    @abstractmethod
    def allowed(self, query: Place, key: Place) -> Tensor:
        """True where the query may look at the key; the places broadcast against each other."""

    def quick(self, longest: Callable[[], int], device: torch.device) -> Allowed:
        """`allowed` for a kernel that asks about one pair after the other: what takes long to find out is looked up in
        a table, of all positions below `longest`."""
        return self.allowed

    @property
    @abstractmethod
    def reach(self) -> tuple[float, float]:
        """Bounds on (key position − query position) that `allowed` may permit; infinities where there are none."""

    # --- tiles: what is known of a whole stretch of queries and a whole stretch of keys

    def feature(self, place: Place) -> Tensor:
        """The whole number about a token that this pattern decides by. Who changes it writes `some` and `every`."""
        return place.position

    def some(self, query: Stretch, key: Stretch) -> Tensor:
        """False only where no query may look at any key."""
        (q_low, q_high), (k_low, k_high) = query.bounds(self), key.bounds(self)
        back, ahead = self.reach
        near = torch.ones_like(k_low - q_high, dtype=torch.bool)
        if not math.isinf(ahead):  # compared as whole numbers: a float would round long distances
            near = near & (k_low - q_high <= int(ahead))
        if not math.isinf(back):
            near = near & (k_high - q_low >= int(back))
        return near if ahead > -math.inf else torch.zeros_like(near)

    def every(self, query: Stretch, key: Stretch) -> Tensor:
        """True only where every query may look at every key."""
        (low, _), (_, high) = query.bounds(self), key.bounds(self)
        return torch.zeros_like(low - high, dtype=torch.bool)

    @property
    def modulus(self) -> int:
        """Query and key always stand a multiple of this apart, so tokens may be sorted by position % modulus."""
        return 1

    def marks(self, place: Place) -> list[Tensor]:
        """Flags of scattered tokens that many look at, or that look at many: such tokens are best sorted together."""
        return []

    # --- decoding

    @property
    def causal(self) -> bool:
        """No query sees a later key."""
        return self.reach[1] <= 0

    @property
    def ahead(self) -> float:
        """The upper bound of `reach` for keys that are not in the prompt."""
        return self.reach[1]

    @property
    def decodes(self) -> bool:
        """No query sees a later key, once the prompt has been read at once."""
        return self.ahead <= 0

    @property
    def kv_window(self) -> KVWindow | None:
        """Earlier keys that a query sees are among these; None when what must be kept grows without bound."""
        back = self.reach[0]
        return None if math.isinf(back) else KVWindow(0, max(0, int(-back) + 1))

    def leak(self) -> str | None:
        """Which part of it lets later tokens in; None when nothing does."""
        return None if self.decodes else f"{self} lets tokens see later ones"

    # --- looks

    def mask(self, queries: int, keys: int) -> Tensor:
        """The dense truth for one sentence: (queries, keys) bool; queries are the last of the keys."""
        key = torch.arange(keys)[None, :]
        query = torch.arange(keys - queries, keys)[:, None]
        one = torch.ones((), dtype=torch.long)
        return self.allowed(Place(query, one), Place(key, one)).expand(queries, keys)

    def mean_keys(self, length: int, samples: int = 64) -> float:
        """Keys a query sees on average in a sentence of this length (queries sampled evenly, so it is quick)."""
        return _mean_keys(self, length, samples)

    def picture(self, size: int = 16) -> str:
        """Rows are queries, columns are keys; a block is a look."""
        return "\n".join("".join("█" if seen else "·" for seen in row) for row in self.mask(size, size).tolist())

    # --- words

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
        from allyouneed.nn.patterns.parser import Reader

        return Reader(text).read()

    def to_text(self) -> str:
        return str(self)


@lru_cache(maxsize=4096)  # every layer of a model asks the same
def _mean_keys(pattern: Pattern, length: int, samples: int) -> float:
    with torch.device("cpu"):
        query = ((torch.arange(min(samples, length)) + 0.5) * (length / min(samples, length))).floor().long()
        one = torch.ones((), dtype=torch.long)
        seen = pattern.allowed(Place(query[:, None], one), Place(torch.arange(length)[None, :], one))
        return float(seen.expand(len(query), length).sum(-1).double().mean())


class Full(Pattern):
    """Everyone sees everyone (encoder self-attention, cross-attention)."""

    kind: Literal["full"] = "full"

    def allowed(self, query: Place, key: Place) -> Tensor:
        return (key.position == key.position) & (query.position == query.position)

    @property
    def reach(self) -> tuple[float, float]:
        return -math.inf, math.inf

    def every(self, query: Stretch, key: Stretch) -> Tensor:
        return self.some(query, key)


class Causal(Pattern):
    """Nobody sees the future ("Attention Is All You Need", 3.2.3)."""

    kind: Literal["causal"] = "causal"

    def allowed(self, query: Place, key: Place) -> Tensor:
        return key.position <= query.position

    @property
    def reach(self) -> tuple[float, float]:
        return -math.inf, 0

    def every(self, query: Stretch, key: Stretch) -> Tensor:
        return key.bounds(self)[1] <= query.bounds(self)[0]


class Window(Pattern):
    """Fewer than `size` places away, on both sides; `causal & window(n)` sees itself and n − 1 before."""

    kind: Literal["window"] = "window"
    size: Positive

    def allowed(self, query: Place, key: Place) -> Tensor:
        return (query.position - key.position).abs() < self.size

    @property
    def reach(self) -> tuple[float, float]:
        return 1 - self.size, self.size - 1

    def every(self, query: Stretch, key: Stretch) -> Tensor:
        (q_low, q_high), (k_low, k_high) = query.bounds(self), key.bounds(self)
        return (k_high - q_low < self.size) & (q_high - k_low < self.size)


class Prefix(Pattern):
    """Everyone sees the first `length` places: `causal | prefix(n)` is the prefix language model of T5, 3.2.1."""

    kind: Literal["prefix"] = "prefix"
    length: Natural

    def allowed(self, query: Place, key: Place) -> Tensor:
        return (key.position < self.length) & (query.position == query.position)

    @property
    def reach(self) -> tuple[float, float]:
        return -math.inf, self.length - 1 if self.length else -math.inf

    def some(self, query: Stretch, key: Stretch) -> Tensor:
        return key.bounds(self)[0] < self.length

    def every(self, query: Stretch, key: Stretch) -> Tensor:
        return key.bounds(self)[1] < self.length

    @property
    def kv_window(self) -> KVWindow:
        return KVWindow(self.length, 0)

    def leak(self) -> str | None:
        return f"{self} lets the first {self.length} places see each other" if self.length > 1 else None


class SameSegment(Pattern):
    """Sentences packed into one row do not see each other. Batches with segments add this by themselves."""

    kind: Literal["same-segment"] = "same-segment"

    def allowed(self, query: Place, key: Place) -> Tensor:
        return query.segment == key.segment

    @property
    def reach(self) -> tuple[float, float]:
        return -math.inf, math.inf

    def feature(self, place: Place) -> Tensor:
        return place.segment

    def some(self, query: Stretch, key: Stretch) -> Tensor:
        (q_low, q_high), (k_low, k_high) = query.bounds(self), key.bounds(self)
        return (k_low <= q_high) & (q_low <= k_high)

    def every(self, query: Stretch, key: Stretch) -> Tensor:
        (q_low, q_high), (k_low, k_high) = query.bounds(self), key.bounds(self)
        return (q_low == k_high) & (q_high == k_low)


class And(Pattern):
    kind: Literal["and"] = "and"
    left: Pattern
    right: Pattern

    def allowed(self, query: Place, key: Place) -> Tensor:
        return self.left.allowed(query, key) & self.right.allowed(query, key)

    def quick(self, longest: Callable[[], int], device: torch.device) -> Allowed:
        left, right = self.left.quick(longest, device), self.right.quick(longest, device)
        return lambda query, key: left(query, key) & right(query, key)

    @property
    def reach(self) -> tuple[float, float]:
        return max(self.left.reach[0], self.right.reach[0]), min(self.left.reach[1], self.right.reach[1])

    def some(self, query: Stretch, key: Stretch) -> Tensor:
        return self.left.some(query, key) & self.right.some(query, key)

    def every(self, query: Stretch, key: Stretch) -> Tensor:
        return self.left.every(query, key) & self.right.every(query, key)

    @property
    def modulus(self) -> int:
        return math.lcm(self.left.modulus, self.right.modulus)

    def marks(self, place: Place) -> list[Tensor]:
        return self.left.marks(place) + self.right.marks(place)

    @property
    def ahead(self) -> float:
        return min(self.left.ahead, self.right.ahead)

    @property
    def kv_window(self) -> KVWindow | None:
        bounds = [side.kv_window for side in (self.left, self.right)]
        return min((bound for bound in bounds if bound is not None), key=sum, default=None)

    def leak(self) -> str | None:
        return None if self.decodes else self.left.leak() or self.right.leak()

    def __str__(self) -> str:
        return " & ".join(f"({side})" if isinstance(side, Or) else str(side) for side in (self.left, self.right))


class Or(Pattern):
    kind: Literal["or"] = "or"
    left: Pattern
    right: Pattern

    def allowed(self, query: Place, key: Place) -> Tensor:
        return self.left.allowed(query, key) | self.right.allowed(query, key)

    def quick(self, longest: Callable[[], int], device: torch.device) -> Allowed:
        left, right = self.left.quick(longest, device), self.right.quick(longest, device)
        return lambda query, key: left(query, key) | right(query, key)

    @property
    def reach(self) -> tuple[float, float]:
        return min(self.left.reach[0], self.right.reach[0]), max(self.left.reach[1], self.right.reach[1])

    def some(self, query: Stretch, key: Stretch) -> Tensor:
        return self.left.some(query, key) | self.right.some(query, key)

    def every(self, query: Stretch, key: Stretch) -> Tensor:
        return self.left.every(query, key) | self.right.every(query, key)

    @property
    def modulus(self) -> int:
        return math.gcd(self.left.modulus, self.right.modulus)

    def marks(self, place: Place) -> list[Tensor]:
        return self.left.marks(place) + self.right.marks(place)

    @property
    def ahead(self) -> float:
        return max(self.left.ahead, self.right.ahead)

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
    kind: Literal["not"] = "not"
    inner: Pattern

    def allowed(self, query: Place, key: Place) -> Tensor:
        return ~self.inner.allowed(query, key)

    def quick(self, longest: Callable[[], int], device: torch.device) -> Allowed:
        inner = self.inner.quick(longest, device)
        return lambda query, key: ~inner(query, key)

    @property
    def reach(self) -> tuple[float, float]:
        return -math.inf, math.inf

    def some(self, query: Stretch, key: Stretch) -> Tensor:
        return ~self.inner.every(query, key)

    def every(self, query: Stretch, key: Stretch) -> Tensor:
        return ~self.inner.some(query, key)

    def marks(self, place: Place) -> list[Tensor]:
        return self.inner.marks(place)

    def __str__(self) -> str:
        return f"~({self.inner})" if isinstance(self.inner, And | Or) else f"~{self.inner}"
