"""Attention with linear biases: the farther a key, the less it counts."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.nn.common import Common
from allyouneed.nn.positions.relative import Heads, Relative, RelativeModule, distances


class Alibi(Relative):
    """ALiBi (Press et al. 2022, 3): −m·(i − j) is added to the score of query i and key j, m fixed for each head.

    `octaves`: the slopes of n heads are 2^(−octaves/n), …, 2^−octaves. `symmetric` takes −m·|i − j|, for attention that
    sees both sides.
    """

    kind: Literal["alibi"] = "alibi"
    octaves: Annotated[float, Field(gt=0)] = 8.0
    symmetric: bool = False

    def build(self, heads: Heads, common: Common) -> RelativeModule:
        return AlibiModule(self, heads.heads)

    def problems(self, heads: Heads, common: Common) -> list[tuple[str, str]]:
        if heads.causal or self.symmetric:
            return []
        text = "false favours keys ahead, the farther the more; an attention that sees them needs symmetric: true"
        return [("symmetric", text)]


def slopes(heads: int, octaves: float = 8.0) -> list[float]:
    """One for each head. Where their number is no power of 2: those of the power below, then every other one of the
    power above (the authors' code)."""
    below = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-octaves * i / below) for i in range(1, below + 1)]
    more = [2 ** (-octaves * i / (2 * below)) for i in range(1, 2 * below + 1, 2)]
    return first + more[: heads - below]


class AlibiModule(RelativeModule):
    adds_bias = True

    def __init__(self, config: Alibi, heads: int) -> None:
        super().__init__()
        self.config, self.slopes = config, slopes(heads, config.octaves)
        self.there: Tensor | None = None  # the slopes where they are needed, put there by whoever may not wait for them

    @property
    def static(self) -> Hashable:
        return "alibi", self.config, len(self.slopes)

    def bias(self, q: Tensor, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        far = distances(queries, keys)[:, None]  # (batch or 1, 1, queries, keys)
        far = far.abs() if self.config.symmetric else far
        dtype = torch.promote_types(q.dtype, torch.float32)
        if self.there is not None and self.there.device == q.device:
            return far * -self.there.to(dtype)[:, None, None]
        return far * -torch.tensor(self.slopes, dtype=dtype, device=q.device)[:, None, None]
