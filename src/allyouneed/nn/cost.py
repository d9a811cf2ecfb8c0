"""Cost of a part, computed from its config without building a module: a 70B model takes milliseconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Parameters; forward FLOPs per token (a multiply-add is two); elements of decoding state."""

    parameters: int = 0
    flops: float = 0.0
    state_per_token: float = 0.0
    state_constant: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.parameters + other.parameters,
            self.flops + other.flops,
            self.state_per_token + other.state_per_token,
            self.state_constant + other.state_constant,
        )

    def __mul__(self, times: int) -> Cost:
        return Cost(
            self.parameters * times,
            self.flops * times,
            self.state_per_token * times,
            self.state_constant * times,
        )
