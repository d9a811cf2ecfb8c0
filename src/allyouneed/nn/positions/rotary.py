"""Rotary positions: queries and keys are rotated by their positions, so that q·k depends on the distance only."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.kernels import usable_without_grad
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.positions.relative import Heads, Relative, RelativeModule
from allyouneed.nn.positions.rotary_scaling import NoScaling, Scaling

XPOS_GAMMA = 0.4  # Sun et al. 2022, 3.2


class Rotary(Relative):
    """RoPE (Su et al. 2021, eq. 34): in plane i, a token at position m is rotated by the angle m·base^(−2i/width).

    `order: interleaved` pairs features 2i and 2i+1 (the paper; GPT-J), `halves` pairs i and i + width/2 (GPT-NeoX,
    Llama). `fraction`: share of each head's features to rotate, the first ones (GPT-NeoX, Phi). `values` rotates values
    too (RoFormer's `rotary_value`). `xpos` (Sun et al. 2022, algorithm 1) decays far keys, faster in faster planes:
    queries are multiplied by ζ_i^(m/xpos), keys by ζ_i^(−m/xpos), with ζ_i = (2i/width + 0.4) / 1.4; 512 in the paper.
    """

    bilinear: ClassVar[bool] = True

    kind: Literal["rotary"] = "rotary"
    base: Annotated[float, Field(gt=1)] = 10000.0
    """Base of the frequencies (θ); larger for longer contexts."""
    order: Literal["halves", "interleaved"] = "halves"
    """Rotate features i and i + width/2 (GPT-NeoX, Llama), or 2i and 2i + 1 (the paper, GPT-J)."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of each head's features to rotate, the first ones (GPT-NeoX, Phi)."""
    scaling: Scaling = NoScaling()
    """How frequencies change for contexts longer than in training."""
    values: bool = False
    """Rotate values too (RoFormer's `rotary_value`)."""
    xpos: Annotated[float, Field(gt=0)] | None = None
    """Scale base of xPos, which decays far keys (Sun et al. 2022; 512 there); default: none."""

    def width(self, heads: Heads) -> int:
        """Rotated features per head."""
        return int(heads.head_width * self.fraction)

    def build(self, heads: Heads, common: Common) -> RelativeModule:
        return RotaryModule(self, self.width(heads))

    def problems(self, heads: Heads, common: Common) -> list[tuple[str, str]]:
        found, width = [], self.width(heads)
        if width % 2 or not width:
            text = f"rotates {width} of {heads.head_width} features per head; it must be an even, positive number"
            found.append(("fraction", text))
        if self.xpos is not None and not heads.causal:
            found.append(("xpos", "requires a causal pattern: keys ahead of the query would grow"))
        return found + [(f"scaling.{key}", text) for key, text in self.scaling.problems(width)]


class RotaryModule(RelativeModule):
    """Frequencies are not a buffer: `model.to(bfloat16)` would round them and shift far positions."""

    def __init__(self, config: Rotary, width: int) -> None:
        super().__init__()
        self.config, self.width = config, width
        self.frequencies = config.scaling.frequencies(config.base, width)
        self.score_scale = config.scaling.score_scale
        self.key = (repr(config), width)  # a string: torch.compile cannot hash a config

    def prepare(self, context: Context) -> None:
        self.cached_tables(context, torch.float32)

    def cached_tables(self, context: Context, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return context.memoize(type(self), (self.key, dtype), lambda: self.tables(context.queries.positions, dtype))

    def apply_positions(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        table_q, table_k = self.cached_tables(context, dtype)
        v = self.rotate(v, table_k) if self.config.values else v
        return self.rotate(q, table_q), self.rotate(k, table_k), v

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tables for queries and keys: (2, batch or 1, 1, time, width/2), cosines and sines, computed in float64."""
        config = self.config
        angles = positions[:, None, :, None] * self.frequencies.to(positions.device)  # (batch or 1, 1, time, width/2)
        table = torch.stack((angles.cos(), angles.sin())) * config.scaling.magnitude
        if config.xpos is None:
            return table.to(dtype), table.to(dtype)
        planes = torch.arange(0, self.width, 2, dtype=torch.float64, device=positions.device) / self.width
        zeta = (planes + XPOS_GAMMA) / (1 + XPOS_GAMMA)
        decay = zeta ** (positions[:, None, :, None].double() / config.xpos)
        return (table * decay).to(dtype), (table / decay).to(dtype)

    def rotate(self, x: Tensor, table: Tensor) -> Tensor:
        """Rotate each plane: (a, b) → (a·cos − b·sin, b·cos + a·sin)."""
        if self.width == x.shape[-1] and x.stride(-1) == 1 and usable_without_grad(x):
            from allyouneed.kernels.triton.rotary import rotate as kernel

            return kernel(x, table, self.config.order == "interleaved")
        cos, sin = table
        part = x[..., : self.width].to(table.dtype)
        if self.config.order == "interleaved":
            a, b = part[..., 0::2], part[..., 1::2]
            rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = part.chunk(2, -1)
            rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        rotated = rotated.to(x.dtype)
        return rotated if self.width == x.shape[-1] else torch.cat((rotated, x[..., self.width :]), -1)
