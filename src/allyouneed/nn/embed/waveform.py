"""Audio embedding of samples by convolutions (Baevski et al. 2020, "wav2vec 2.0")."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from allyouneed.errors import UserError
from allyouneed.nn.batch import Signal
from allyouneed.nn.common import Common
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.dropout import Dropout
from allyouneed.nn.embed.frames import signal_layout
from allyouneed.nn.embed.tokens import Embed, EmbedModule, Size
from allyouneed.nn.observe import observe

EPS = 1e-5


class WaveformEmbed(Embed):
    """2: convolutions with GELU over samples, the first followed by a norm of each channel over time; a layer norm and
    a projection; then a grouped convolution with GELU, whose output is added as a relative position, and a layer norm.

    With the paper's sizes (4.2), a position is 20 ms and sees 25 ms of 16 kHz.
    """

    reads: ClassVar[type] = Signal
    medium: ClassVar[Literal["text", "images", "audio"]] = "audio"

    kind: Literal["waveform"] = "waveform"
    channels: Size = 512
    """Channels of the convolutions."""
    kernels: tuple[Size, ...] = (10, 3, 3, 3, 3, 2, 2)
    """Width of each convolution."""
    strides: tuple[Size, ...] = (5, 2, 2, 2, 2, 2, 2)
    """Stride of each convolution."""
    reach: Size = 128
    """Width of the convolution of positions."""
    groups: Size = 16
    """Its groups."""

    def inputs(self) -> dict[str, bool]:
        return {"features": True}

    @property
    def step(self) -> int:
        """Samples of a position."""
        return math.prod(self.strides)

    def positions_of(self, time: Any) -> Any:
        """Positions of a number of samples: an int, or a tensor of them."""
        for kernel, stride in zip(self.kernels, self.strides, strict=True):
            time = (time - kernel) // stride + 1
        return time

    def build(self, common: Common, vocab: int | None, tokens: nn.Embedding | None = None) -> EmbedModule:
        return WaveformEmbedModule(self, common)

    def cost(self, common: Common, vocab: int | None, shared: bool = False) -> Cost:
        width, channels, total = common.width, self.channels, Cost(4 * self.channels + 3 * common.width)
        for number, kernel in enumerate(self.kernels):
            weights = kernel * channels * (channels if number else 1)
            total += Cost(weights, flops=2 * weights * math.prod(self.strides[number + 1 :]))
        positions = self.reach * width * width // self.groups
        total += Cost(positions + width * channels, flops=2 * (positions + width * channels))
        return total + Cost(width)

    def problems(self, common: Common, vocab: int | None) -> list[tuple[str, str]]:
        found = []
        if len(self.kernels) != len(self.strides):
            found.append(("strides", f"{len(self.strides)} for {len(self.kernels)} kernels; give one for each"))
        if common.width % self.groups:
            found.append(("groups", f"{self.groups} do not divide the width, {common.width}"))
        return found


class WaveformEmbedModule(EmbedModule):
    def __init__(self, config: WaveformEmbed, common: Common) -> None:
        super().__init__()
        self.config, channels, width = config, config.channels, common.width
        sizes = [1, *[channels] * (len(config.kernels) - 1)]
        self.convolutions = nn.ModuleList(
            nn.Conv1d(before, channels, kernel, stride, bias=False)
            for before, kernel, stride in zip(sizes, config.kernels, config.strides, strict=True)
        )
        self.channel_norm = nn.GroupNorm(channels, channels, eps=EPS)
        self.before = nn.LayerNorm(channels, eps=EPS)
        self.project = nn.Linear(channels, width)
        self.positions = nn.Conv1d(width, width, config.reach, padding=config.reach // 2, groups=config.groups)
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.dropout = Dropout(common.dropout)

    def layout(self, given: Signal) -> TokenLayout:
        return signal_layout(given, self.config.positions_of)

    def forward(self, given: Signal, layout: TokenLayout) -> Tensor:
        x = given.values
        if x.dim() != 3 or x.shape[1] != 1:
            raise UserError(f"audio of {'×'.join(map(str, x.shape[1:]))}; the model reads samples, 1 × time")
        if layout.time < 1:
            raise UserError(f"sound of {x.shape[-1]} samples is too short for the model's convolutions")
        for number, convolution in enumerate(self.convolutions):
            x = convolution(x)
            if number == 0:
                x = self._normalised(x, given.lengths)
            x = nn.functional.gelu(x)
        x = self.dropout(self.project(self.before(x.transpose(1, 2))))  # (batch, time, width)
        if layout.real is not None:
            x = x * layout.real[..., None]
        x = observe(self, "samples", x)
        around = self.positions(x.transpose(1, 2))[..., : layout.time]
        x = x + observe(self, "positions", nn.functional.gelu(around).transpose(1, 2))
        return observe(self, "", self.dropout(self.norm(x)))

    def _normalised(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """Each channel over the time of its sound, without the padding."""
        if lengths is None:
            found: Tensor = self.channel_norm(x)
            return found
        counts = ((lengths - self.config.kernels[0]) // self.config.strides[0] + 1)[:, None, None]
        real = torch.arange(x.shape[-1], device=x.device) < counts
        mean = (x * real).sum(-1, keepdim=True) / counts
        centred = (x - mean) * real
        scale = (centred.square().sum(-1, keepdim=True) / counts + EPS).rsqrt()
        return centred * scale * self.channel_norm.weight[:, None] + self.channel_norm.bias[:, None]
