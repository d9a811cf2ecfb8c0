"""A block: up to three sub-layers (mixer, cross, channel) on one wiring."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.config import Config
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.init.depth import Depth
from allyouneed.nn.models.layer_text import MAX_LAYERS
from allyouneed.nn.positions.absolute import NoPositions, Positions
from allyouneed.nn.states.base import State
from allyouneed.nn.sublayer import Channel, Mixer, SubLayer
from allyouneed.nn.wiring.residual import ChainedModule, PostNorm, ResidualModule, Wiring
from allyouneed.nn.wiring.universal import Halt, Recurrence


class Layer(Config):
    """One entry of a stack's list: a block, `repeat` times, each with weights of its own unless they `share` them.

    `coordinates` tell each of them anew which position and which repetition it is, and `halt` ends them early, token by
    token (Dehghani et al. 2019, "Universal Transformers"): see wiring/universal.py.
    """

    repeat: Annotated[int, Field(gt=0, le=MAX_LAYERS)] = 1
    """How many times in a row."""
    share: bool = False
    """Use the same weights in all of them (ALBERT: Lan et al. 2020, 3.1)."""
    coordinates: Positions = NoPositions()
    """Positions and the number of the repetition, added before each of them (Universal Transformer); `none`: not
    added."""
    halt: Halt | None = None
    """End the repetitions early, token by token (Universal Transformer); default: never."""
    wiring: Wiring = PostNorm()
    """How norm, sub-layers and residual stream are combined."""
    mixer: Mixer | None = None
    """Token mixer: self-attention or another; default: none."""
    cross: Mixer | None = None
    """Token mixer that attends to the encoder output; default: none."""
    channel: Channel | None = None
    """Channel mixer: feed-forward or another; default: none."""

    @property
    def sublayers(self) -> dict[str, Mixer | Channel]:
        found = {"mixer": self.mixer, "cross": self.cross, "channel": self.channel}
        return {name: part for name, part in found.items() if part is not None}

    def problems(self, common: Common) -> list[tuple[str, str]]:
        """(key, what is wrong with it in this model)."""
        found = []
        if self.recurs and not isinstance(self.wiring.begin(torch.zeros(1)), Tensor):
            text = "coordinates and halt work on one stream of tokens, this one carries more between layers"
            found.append(("wiring", text))
        if self.coordinates.limit is not None:
            found.append(("coordinates", "would count positions and steps up to a limit; sinusoidal has none"))
        for slot, part in self.sublayers.items():
            if (outputs := part.outputs(common)) != common.width:
                found.append((slot, f"gives {outputs} features where the model has {common.width}"))
        return found

    @property
    def recurs(self) -> bool:
        return self.halt is not None or not isinstance(self.coordinates, NoPositions)

    def build(self, common: Common, depth: Depth) -> Block:
        return Block(self, common, depth)

    def build_recurrence(self, common: Common) -> Recurrence | None:
        """What leads through all `repeat` blocks, if not simply one follows another."""
        return Recurrence(self.coordinates, self.halt, common.width) if self.recurs else None

    def cost(self, common: Common, length: int) -> Cost:
        """The cost of all `repeat` blocks, without what the whole stack shares."""
        total = self.wiring.cost(common, len(self.sublayers))
        if self.mixer is not None:
            total += self.mixer.cost(common, length)
        if self.cross is not None:
            total += self.cross.cost(common, length, cross=True)
        if self.channel is not None:
            total += self.channel.cost(common)
        total = replace(total * self.repeat, parameters=total.parameters * (1 if self.share else self.repeat))
        total += self.coordinates.cost(common.width) * 2
        return total if self.halt is None else total + self.halt.cost(common.width, self.repeat)


class Block(nn.Module):
    def __init__(self, config: Layer, common: Common, depth: Depth) -> None:
        super().__init__()
        self.sublayers = nn.ModuleDict(
            {
                name: part.build_cross(common) if name == "cross" and isinstance(part, Mixer) else part.build(common)
                for name, part in config.sublayers.items()
            }
        )
        self.wiring = config.wiring.build(common, len(self.sublayers), depth)

    @property
    def traceable(self) -> bool:
        """Every part of it does: it can be compiled as a whole."""
        return isinstance(self.wiring, ResidualModule) and all(part.traceable for part in self.sublayers.values())

    @property
    def capturable(self) -> bool:
        """Every training step runs the same kernels for it: it can be captured as a CUDA graph."""
        parts = self.sublayers.values()
        return isinstance(self.wiring, ResidualModule) and all(part.traceable or part.capturable for part in parts)

    def prepare(self, context: Context, rows: int) -> None:
        for part in self.sublayers.values():
            part.prepare(context, rows)  # type: ignore[operator]

    def forward(self, stream: Any, context: Context, states: dict[str, State] | None = None) -> Any:
        """Mixer, cross and channel, one after another; the formulas of the wirings are in wiring/residual.py. With
        pre-norm, x is the norm of the stream, and y with dropout is added to it."""
        wiring, states = self.wiring, states or {}
        if not isinstance(wiring, ChainedModule):  # its sub-layers run in parallel, or again for their gradients
            return wiring(stream, [(part, states.get(name)) for name, part in self.sublayers.items()], context)
        norms = wiring.norm_calls(context)
        for number, (name, part) in enumerate(self.sublayers.items()):
            if context.skips == name:
                continue
            if context.memory_builder is not None:  # it may read the stream (models/retro.py)
                context.memo[Block, "stream"] = stream
            x, stream = wiring.before(stream, number, norms[number])
            y = context.call(part, x, states.get(name))
            stream = wiring.after(stream, y, number, norms[number])
        return stream

    def new_states(self, segments: bool = False) -> dict[str, State]:
        """A fresh state for each sub-layer that keeps one; `segments`: to remember whole segments, not to decode."""
        states = dict[str, State]()
        for name, part in self.sublayers.items():
            if isinstance(part, SubLayer):
                state = part.new_segment_state() if segments else part.new_state()
                if state is not None:
                    states[name] = state
        return states
