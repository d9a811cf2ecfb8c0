"""A pattern as a picture, with what it answers about itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

import allyouneed.nn  # noqa: F401  # every pattern is known before an expression is read
from allyouneed.errors import UserError
from allyouneed.look.canvas import Panel
from allyouneed.nn.patterns.core import KVWindow, Pattern, TokenFields

LEAST, MOST = 32, 512  # tokens drawn when nobody says how many

_PATTERN: TypeAdapter[Pattern] = TypeAdapter(Pattern)


def read(text: str) -> Pattern:
    try:
        return _PATTERN.validate_python(text)
    except ValidationError as error:
        said = "; ".join(": ".join([*map(str, e["loc"]), str(e["msg"])]) for e in error.errors())
        raise UserError(said if repr(text) in said else f"{said}, in {text!r}") from None


def panels(expressions: Sequence[str], size: int | None = None) -> list[Panel]:
    found = [read(text) for text in expressions]
    chosen = size or max(fitting(pattern) for pattern in found)
    return [panel(pattern, chosen) for pattern in found]


def panel(pattern: Pattern, size: int) -> Panel:
    """Where a pattern asks the batch, it is drawn for what a batch might say, and the notes tell what that is."""
    steps = torch.arange(size)
    part = max(1, size // 4)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    asked = {
        f"here the first {part:,} tokens are the prompt": {"prompt": steps < part},
        f"here one token in {part:,} is chosen": {"chosen": steps % part == 0},
        "here the tokens are said in an order drawn by lot": {"order": order},
    }
    plain = pattern.mask(size, size)
    told = {note: said for note, said in asked.items() if not torch.equal(_mask(pattern, said, size), plain)}
    seen = _mask(pattern, {name: value for said in told.values() for name, value in said.items()}, size)
    return Panel(str(pattern), [*facts(pattern, seen), *told], "marks", seen, "query", "key")


def _mask(pattern: Pattern, said: Mapping[str, Tensor], size: int) -> Tensor:
    steps = torch.arange(size)

    def place(axis: int) -> TokenFields:
        known = {"position": steps, "segment": torch.ones_like(steps), **said}
        return TokenFields(**{name: value.unsqueeze(axis) for name, value in known.items()})

    return pattern.allowed(place(1), place(0)).expand(size, size)


def fitting(pattern: Pattern) -> int:
    """Tokens enough to see its largest number about three times."""
    largest = max(_numbers(pattern), default=0)
    return min(MOST, max(LEAST, 2 ** math.ceil(math.log2(max(3 * largest, 1)))))


def _numbers(pattern: Pattern) -> Iterator[int]:
    for name in type(pattern).model_fields:
        value = getattr(pattern, name)
        if isinstance(value, Pattern):
            yield from _numbers(value)
        elif isinstance(value, int):
            yield value


def facts(pattern: Pattern, seen: Tensor) -> list[str]:
    before, after = pattern.reach
    how = "causal" if pattern.causal else "causal after the prompt" if pattern.decodes else "not causal"
    return [
        f"{how}, reach {_far(before)} to {_far(after)}",
        _kept(pattern.kv_window) if pattern.decodes else "cannot decode",
        f"{float(seen.sum()) / len(seen):,.4g} keys a query, of {len(seen):,}",
    ]


def _kept(kept: KVWindow | None) -> str:
    if kept is None:
        return "decoding keeps everything"
    both = (("first", kept.first), ("last", kept.recent))
    ends = [f"the {name}" if count == 1 else f"the {name} {count:,}" for name, count in both if count]
    return f"decoding keeps {' and '.join(ends) or 'nothing'}"


def _far(steps: float) -> str:
    return ("−" if steps < 0 else "") + ("∞" if math.isinf(steps) else f"{abs(int(steps)):,}")
