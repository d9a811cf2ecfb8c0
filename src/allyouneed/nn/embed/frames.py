"""Audio embedding by frames (Radford et al. 2022, "Robust Speech Recognition via Large-Scale Weak Supervision")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from allyouneed.errors import UserError
from allyouneed.nn.batch import Signal
from allyouneed.nn.common import Common
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.dropout import Dropout
from allyouneed.nn.embed.tokens import Embed, EmbedModule, Size
from allyouneed.nn.observe import observe
from allyouneed.nn.positions.absolute import NoPositions, Positions

REACH = 3  # kernel size of both convolutions
STRIDE = 2  # of the second convolution


class FrameEmbed(Embed):
    """2.2: log-mel frames through two convolutions of width 3 with GELU, the second with stride 2, plus positions.

    Two frames of 10 ms (see data/media/sound.py) become one token of 20 ms.
    """

    reads: ClassVar[type] = Signal
    medium: ClassVar[Literal["text", "images", "audio"]] = "audio"

    kind: Literal["frames"] = "frames"
    mels: Size = 80
    """Mel channels of a frame."""
    positions: Positions = NoPositions()
    """Positions added to the frames' vectors."""

    def inputs(self) -> dict[str, bool]:
        return {"features": True}

    @property
    def limit(self) -> int | None:
        return self.positions.limit

    @property
    def step(self) -> int:
        """Frames of a position."""
        return STRIDE

    def positions_of(self, time: Any) -> Any:
        """Positions of a number of frames: an int, or a tensor of them."""
        return (time + STRIDE - 1) // STRIDE

    def build(self, common: Common, vocab: int | None, tokens: nn.Embedding | None = None) -> EmbedModule:
        return FrameEmbedModule(self, common)

    def cost(self, common: Common, vocab: int | None, shared: bool = False) -> Cost:
        first, second = REACH * self.mels * common.width, REACH * common.width**2
        convolutions = Cost(first + second + 2 * common.width, flops=2 * (STRIDE * first + second))
        return convolutions + self.positions.cost(common.width)


class FrameEmbedModule(EmbedModule):
    def __init__(self, config: FrameEmbed, common: Common) -> None:
        super().__init__()
        self.config, self.mels, self.limit = config, config.mels, config.limit
        self.first = nn.Conv1d(config.mels, common.width, REACH, padding=1)
        self.second = nn.Conv1d(common.width, common.width, REACH, padding=1, stride=STRIDE)
        self.positions = config.positions.build(common.width)
        self.dropout = Dropout(common.dropout)

    def layout(self, given: Signal) -> TokenLayout:
        return signal_layout(given, self.config.positions_of)

    def forward(self, given: Signal, layout: TokenLayout) -> Tensor:
        frames = given.values
        if frames.dim() != 3 or frames.shape[1] != self.mels:
            actual = "×".join(map(str, frames.shape[1:]))
            raise UserError(f"audio of {actual} does not match the model's input of {self.mels} mels × frames")
        if self.limit is not None and layout.time > self.limit:
            most = self.limit * STRIDE
            raise UserError(f"audio of {frames.shape[2]} frames exceeds the model's {most} frames; split it")
        x = nn.functional.gelu(self.first(frames))
        if given.lengths is not None:  # what the second convolution sees behind the end of a sound
            x = x * (torch.arange(x.shape[-1], device=x.device) < given.lengths[:, None])[:, None]
        x = nn.functional.gelu(self.second(x)).transpose(1, 2)  # (batch, time, width)
        x, added = observe(self, "frames", x), self.positions(layout.positions)
        if added is not None:
            x = x + observe(self, "positions", added.to(x.dtype))
        return observe(self, "", self.dropout(x))


def signal_layout(given: Signal, positions_of: Callable[[Any], Any]) -> TokenLayout:
    """The layout of sounds, whose padding is behind them."""
    time = positions_of(given.values.shape[-1])
    steps = torch.arange(time, device=given.values.device)[None]
    if given.lengths is None:
        return TokenLayout(steps, start=0)
    return TokenLayout(steps, (steps < positions_of(given.lengths)[:, None]).long(), start=0)
