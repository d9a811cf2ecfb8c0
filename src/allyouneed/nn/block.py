"""A block: up to three sub-layers (mixer, cross, channel) on one wiring."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import Field
from torch import nn

from allyouneed.config import Config
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.state import State
from allyouneed.nn.sublayer import Channel, Mixer, SubLayer
from allyouneed.nn.wiring import PostNorm, Wiring


class Layer(Config):
    """One entry of a stack's list: a block, `repeat` times (each with weights of its own)."""

    repeat: Annotated[int, Field(gt=0)] = 1
    wiring: Wiring = PostNorm()
    mixer: Mixer | None = None
    cross: Mixer | None = None
    channel: Channel | None = None

    @property
    def sublayers(self) -> dict[str, Mixer | Channel]:
        found = {"mixer": self.mixer, "cross": self.cross, "channel": self.channel}
        return {name: part for name, part in found.items() if part is not None}

    def build(self, common: Common) -> Block:
        return Block(self, common)

    def cost(self, common: Common, length: int) -> Cost:
        """Of all `repeat` blocks."""
        total = self.wiring.cost(common, len(self.sublayers))
        if self.mixer is not None:
            total += self.mixer.cost(common, length)
        if self.cross is not None:
            total += self.cross.cost(common, length, cross=True)
        if self.channel is not None:
            total += self.channel.cost(common)
        return total * self.repeat


class Block(nn.Module):
    def __init__(self, config: Layer, common: Common) -> None:
        super().__init__()
        self.sublayers = nn.ModuleDict(
            {
                name: part.build_cross(common) if name == "cross" and isinstance(part, Mixer) else part.build(common)
                for name, part in config.sublayers.items()
            }
        )
        self.wiring = config.wiring.build(common, len(self.sublayers))

    def forward(self, stream: Any, context: Context, states: dict[str, State] | None = None) -> Any:
        states = states or {}
        calls = [partial(part, context=context, state=states.get(name)) for name, part in self.sublayers.items()]
        return self.wiring(stream, calls, context)

    def new_states(self) -> dict[str, State]:
        """A fresh state for each sub-layer that keeps one."""
        parts = {name: part for name, part in self.sublayers.items() if isinstance(part, SubLayer)}
        states = {name: part.new_state() for name, part in parts.items()}
        return {name: state for name, state in states.items() if state is not None}
