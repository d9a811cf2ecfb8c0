"""Cost of a part, computed from its config without building a module: a 70B model takes milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Cost:
    """Parameters; forward FLOPs per token (a multiply-add is two); elements of decoding state.

    `state_per_token`, `state_constant`: all elements of the state of a row. Of them, `wide_per_token` and
    `wide_constant` are kept in single precision also by models of half precision (sums of recurrences, integers).
    `trim`, of it `trim_wide`: elements kept only so that recent tokens can be trimmed, which a step captured in a CUDA
    graph does not keep; negative where such a step keeps more.
    """

    parameters: int = 0
    flops: float = 0.0
    state_per_token: float = 0.0
    state_constant: float = 0.0
    wide_per_token: float = 0.0
    wide_constant: float = 0.0
    trim: float = 0.0
    trim_wide: float = 0.0

    def state_bytes(self, length: int, itemsize: int, captured: bool = False) -> float:
        """State of a row of `length` tokens, with `itemsize` bytes per number. `captured`: in a CUDA graph
        (runtime/cuda/static_cache.py)."""
        elements = self.state_per_token * length + self.state_constant - self.trim * captured
        wide = self.wide_per_token * length + self.wide_constant - self.trim_wide * captured
        return elements * itemsize + wide * max(0, 4 - itemsize)

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Cost)))

    def __mul__(self, times: int) -> Cost:
        return Cost(*(getattr(self, field.name) * times for field in fields(Cost)))
