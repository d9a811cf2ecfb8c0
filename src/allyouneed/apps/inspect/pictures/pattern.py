"""A pattern as a picture, with its properties."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from allyouneed.apps.inspect.pictures.canvas import Panel
from allyouneed.config.messages import describe
from allyouneed.errors import UserError
from allyouneed.nn.patterns.core import KVWindow, Pattern, TokenFields

MIN_SIZE, MAX_SIZE = 32, 512  # tokens drawn by default

_PATTERN: TypeAdapter[Pattern] = TypeAdapter(Pattern)


def read(text: str) -> Pattern:
    try:
        return _PATTERN.validate_python(text)
    except ValidationError as error:
        message = "; ".join(": ".join([*map(str, e["loc"]), describe(e)]) for e in error.errors())
        raise UserError(message if repr(text) in message else f"{message}, in {text!r}") from None


def panels(expressions: Sequence[str], size: int | None = None) -> list[Panel]:
    found = [read(text) for text in expressions]
    chosen = size or max(fitting_size(pattern) for pattern in found)
    return [panel(pattern, chosen) for pattern in found]


def panel(pattern: Pattern, size: int) -> Panel:
    """Where a pattern depends on the batch, it is drawn for an example batch, which the notes describe."""
    steps = torch.arange(size)
    part = max(1, size // 4)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    examples = {
        f"here the first {part:,} tokens are the prompt": {"prompt": steps < part},
        f"here one token in {part:,} is chosen": {"chosen": steps % part == 0},
        "here the tokens are predicted in a random order": {"order": order},
    }
    plain = pattern.mask(size, size)
    used = {note: fields for note, fields in examples.items() if not torch.equal(_mask(pattern, fields, size), plain)}
    mask = _mask(pattern, {name: value for fields in used.values() for name, value in fields.items()}, size)
    return Panel(str(pattern), [*properties(pattern, mask), *used], "marks", mask, "query", "key")


def _mask(pattern: Pattern, fields: Mapping[str, Tensor], size: int) -> Tensor:
    steps = torch.arange(size)

    def tokens(axis: int) -> TokenFields:
        given = {"position": steps, "segment": torch.ones_like(steps), **fields}
        return TokenFields(**{name: value.unsqueeze(axis) for name, value in given.items()})

    return pattern.allowed(tokens(1), tokens(0)).expand(size, size)


def fitting_size(pattern: Pattern) -> int:
    """A size that shows its largest number about three times."""
    largest = max(_numbers(pattern), default=0)
    return min(MAX_SIZE, max(MIN_SIZE, 2 ** math.ceil(math.log2(max(3 * largest, 1)))))


def _numbers(pattern: Pattern) -> Iterator[int]:
    for name in type(pattern).model_fields:
        value = getattr(pattern, name)
        if isinstance(value, Pattern):
            yield from _numbers(value)
        elif isinstance(value, int):
            yield value


def properties(pattern: Pattern, mask: Tensor) -> list[str]:
    before, after = pattern.reach
    how = "causal" if pattern.causal else "causal after the prompt" if pattern.decodes else "not causal"
    return [
        f"{how}, reach {_distance(before)} to {_distance(after)}",
        _kv_window(pattern.kv_window) if pattern.decodes else "cannot decode",
        f"{float(mask.sum()) / len(mask):,.4g} keys per query, of {len(mask):,}",
    ]


def _kv_window(kept: KVWindow | None) -> str:
    if kept is None:
        return "decoding keeps everything"
    both = (("first", kept.first), ("last", kept.recent))
    ends = [f"the {name}" if count == 1 else f"the {name} {count:,}" for name, count in both if count]
    return f"decoding keeps {' and '.join(ends) or 'nothing'}"


def _distance(steps: float) -> str:
    return ("−" if steps < 0 else "") + ("∞" if math.isinf(steps) else f"{abs(int(steps)):,}")
