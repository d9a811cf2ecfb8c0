"""ALiBi: attention with linear biases."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.positions.relative import Heads, Relative, RelativeModule, distances


class Alibi(Relative):
    """ALiBi (Press et al. 2022, 3): −m·(i − j) is added to the score of query i and key j, with a fixed slope m per
    head.

    `octaves`: the slopes of n heads are 2^(−octaves/n), …, 2^−octaves. `symmetric` uses −m·|i − j|, for bidirectional
    attention.
    """

    kind: Literal["alibi"] = "alibi"
    octaves: Annotated[float, Field(gt=0)] = 8.0
    """The slopes of n heads are 2^(−octaves/n), …, 2^−octaves."""
    symmetric: bool = False
    """Use the distance |i − j|, for bidirectional attention."""

    def build(self, heads: Heads, common: Common) -> RelativeModule:
        return AlibiModule(self, heads.heads)

    def problems(self, heads: Heads, common: Common) -> list[tuple[str, str]]:
        if heads.causal or self.symmetric:
            return []
        text = "must be true for bidirectional attention; otherwise far keys ahead get the largest scores"
        return [("symmetric", text)]


def slopes(heads: int, octaves: float = 8.0) -> list[float]:
    """One slope per head. If heads is not a power of 2: the slopes of the power below, then every other slope of the
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
        self.device_slopes: Tensor | None = None  # preloaded on the device by captured graphs, which cannot copy

    @property
    def static(self) -> Hashable:
        return "alibi", self.config.octaves, self.config.symmetric, len(self.slopes)

    def prepare(self, context: Context) -> None:
        device = context.queries.device
        if device.type == "cuda" and (self.device_slopes is None or self.device_slopes.device != device):
            self.device_slopes = torch.tensor(self.slopes, dtype=torch.float64, device=device)

    @property
    def pair_bias(self) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        if self.device_slopes is None:
            return None
        slopes, symmetric = self.device_slopes.float(), self.config.symmetric

        def bias(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            far = query - key
            return -slopes[head] * (far.abs() if symmetric else far)

        return bias

    def bias(self, q: Tensor, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        far = distances(queries, keys)[:, None]  # (batch or 1, 1, queries, keys)
        far = far.abs() if self.config.symmetric else far
        dtype = torch.promote_types(q.dtype, torch.float32)
        if self.device_slopes is not None and self.device_slopes.device == q.device:
            return far * -self.device_slopes.to(dtype)[:, None, None]
        return far * -torch.tensor(self.slopes, dtype=dtype, device=q.device)[:, None, None]
