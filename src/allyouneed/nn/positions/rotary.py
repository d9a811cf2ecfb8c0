"""Rotary positions: queries and keys are turned by their places, so that their product knows only the distance."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.kernels import at_once
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.positions.relative import Heads, Relative, RelativeModule
from allyouneed.nn.positions.rotary_scaling import NoScaling, Scaling

XPOS_GAMMA = 0.4  # Sun et al. 2022, 3.2


class Rotary(Relative):
    """RoPE (Su et al. 2021, eq. 34): in plane i, a token at place m is turned by the angle m·base^(−2i/width).

    `order: interleaved` pairs features 2i and 2i+1 (the paper; GPT-J), `halves` pairs i and i + width/2 (GPT-NeoX,
    Llama). `fraction` of each head's features is turned, the first ones (GPT-NeoX, Phi). `values` turns these too
    (RoFormer's `rotary_value`). `xpos` (Sun et al. 2022, algorithm 1) lets far keys fade, the more the faster a plane
    turns: queries are multiplied by ζ_i^(m/xpos), keys by ζ_i^(−m/xpos), with ζ_i = (2i/width + 0.4) / 1.4; the paper
    takes 512.
    """

    bilinear: ClassVar[bool] = True

    kind: Literal["rotary"] = "rotary"
    base: Annotated[float, Field(gt=1)] = 10000.0
    order: Literal["halves", "interleaved"] = "halves"
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    scaling: Scaling = NoScaling()
    values: bool = False
    xpos: Annotated[float, Field(gt=0)] | None = None

    def width(self, heads: Heads) -> int:
        """Features of a head that are turned."""
        return int(heads.head_width * self.fraction)

    def build(self, heads: Heads, common: Common) -> RelativeModule:
        return RotaryModule(self, self.width(heads))

    def problems(self, heads: Heads, common: Common) -> list[tuple[str, str]]:
        found, width = [], self.width(heads)
        if width % 2 or not width:
            text = f"{width} of a head's {heads.head_width} features would turn; pairs need an even number"
            found.append(("fraction", text))
        if self.xpos is not None and not heads.causal:
            found.append(("xpos", "makes keys behind the query fade and those ahead grow: only for a causal pattern"))
        return found + [(f"scaling.{key}", text) for key, text in self.scaling.problems(width)]


class RotaryModule(RelativeModule):
    """The frequencies are no buffer: `model.to(bfloat16)` would round them, and with them move every far position."""

    def __init__(self, config: Rotary, width: int) -> None:
        super().__init__()
        self.config, self.width = config, width
        self.frequencies = config.scaling.frequencies(config.base, width)
        self.sharpness = config.scaling.sharpness
        self.key = ("rotary", repr(config), width)  # in words: a config cannot be looked up inside a compiled block

    def prepare(self, context: Context) -> None:
        self.turns(context, torch.float32)

    def turns(self, context: Context, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return context.plan((*self.key, dtype), lambda: self.tables(context.queries.positions, dtype))

    def turn(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        turn_q, turn_k = self.turns(context, dtype)
        v = self.turned(v, turn_k) if self.config.values else v
        return self.turned(q, turn_q), self.turned(k, turn_k), v

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """For queries and for keys: (2, batch or 1, 1, time, width/2), cosines and sines; far angles need 64 bits."""
        config = self.config
        angles = positions[:, None, :, None] * self.frequencies.to(positions.device)  # (batch or 1, 1, time, width/2)
        table = torch.stack((angles.cos(), angles.sin())) * config.scaling.magnitude
        if config.xpos is None:
            return table.to(dtype), table.to(dtype)
        planes = torch.arange(0, self.width, 2, dtype=torch.float64, device=positions.device) / self.width
        zeta = (planes + XPOS_GAMMA) / (1 + XPOS_GAMMA)
        fading = zeta ** (positions[:, None, :, None].double() / config.xpos)
        return (table * fading).to(dtype), (table / fading).to(dtype)

    def turned(self, x: Tensor, table: Tensor) -> Tensor:
        """(a, b) of each plane becomes (a·cos − b·sin, b·cos + a·sin)."""
        if self.width == x.shape[-1] and x.stride(-1) == 1 and at_once(x):
            from allyouneed.kernels.triton.rotary import turned as kernel

            return kernel(x, table, self.config.order == "interleaved")
        cos, sin = table
        part = x[..., : self.width].to(table.dtype)
        if self.config.order == "interleaved":
            a, b = part[..., 0::2], part[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = part.chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        turned = turned.to(x.dtype)
        return turned if self.width == x.shape[-1] else torch.cat((turned, x[..., self.width :]), -1)
