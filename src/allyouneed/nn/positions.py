"""Positions that are added to the embeddings."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.config import Part
from allyouneed.nn.cost import Cost


class Positions(Part, slot="positions"):
    """Builds a module that maps positions (batch, time) to vectors (batch, time, width), or to None: nothing added."""

    @abstractmethod
    def build(self, width: int) -> nn.Module: ...

    def cost(self, width: int) -> Cost:
        return Cost()

    @property
    def limit(self) -> int | None:
        """The longest sentence it can place; None when there is no limit."""
        return None


class NoPositions(Positions):
    kind: Literal["none"] = "none"

    def build(self, width: int) -> nn.Module:
        return NoPositionsModule()


class NoPositionsModule(nn.Module):
    def forward(self, positions: Tensor) -> None:
        return None


class Sinusoidal(Positions):
    """ "Attention Is All You Need", 3.5: PE(pos, 2i) = sin(pos / 10000^(2i/width)), PE(pos, 2i+1) = cos of the same.

    `order: halves` puts all sines before all cosines, as tensor2tensor and Marian do.
    """

    kind: Literal["sinusoidal"] = "sinusoidal"
    base: Annotated[float, Field(gt=1)] = 10000.0
    order: Literal["interleaved", "halves"] = "interleaved"

    def build(self, width: int) -> nn.Module:
        return SinusoidalModule(width, self.base, self.order == "interleaved")


class SinusoidalModule(nn.Module):
    """No buffer: `model.to(bfloat16)` would round the frequencies, and with them every far position."""

    def __init__(self, width: int, base: float, interleaved: bool) -> None:
        super().__init__()
        self.width, self.base, self.interleaved = width, base, interleaved

    def forward(self, positions: Tensor) -> Tensor:
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64, device=positions.device) / self.width
        angles = positions[..., None] * self.base**-exponents  # (batch, time, width/2), exact for any position
        pair = (angles.sin().float(), angles.cos().float())
        if self.interleaved:
            return torch.stack(pair, -1).flatten(-2)[..., : self.width]
        return torch.cat(pair, -1)[..., : self.width]


class Learned(Positions):
    """A vector per position (Gehring et al. 2017; BERT; GPT-2); sentences longer than `limit` are refused."""

    kind: Literal["learned"] = "learned"
    length: Annotated[int, Field(gt=0)]

    def build(self, width: int) -> nn.Module:
        return nn.Embedding(self.length, width)

    def cost(self, width: int) -> Cost:
        return Cost(parameters=self.length * width)

    @property
    def limit(self) -> int | None:
        return self.length
