"""Absolute positions: vectors added to the embeddings."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.config import Part
from allyouneed.nn.cost import Cost


class Positions(Part, slot="positions"):
    """Builds a module that maps positions (batch, time) to vectors (batch, time, width), or to None to add nothing.

    A module without weights may set `per_position = True` if its vectors are costly: where the batch bounds positions,
    it is called for each position once instead of for each token.
    """

    @abstractmethod
    def build(self, width: int) -> nn.Module: ...

    def cost(self, width: int) -> Cost:
        return Cost()

    @property
    def limit(self) -> int | None:
        """Maximum sentence length; None: unlimited."""
        return None

    def problems(self, width: int) -> list[tuple[str, str]]:
        """(field, error message) for this width."""
        return []


class NoPositions(Positions):
    """No absolute positions."""

    kind: Literal["none"] = "none"

    def build(self, width: int) -> nn.Module:
        return NoPositionsModule()


class NoPositionsModule(nn.Module):
    def forward(self, positions: Tensor) -> None:
        return None


class Sinusoidal(Positions):
    """ "Attention Is All You Need", 3.5: PE(pos, 2i) = sin(pos / 10000^(2i/width)), PE(pos, 2i+1) = cos of the same.

    `order: halves` puts all sines before all cosines (tensor2tensor, Marian). The paper's wavelengths stop one step
    before 2π·base; `closed` uses exponents i/(width/2 − 1), so that the last wavelength is 2π·base (tensor2tensor,
    Whisper). `offset` is the number of the first position (fairseq: 2).
    """

    kind: Literal["sinusoidal"] = "sinusoidal"
    base: Annotated[float, Field(gt=1)] = 10000.0
    """Ratio of the longest to the shortest wavelength, about."""
    order: Literal["interleaved", "halves"] = "interleaved"
    """Sines and cosines in turn (the paper), or all sines before all cosines (tensor2tensor, Marian)."""
    closed: bool = False
    """Let the last wavelength be exactly 2π·base (tensor2tensor, Whisper)."""
    offset: Annotated[int, Field(ge=0)] = 0
    """Number of the first position (fairseq: 2)."""
    amplitude: Annotated[float, Field(gt=0)] = 1.0
    """Factor of sines and cosines, which would drown token vectors that begin smaller (in GPT-2: 0.02)."""

    def build(self, width: int) -> nn.Module:
        return SinusoidalModule(self, width)


class SinusoidalModule(nn.Module):
    """Computed on the fly: a buffer would be rounded by `model.to(bfloat16)`, which shifts far positions."""

    per_position = True

    def __init__(self, config: Sinusoidal, width: int) -> None:
        super().__init__()
        self.width, self.base, self.interleaved = width, config.base, config.order == "interleaved"
        self.offset, self.amplitude = config.offset, config.amplitude
        self.period = max(1, (width + 1) // 2 - 1) * 2 if config.closed else width

    def forward(self, positions: Tensor) -> Tensor:
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64, device=positions.device) / self.period
        # (batch, time, width/2), exact for any position
        angles = (positions + self.offset)[..., None] * self.base**-exponents
        pair = tuple((self.amplitude * wave).float() for wave in (angles.sin(), angles.cos()))
        if self.interleaved:
            return torch.stack(pair, -1).flatten(-2)[..., : self.width]
        return torch.cat(pair, -1)[..., : self.width]


class Learned(Positions):
    """A learned vector per position (Gehring et al. 2017; BERT; GPT-2); longer sentences are an error.

    `offset`: number of unused rows before the first position (2 in BART and RoBERTa).
    """

    kind: Literal["learned"] = "learned"
    length: Annotated[int, Field(gt=0)]
    """Number of positions; longer sentences are an error."""
    offset: Annotated[int, Field(ge=0)] = 0
    """Unused rows before the first position (2 in BART and RoBERTa)."""

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
    """Positions in a grid, row by row: a row vector concatenated with a column vector, each half the model width
    (Dosovitskiy et al. 2021, D.4); `join: add` sums them. `row_width` sets the width of the row vector: Reformer's
    axial positions of a text in `rows` lines of `columns` positions (Kitaev et al. 2020, the authors' code).

    `first`: number of positions before the grid (a class token) with vectors of their own.
    """

    kind: Literal["learned-2d"] = "learned-2d"
    rows: Annotated[int, Field(gt=0)]
    """Rows of the grid."""
    columns: Annotated[int, Field(gt=0)]
    """Columns of the grid."""
    first: Annotated[int, Field(ge=0)] = 0
    """Positions before the grid (a class token), with vectors of their own."""
    join: Literal["beside", "add"] = "beside"
    """Row and column vectors side by side, or added."""
    row_width: Annotated[int, Field(gt=0)] | None = None
    """Width of the row vector; default: half of the model width."""

    def widths(self, width: int) -> tuple[int, int]:
        if self.join == "add":
            return width, width
        row = width - width // 2 if self.row_width is None else self.row_width
        return row, width - row

    def problems(self, width: int) -> list[tuple[str, str]]:
        if self.row_width is None:
            return []
        if self.join == "add":
            return [("row_width", "requires join: beside; remove it")]
        return [("row_width", f"must be below the width {width}")] if self.row_width >= width else []

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
        count = self.config.first
        cell = (positions - count).clamp(min=0)
        row, column = self.rows(cell // self.config.columns), self.columns(cell % self.config.columns)
        found = row + column if self.config.join == "add" else torch.cat((row, column), -1)
        if self.first is None:
            return found
        return torch.where((positions < count)[..., None], self.first(positions.clamp(max=count - 1)), found)
