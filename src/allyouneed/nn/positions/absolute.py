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

    def problems(self, width: int) -> list[tuple[str, str]]:
        """(key, what is wrong with it at this width)."""
        return []


class NoPositions(Positions):
    kind: Literal["none"] = "none"

    def build(self, width: int) -> nn.Module:
        return NoPositionsModule()


class NoPositionsModule(nn.Module):
    def forward(self, positions: Tensor) -> None:
        return None


class Sinusoidal(Positions):
    """ "Attention Is All You Need", 3.5: PE(pos, 2i) = sin(pos / 10000^(2i/width)), PE(pos, 2i+1) = cos of the same.

    `order: halves` puts all sines before all cosines, as tensor2tensor and Marian do. The paper's wavelengths stop one
    step before 2π·base; `closed` takes exponents i/(width/2 − 1), so that the last one is exactly that (tensor2tensor,
    Whisper). `offset`: the number of the first place (fairseq counts from 2).
    """

    kind: Literal["sinusoidal"] = "sinusoidal"
    base: Annotated[float, Field(gt=1)] = 10000.0
    order: Literal["interleaved", "halves"] = "interleaved"
    closed: bool = False
    offset: Annotated[int, Field(ge=0)] = 0

    def build(self, width: int) -> nn.Module:
        return SinusoidalModule(self, width)


class SinusoidalModule(nn.Module):
    """No buffer: `model.to(bfloat16)` would round the frequencies, and with them every far position."""

    def __init__(self, config: Sinusoidal, width: int) -> None:
        super().__init__()
        self.width, self.base, self.interleaved = width, config.base, config.order == "interleaved"
        self.offset = config.offset
        self.period = max(1, (width + 1) // 2 - 1) * 2 if config.closed else width

    def forward(self, positions: Tensor) -> Tensor:
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64, device=positions.device) / self.period
        # (batch, time, width/2), exact for any position
        angles = (positions + self.offset)[..., None] * self.base**-exponents
        pair = (angles.sin().float(), angles.cos().float())
        if self.interleaved:
            return torch.stack(pair, -1).flatten(-2)[..., : self.width]
        return torch.cat(pair, -1)[..., : self.width]


class Learned(Positions):
    """A vector per position (Gehring et al. 2017; BERT; GPT-2); sentences longer than `limit` are refused.

    `offset`: so many rows before the first position are never used (BART and RoBERTa have 2).
    """

    kind: Literal["learned"] = "learned"
    length: Annotated[int, Field(gt=0)]
    offset: Annotated[int, Field(ge=0)] = 0

    def build(self, width: int) -> nn.Module:
        return LearnedModule(self, width)

    def cost(self, width: int) -> Cost:
        return Cost(parameters=(self.offset + self.length) * width)

    @property
    def limit(self) -> int | None:
        return self.length


class LearnedModule(nn.Embedding):
    def __init__(self, config: Learned, width: int) -> None:
        super().__init__(config.offset + config.length, width)
        self.offset = config.offset

    def forward(self, positions: Tensor) -> Tensor:
        return super().forward(positions + self.offset if self.offset else positions)


class Learned2D(Positions):
    """Places in a grid, row by row: a vector of its row beside one of its column (Dosovitskiy et al. 2021, D.4), each
    half as wide as the model; `join: add` takes their sum. With a `row_width`, the vector of the row has so many
    features and that of the column the rest: Reformer's axial positions of a text cut into `rows` lines of `columns`
    places (Kitaev et al. 2020, the authors' code).

    `first`: so many places before the grid (a class token) have vectors of their own.
    """

    kind: Literal["learned-2d"] = "learned-2d"
    rows: Annotated[int, Field(gt=0)]
    columns: Annotated[int, Field(gt=0)]
    first: Annotated[int, Field(ge=0)] = 0
    join: Literal["beside", "add"] = "beside"
    row_width: Annotated[int, Field(gt=0)] | None = None

    def widths(self, width: int) -> tuple[int, int]:
        if self.join == "add":
            return width, width
        row = width - width // 2 if self.row_width is None else self.row_width
        return row, width - row

    def problems(self, width: int) -> list[tuple[str, str]]:
        if self.row_width is None:
            return []
        if self.join == "add":
            return [("row_width", "vectors that are added are as wide as the model; leave it out")]
        return [("row_width", f"leaves nothing of {width} for the column")] if self.row_width >= width else []

    def build(self, width: int) -> nn.Module:
        return Learned2DModule(self, width)

    def cost(self, width: int) -> Cost:
        row, column = self.widths(width)
        return Cost(parameters=self.first * width + self.rows * row + self.columns * column)

    @property
    def limit(self) -> int | None:
        return self.first + self.rows * self.columns


class Learned2DModule(nn.Module):
    def __init__(self, config: Learned2D, width: int) -> None:
        super().__init__()
        row, column = config.widths(width)
        self.config = config
        self.rows, self.columns = nn.Embedding(config.rows, row), nn.Embedding(config.columns, column)
        self.first = nn.Embedding(config.first, width) if config.first else None

    def forward(self, positions: Tensor) -> Tensor:
        ahead = self.config.first
        cell = (positions - ahead).clamp(min=0)
        row, column = self.rows(cell // self.config.columns), self.columns(cell % self.config.columns)
        found = row + column if self.config.join == "add" else torch.cat((row, column), -1)
        if self.first is None:
            return found
        return torch.where((positions < ahead)[..., None], self.first(positions.clamp(max=ahead - 1)), found)
