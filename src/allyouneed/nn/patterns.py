"""Who may look at whom, as an algebra: `Causal() & Window(256) | Global(0)`, or the same words as text in YAML.

One object answers every question about itself: the dense mask (the truth), the block mask of FlexAttention (the same
`allowed`, asked for single places), whether SDPA's `is_causal` fits, how far back decoding must remember, and its
picture. A new pattern is a subclass with `allowed` and `reach`; the text language and the tests find it by its kind.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from pydantic_core import PydanticCustomError
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


class Pattern(Part, slot="pattern"):
    """A relation between query and key places."""

    @abstractmethod
    def allowed(self, query: Place, key: Place) -> Tensor:
        """True where the query may look at the key; the places broadcast against each other."""

    @property
    @abstractmethod
    def reach(self) -> tuple[float, float]:
        """Bounds on (key position − query position) that `allowed` may permit; infinities where there are none."""

    @property
    def causal(self) -> bool:
        """No query sees a later key."""
        return self.reach[1] <= 0

    @property
    def memory(self) -> int | None:
        """How many past places (itself included) decoding must keep; None when that grows without bound."""
        return None if math.isinf(self.reach[0]) else int(-self.reach[0]) + 1

    def mask(self, queries: int, keys: int) -> Tensor:
        """The dense truth for one sentence: (queries, keys) bool; queries are the last of the keys."""
        key = torch.arange(keys)[None, :]
        query = torch.arange(keys - queries, keys)[:, None]
        one = torch.ones((), dtype=torch.long)
        return self.allowed(Place(query, one), Place(key, one)).expand(queries, keys)

    def mean_keys(self, length: int, samples: int = 64) -> float:
        """Keys a query sees on average in a sentence of this length (queries sampled evenly, so it is quick)."""
        with torch.device("cpu"):
            query = ((torch.arange(min(samples, length)) + 0.5) * (length / min(samples, length))).floor().long()
            one = torch.ones((), dtype=torch.long)
            seen = self.allowed(Place(query[:, None], one), Place(torch.arange(length)[None, :], one))
            return float(seen.expand(len(query), length).sum(-1).double().mean())

    def picture(self, size: int = 16) -> str:
        """Rows are queries, columns are keys; a block is a look."""
        return "\n".join("".join("█" if seen else "·" for seen in row) for row in self.mask(size, size).tolist())

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
        return _Reader(text).read()

    def to_text(self) -> str:
        return str(self)


class Full(Pattern):
    """Everyone sees everyone (encoder self-attention, cross-attention)."""

    kind: Literal["full"] = "full"

    def allowed(self, query: Place, key: Place) -> Tensor:
        return (key.position == key.position) & (query.position == query.position)

    @property
    def reach(self) -> tuple[float, float]:
        return -math.inf, math.inf


class Causal(Pattern):
    """Nobody sees the future ("Attention Is All You Need", 3.2.3)."""

    kind: Literal["causal"] = "causal"

    def allowed(self, query: Place, key: Place) -> Tensor:
        return key.position <= query.position

    @property
    def reach(self) -> tuple[float, float]:
        return -math.inf, 0


class Window(Pattern):
    """Fewer than `size` places away, on both sides; `causal & window(n)` sees itself and n − 1 before."""

    kind: Literal["window"] = "window"
    size: Positive

    def allowed(self, query: Place, key: Place) -> Tensor:
        return (query.position - key.position).abs() < self.size

    @property
    def reach(self) -> tuple[float, float]:
        return 1 - self.size, self.size - 1


class Prefix(Pattern):
    """Everyone sees the first `length` places: `causal | prefix(n)` is the prefix language model of T5, 3.2.1."""

    kind: Literal["prefix"] = "prefix"
    length: Natural

    def allowed(self, query: Place, key: Place) -> Tensor:
        return (key.position < self.length) & (query.position == query.position)

    @property
    def reach(self) -> tuple[float, float]:
        return -math.inf, max(self.length - 1, -math.inf)


class SameSegment(Pattern):
    """Sentences packed into one row do not see each other. Batches with segments add this by themselves."""

    kind: Literal["same-segment"] = "same-segment"

    def allowed(self, query: Place, key: Place) -> Tensor:
        return query.segment == key.segment

    @property
    def reach(self) -> tuple[float, float]:
        return -math.inf, math.inf


class And(Pattern):
    kind: Literal["and"] = "and"
    left: Pattern
    right: Pattern

    def allowed(self, query: Place, key: Place) -> Tensor:
        return self.left.allowed(query, key) & self.right.allowed(query, key)

    @property
    def reach(self) -> tuple[float, float]:
        return max(self.left.reach[0], self.right.reach[0]), min(self.left.reach[1], self.right.reach[1])

    def __str__(self) -> str:
        return " & ".join(f"({side})" if isinstance(side, Or) else str(side) for side in (self.left, self.right))


class Or(Pattern):
    kind: Literal["or"] = "or"
    left: Pattern
    right: Pattern

    def allowed(self, query: Place, key: Place) -> Tensor:
        return self.left.allowed(query, key) | self.right.allowed(query, key)

    @property
    def reach(self) -> tuple[float, float]:
        return min(self.left.reach[0], self.right.reach[0]), max(self.left.reach[1], self.right.reach[1])

    def __str__(self) -> str:
        return f"{self.left} | {self.right}"


class Not(Pattern):
    kind: Literal["not"] = "not"
    inner: Pattern

    def allowed(self, query: Place, key: Place) -> Tensor:
        return ~self.inner.allowed(query, key)

    @property
    def reach(self) -> tuple[float, float]:
        return -math.inf, math.inf

    def __str__(self) -> str:
        return f"~({self.inner})" if isinstance(self.inner, And | Or) else f"~{self.inner}"


class _Reader:
    """`or := and ('|' and)*   and := not ('&' not)*   not := '~' not | '(' or ')' | word ['(' numbers ')']`"""

    def __init__(self, text: str) -> None:
        self.text = text
        self.words = re.findall(r"[a-z][a-z0-9-]*|\d+|\S", text)
        self.at = 0

    def read(self) -> Pattern:
        pattern = self._or()
        if self.at < len(self.words):
            raise self._error(f"{self.words[self.at]!r} does not belong here")
        return pattern

    def _take(self, word: str) -> bool:
        found = self.at < len(self.words) and self.words[self.at] == word
        self.at += found
        return found

    def _or(self) -> Pattern:
        pattern = self._and()
        while self._take("|"):
            pattern = pattern | self._and()
        return pattern

    def _and(self) -> Pattern:
        pattern = self._not()
        while self._take("&"):
            pattern = pattern & self._not()
        return pattern

    def _not(self) -> Pattern:
        if self._take("~"):
            return ~self._not()
        if self._take("("):
            pattern = self._or()
            if not self._take(")"):
                raise self._error("a ')' is missing")
            return pattern
        return self._word()

    def _word(self) -> Pattern:
        word = self.words[self.at] if self.at < len(self.words) else "the end"
        names = {kind: part for kind, part in Pattern.registry.items() if kind not in ("and", "or", "not")}
        if word not in names:
            raise self._error(f"{word!r} is no pattern (allowed: {', '.join(sorted(names))})")
        self.at += 1
        values: list[int] = []
        if self._take("("):
            while not self._take(")"):
                value = self.words[self.at] if self.at < len(self.words) else ""
                if not value.isdecimal():
                    raise self._error(f"{word}(…) takes whole numbers, not {value!r}")
                values.append(int(value))
                self.at += 1
                self._take(",")
        fields = [name for name in names[word].__pydantic_fields__ if name != "kind"]
        if len(values) != len(fields):
            wanted = f"({', '.join(fields)})" if fields else "no numbers"
            raise self._error(f"{word} takes {wanted}, {len(values)} given")
        tree: dict[str, Any] = {"kind": word} | dict(zip(fields, values, strict=True))
        chosen: Pattern = Pattern.choose(tree)
        return chosen

    def _error(self, message: str) -> PydanticCustomError:
        return PydanticCustomError("config", "{text}", {"text": f"{message}, in {self.text!r}"})
