"""The one way in which blocks call what they are made of: `part(x, context, state)`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from typing import ClassVar

from torch import Tensor, nn

from allyouneed.config import Part
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.states.base import State


class SubLayer(nn.Module):
    """A module between two residual additions. One that remembers while decoding says so with `new_state`.

    One that traces: `forward` has no choice in it that only the data can tell, once `prepare` has made what all layers
    share. A block of such sub-layers can be compiled as a whole (train/cuda/machine.py).
    """

    traces: bool = False

    def prepare(self, context: Context, rows: int) -> None:
        """Make what `forward` would ask `context.plan` for, before any layer runs; `rows` of them will come."""

    @abstractmethod
    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor: ...

    def new_state(self) -> State | None:
        return None

    def new_memory(self) -> State | None:
        """A state in which segments are remembered as a whole: also one that sees ahead in its own segment has it."""
        return self.new_state()


class Mixer(Part, slot="token mixer"):
    """Mixes tokens. It has one meaning and three tempos: whole, chunk after chunk, token by token give the same."""

    crosses: ClassVar[bool] = False  # can it look at an encoder's memory instead of at its own tokens?
    mixes: ClassVar[bool] = True  # can it do without an encoder?

    @property
    @abstractmethod
    def causal(self) -> bool:
        """No token depends on a later one, so it can decode."""

    def leak(self) -> str | None:
        """What in it lets later tokens in, in words, where there is more to say than that it does."""
        return None

    def outputs(self, common: Common) -> int:
        """How many features come out: those of the model, unless it stands inside another part."""
        return common.width

    @abstractmethod
    def build(self, common: Common) -> SubLayer: ...

    def build_cross(self, common: Common) -> SubLayer:
        raise TypeError(f"{type(self).__name__} cannot look at an encoder")

    @abstractmethod
    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        """For one token that has `length` tokens (of the source, for cross) to look at."""

    def shared(self, common: Common) -> dict[Hashable, Cost]:
        """What all layers of a stack that say the same here have only once (T5's table of biases), by its key."""
        return {}

    def source_flops(self, common: Common) -> float:
        """As a cross mixer: what it does once for each token of the source."""
        return 0.0

    def problems(self, common: Common) -> list[tuple[str, str]]:
        """(key, what is wrong with it in this model)."""
        return []

    def cross_problems(self, common: Common) -> list[tuple[str, str]]:
        """The same, besides, where it stands as a cross."""
        return []


class Channel(Part, slot="channel mixer"):
    """Mixes the features of one token."""

    remembers: ClassVar[bool] = False  # does it look at tokens before its own (RWKV's channel-mixing)?

    @property
    def alone(self) -> bool:
        """A token gets the same numbers whoever else is in the batch (not so where experts have a capacity)."""
        return True

    def outputs(self, common: Common) -> int:
        """As of a mixer."""
        return common.width

    @abstractmethod
    def build(self, common: Common) -> SubLayer: ...

    @abstractmethod
    def cost(self, common: Common) -> Cost: ...

    def problems(self, common: Common) -> list[tuple[str, str]]:
        return []
