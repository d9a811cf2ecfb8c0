"""Image embedding by patches (Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words")."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import TypeAdapter, WrapValidator
from torch import Tensor, nn

from allyouneed.errors import UserError
from allyouneed.nn.batch import Signal
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.dropout import Dropout
from allyouneed.nn.embed.stem import ConvolutionStem, stem_cost
from allyouneed.nn.embed.tokens import Embed, EmbedModule, Size
from allyouneed.nn.norms import Norm
from allyouneed.nn.observe import observe
from allyouneed.nn.positions.absolute import NoPositions, Positions

_SIDE: TypeAdapter[int] = TypeAdapter(Size)
_SIDES: TypeAdapter[tuple[int, int]] = TypeAdapter(tuple[Size, Size])


def _one_or_two(value: Any, _: Any) -> int | tuple[int, int]:
    """Validate by the type given, so that an error is reported once."""
    return _SIDES.validate_python(value) if isinstance(value, list | tuple) else _SIDE.validate_python(value)


Sides = Annotated[int | tuple[int, int], WrapValidator(_one_or_two)]  # side of a square, or [height, width]


def _sides(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


class PatchEmbed(Embed):
    """Eq. 1: z = [x_class; x¹E; …; xᴺE] + E_pos, one token per patch, row by row.

    `norm` normalises the sum (CLIP: Radford et al. 2021, 2.4), `patch_norm` the pixels of a patch and their projection
    (CRATE, the authors' code: Yu et al. 2023). `distillation_token`: a second learned token that learns from a teacher
    (DeiT: Touvron et al. 2021, 4). `stem`: convolutions that each halve the image first (Xiao et al. 2021, "Early
    Convolutions Help Transformers See Better"); a patch is of the original pixels.
    """

    reads: ClassVar[type] = Signal
    medium: ClassVar[Literal["text", "images", "audio"]] = "images"

    kind: Literal["patches"] = "patches"
    image: Sides
    """Side of the image in pixels, or [height, width]."""
    patch: Sides
    """Side of a patch in pixels, or [height, width]; it divides the image."""
    channels: Size = 3
    """Channels of a pixel; 3 for RGB."""
    class_token: bool = True
    """Put a learned token first, which the head reads."""
    distillation_token: bool = False
    """Put a second learned token after it, which learns from a teacher (DeiT)."""
    positions: Positions = NoPositions()
    """Positions added to the tokens."""
    bias: bool = True
    """Whether the projection of a patch has a bias."""
    stem: tuple[Size, ...] = ()
    """Channels of 3×3 convolutions of stride 2 before the patches; default: none."""
    norm: Norm | None = None
    """Norm of the sum of patches and positions (CLIP); default: none."""
    patch_norm: Norm | None = None
    """Norm of a patch's pixels and of their projection (CRATE); default: none."""

    def inputs(self) -> dict[str, bool]:
        return {"pixels": True}

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of the image in pixels."""
        return _sides(self.image)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        (height, width), (down, across) = _sides(self.image), _sides(self.patch)
        return height // down, width // across

    @property
    def learned(self) -> int:
        """Number of tokens before the patches."""
        return self.class_token + self.distillation_token

    @property
    def token_count(self) -> int:
        """Number of tokens per image."""
        rows, columns = self.grid
        return rows * columns + self.learned

    @property
    def pixels(self) -> int:
        """Values per patch."""
        down, across = self.cells
        return (self.stem[-1] if self.stem else self.channels) * down * across

    @property
    def cells(self) -> tuple[int, int]:
        """Height and width of a patch behind the stem."""
        down, across = _sides(self.patch)
        return down >> len(self.stem), across >> len(self.stem)

    @property
    def limit(self) -> int | None:
        return self.token_count

    def build(self, common: Common, vocab: int | None, tokens: nn.Embedding | None = None) -> EmbedModule:
        return PatchEmbedModule(self, common)

    def cost(self, common: Common, vocab: int | None, shared: bool = False) -> Cost:
        total = common.linear.cost(self.pixels, common.width, self.bias)
        total += stem_cost(self.channels, self.stem, _sides(self.patch))
        total += Cost(parameters=self.learned * common.width) + self.positions.cost(common.width)
        if self.patch_norm is not None:
            total += self.patch_norm.cost(self.pixels) + self.patch_norm.cost(common.width)
        return total if self.norm is None else total + self.norm.cost(common.width)

    def problems(self, common: Common, vocab: int | None) -> list[tuple[str, str]]:
        (height, width), (down, across) = _sides(self.image), _sides(self.patch)
        if height % down or width % across:
            return [("patch", f"image {height}×{width} is not divisible into patches of {down}×{across}")]
        if down % (halves := 1 << len(self.stem)) or across % halves:
            text = f"halves a patch {len(self.stem)} times, but {down}×{across} is not divisible by {halves}"
            return [("stem", text)]
        known = self.positions.limit
        if known is not None and known != self.token_count:
            plus = (" and the class token" if self.class_token else "") + (
                " and the distillation token" if self.distillation_token else ""
            )
            text = f"{known} positions, but the {self.token_count - self.learned} patches{plus} need {self.token_count}"
            return [("positions", text)]
        return [(f"positions.{key}", text) for key, text in self.positions.problems(common.width)]


class PatchEmbedModule(EmbedModule):
    """`project` is a convolution with stride = kernel size, computed as a matmul."""

    def __init__(self, config: PatchEmbed, common: Common) -> None:
        super().__init__()
        self.config = config
        self.stem = ConvolutionStem(config.channels, config.stem) if config.stem else None
        self.project = common.linear.build(config.pixels, common.width, config.bias)
        self.class_token = nn.Embedding(1, common.width) if config.class_token else None
        self.distillation_token = nn.Embedding(1, common.width) if config.distillation_token else None
        self.positions = config.positions.build(common.width)
        self.norm = None if config.norm is None else config.norm.build(common.width)
        around = (config.pixels, common.width) if config.patch_norm is not None else ()
        self.patch_norms = nn.ModuleList(config.patch_norm.build(width) for width in around if config.patch_norm)
        self.dropout = Dropout(common.dropout)

    def layout(self, given: Signal) -> TokenLayout:
        return TokenLayout(torch.arange(self.config.token_count, device=given.values.device)[None], start=0)

    def forward(self, given: Signal, layout: TokenLayout) -> Tensor:
        x = self.cut(given.values)
        if len(self.patch_norms):
            before, behind = self.patch_norms
            x = behind(self.project(before(x, Context(layout))), Context(layout))
        else:
            x = self.project(x)
        x = observe(self, "patches", x)
        before_all = [token for token in (self.class_token, self.distillation_token) if token is not None]
        x = torch.cat([*(token.weight.to(x.dtype).expand(len(x), 1, -1) for token in before_all), x], 1)
        added = self.positions(layout.positions)
        if added is not None:
            x = x + observe(self, "positions", added.to(x.dtype))
        if self.norm is not None:
            x = self.norm(x, Context(layout))
        return observe(self, "", self.dropout(x))

    def cut(self, pixels: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, patches, values per patch)"""
        wanted = (self.config.channels, *_sides(self.config.image))
        if pixels.dim() != 4 or pixels.shape[1:] != wanted:
            actual = "×".join(map(str, pixels.shape[1:]))
            required = "×".join(map(str, wanted))
            raise UserError(
                f"image of {actual} does not match the model's input {required} (channels × height × width); "
                "resize or crop it"
            )
        if self.stem is not None:
            pixels = self.stem(pixels)
        down, across = self.config.cells
        # (batch, channels, rows, down, columns, across)
        cut = pixels.unflatten(3, (-1, across)).unflatten(2, (-1, down))
        return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
