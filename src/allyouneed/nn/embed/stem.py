"""Convolutions before the patches of an image (Xiao et al. 2021, "Early Convolutions Help Transformers See Better",
3)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from allyouneed.nn.cost import Cost

SIDE = 3  # of a kernel


class ConvolutionStem(nn.Module):
    """3×3 convolutions of stride 2, each halving the image, with a norm and GELU. The norm is over all features of an
    image (layer norm), where the paper has batch norm, so that an image's vectors do not depend on the others of its
    batch."""

    def __init__(self, channels: int, widths: Sequence[int]) -> None:
        super().__init__()
        sizes = list(zip([channels, *widths], widths, strict=False))
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, SIDE, stride=2, padding=1, bias=False) for a, b in sizes)
        self.norms = nn.ModuleList(nn.GroupNorm(1, width) for width in widths)

    def forward(self, pixels: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, last width, height / 2ⁿ, width / 2ⁿ)"""
        x = pixels
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = nn.functional.gelu(norm(convolution(x)))
        return x


def stem_cost(channels: int, widths: Sequence[int], patch: tuple[int, int]) -> Cost:
    """The cost; FLOPs per patch."""
    total = Cost()
    for number, (before, width) in enumerate(zip([channels, *widths], widths, strict=False), start=1):
        weights = SIDE * SIDE * before * width
        cells = (patch[0] >> number) * (patch[1] >> number)  # of a patch, after this convolution
        total += Cost(parameters=weights + 2 * width, flops=2 * weights * cells)
    return total
