"""Token mixers of MetaFormer (Yu et al. 2022, "MetaFormer Is Actually What You Need for Vision", arXiv:2111.11418): its
claim is that the block around the mixer matters more than the mixer, which may be as simple as pooling or nothing."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.errors import UserError
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.convolution import masked_convolution
from allyouneed.nn.observe import observe
from allyouneed.nn.ops.unpack import unpack_rows, window_mask
from allyouneed.nn.patterns.core import TokenFields
from allyouneed.nn.states.base import State
from allyouneed.nn.sublayer import Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]


class Identity(Mixer):
    """y = x: tokens are not mixed at all (table 5)."""

    kind: Literal["identity"] = "identity"

    def visible(self, tokens: TokenFields) -> Tensor:
        return torch.eye(len(tokens.position), dtype=torch.bool)

    def build(self, common: Common) -> SubLayer:
        return IdentityModule()

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        return Cost()


class IdentityModule(SubLayer):
    traceable = True

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        return x


class _Around(Mixer):
    """A mixer that cannot decode: it sees tokens on both sides."""

    @property
    def causal(self) -> bool:
        return False

    def leak(self) -> str | None:
        return f"{self.kind} covers later tokens"  # type: ignore[attr-defined]


class _AroundModule(SubLayer):
    def new_state(self) -> State | None:
        raise ValueError("a mixer over later tokens cannot decode")


class Pooling(_Around):
    """y = mean over the neighbours − x, where the block adds x again (eq. 4, PoolFormer). No parameters.

    Neighbours are `size` positions around a token of a text, or `size`×`size` patches around a patch of an image whose
    patches are a `grid`. Places outside do not count.
    """

    kind: Literal["pooling"] = "pooling"
    size: Size = 3
    """Side of the neighbourhood; odd."""
    grid: tuple[Size, Size] | None = None
    """Rows and columns of an image's patches; default: tokens are a line."""

    def visible(self, tokens: TokenFields) -> Tensor:
        query, key = tokens.along(1).position, tokens.along(0).position
        columns = 1 if self.grid is None else self.grid[1]
        apart = torch.stack([query // columns - key // columns, query % columns - key % columns])
        return (apart.abs() <= self.size // 2).all(0)

    def build(self, common: Common) -> SubLayer:
        return PoolingModule(self)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        return Cost(flops=common.width * (self.size if self.grid is None else self.size**2))

    def problems(self, common: Common) -> list[tuple[str, str]]:
        return [] if self.size % 2 else [("size", f"{self.size} is even; a neighbourhood has a middle")]


class PoolingModule(_AroundModule):
    unpacks = True

    def __init__(self, config: Pooling) -> None:
        super().__init__()
        self.size, self.grid = config.size, config.grid

    @property
    def traceable(self) -> bool:  # type: ignore[override]  # per instance, not per class
        return self.grid is None

    def windows(self, context: Context) -> Tensor | None:
        """Which neighbours belong to the sentence, in packed rows that stay packed; images are not packed."""
        return None if self.grid is not None else window_mask(context, (self.size // 2, self.size // 2))

    def prepare(self, context: Context, rows: int) -> None:
        self.windows(context)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        if (mask := self.windows(context)) is not None:
            x = observe(self, "v", x[:, None])[:, 0]
            sums = masked_convolution(x, x.new_ones(1, self.size), (self.size // 2, self.size // 2), mask)
            return observe(self, "heads", (sums / mask.sum(-1, keepdim=True) - x)[:, None])[:, 0]
        unpacked = unpack_rows(context)
        rows = observe(self, "v", unpacked.gather(x)[:, None])[:, 0]
        real = torch.ones_like(rows[..., :1]) if unpacked.real is None else unpacked.real[..., None].to(rows.dtype)
        sums, counts = self.around(rows * real), self.around(real)
        y = observe(self, "heads", (sums / counts.clamp(min=1) - rows)[:, None])[:, 0]
        return unpacked.scatter(y, x)

    def around(self, x: Tensor) -> Tensor:
        """Sum over each token's neighbours."""
        x, half, area = x.transpose(1, 2), self.size // 2, self.size
        if self.grid is None:
            found = nn.functional.avg_pool1d(x, self.size, 1, half)
        else:
            rows, columns = self.grid
            if x.shape[2] != rows * columns:
                raise UserError(f"pooling over a grid of {rows}×{columns} got {x.shape[2]} tokens; change `grid`")
            found, area = nn.functional.avg_pool2d(x.unflatten(2, self.grid), self.size, 1, half).flatten(2), area**2
        return found.transpose(1, 2) * area


class SpatialMLP(_Around):
    """y = W x + b along the tokens, the same map for every feature (table 5, "spatial MLP"; ResMLP: Touvron et al.
    2021). Texts may be shorter than `length`: they use the first rows and columns of W."""

    kind: Literal["spatial-mlp"] = "spatial-mlp"
    length: Size
    """Most tokens."""

    @property
    def longest(self) -> int:
        return self.length

    def build(self, common: Common) -> SubLayer:
        return SpatialMLPModule(self)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        parameters = self.length * (self.length + 1)
        return Cost(parameters=parameters, flops=2 * common.width * min(length, self.length))


class SpatialMLPModule(_AroundModule):
    def __init__(self, config: SpatialMLP) -> None:
        super().__init__()
        self.length = config.length
        self.map = nn.Parameter(torch.empty(config.length, config.length))
        self.shift = nn.Parameter(torch.empty(config.length))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.map, std=0.02)
        nn.init.zeros_(self.shift)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        unpacked = unpack_rows(context)
        rows = unpacked.gather(x)
        time = rows.shape[1]
        if time > self.length:
            raise UserError(f"a spatial MLP of length {self.length} got {time} tokens; change `length`")
        rows = observe(self, "v", rows[:, None])[:, 0]
        if unpacked.real is not None:
            rows = rows * unpacked.real[..., None]
        y = self.map[:time, :time].to(x.dtype) @ rows + self.shift[:time, None].to(x.dtype)
        y = observe(self, "heads", y[:, None])[:, 0]
        return unpacked.scatter(y, x)
