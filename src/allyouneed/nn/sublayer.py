"""Interfaces of token and channel mixers, and the call convention of their modules: `part(x, context, state)`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from allyouneed.config import Part
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.patterns.core import Pattern, TokenFields
from allyouneed.nn.states.base import State


class SubLayer(nn.Module):
    """A module between two residual additions. If it needs a decoding state, it implements `new_state`.

    `traceable`: `forward` has no data-dependent control flow after `prepare` has filled `context.memo`. A block of such
    sub-layers is compiled as a whole (training/backend.py). `unpacks`: it reads sentences one after another
    (`unpack_rows(context, restarts=True)`, ops/unpack.py). On a GPU packed rows stay as they are; elsewhere they are
    unpacked to one sentence per row, whose shapes differ from batch to batch, so that such batches run eagerly.
    `capturable`: not traceable, but in training on a GPU it runs the same kernels for all batches of one shape.
    `position_limit`: the positions for which it has weights, which a captured step cannot check; None: any number.
    `calls_maps`: it calls its linear maps, so that another class may compute them in training.
    """

    traceable: bool = False
    capturable: bool = False
    unpacks: bool = False
    calls_maps: bool = True
    position_limit: int | None = None

    def prepare(self, context: Context, rows: int) -> None:
        """Fill `context.memo` for a batch of `rows` rows before the first layer runs."""

    @abstractmethod
    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor: ...

    def mixing_matrix(self, values: Mapping[str, Tensor], channels: Sequence[int]) -> Tensor | None:
        """M of `heads = M v` for some channels, (channels, queries, keys), from the values it offered (`values["v"]`:
        one sentence, (1, time, channels)). Only for mixers whose M differs from channel to channel; for others it is
        measured (apps/inspect/inside/mixing.py)."""
        return None

    def half_life(self, x: Tensor) -> Tensor | None:
        """Tokens after which a token counts half, for each head or channel; None where nothing decays. `x`: its
        input."""
        return None

    def new_state(self) -> State | None:
        return None

    def new_segment_state(self) -> State | None:
        """State for segment recurrence, where tokens may attend to later ones in their segment."""
        return self.new_state()


class Mixer(Part, slot="token mixer"):
    """Token mixer. Whole sequences, chunks and single tokens give the same results."""

    supports_cross: ClassVar[bool] = False  # usable as cross-attention to an encoder
    supports_self: ClassVar[bool] = True  # usable without an encoder

    @property
    def causal(self) -> bool:
        """No token depends on a later one, so it can decode. A mixer that reads later tokens overrides it."""
        return True

    def leak(self) -> str | None:
        """What makes it attend to later tokens, if known."""
        return None

    def visible(self, tokens: TokenFields) -> Tensor:
        """Which tokens of a text each token can read in one layer: (time, time) bool, a row for each that reads.
        `tokens`: those of the text, (time). A mixer that reads less than all earlier tokens, or all, overrides it."""
        every = torch.ones(len(tokens.position), len(tokens.position), dtype=torch.bool)
        return every.tril() if self.causal else every

    @property
    def longest(self) -> int | None:
        """Tokens of the longest text that it has weights for; None: any number."""
        return None

    def outputs(self, common: Common) -> int:
        """Output features: the model width, except inside other parts."""
        return common.width

    @abstractmethod
    def build(self, common: Common) -> SubLayer: ...

    def build_cross(self, common: Common) -> SubLayer:
        raise TypeError(f"{type(self).__name__} does not support cross-attention")

    @abstractmethod
    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        """Cost per token with `length` tokens to attend to (of the source, if `cross`)."""

    def shared(self, common: Common) -> dict[Hashable, Cost]:
        """Cost shared by all layers of a stack with equal keys (T5's bias table), by key."""
        return {}

    def source_flops(self, common: Common) -> float:
        """FLOPs per source token, as a cross mixer."""
        return 0.0

    def problems(self, common: Common) -> list[tuple[str, str]]:
        """(field, error message) in this model."""
        return []

    def cross_problems(self, common: Common) -> list[tuple[str, str]]:
        """Further problems when used as a cross."""
        return []


class HasPattern(Protocol):
    @property
    def pattern(self) -> Pattern: ...


class AttendsByPattern:
    """A mixer with a field `pattern`, which decides whether it can decode and why it attends to later tokens."""

    @property
    def causal(self: HasPattern) -> bool:
        return self.pattern.decodes

    def leak(self: HasPattern) -> str | None:
        return self.pattern.leak()

    def visible(self: HasPattern, tokens: TokenFields) -> Tensor:
        return self.pattern.allowed(tokens.along(1), tokens.along(0)).expand(len(tokens.position), -1)


class Channel(Part, slot="channel mixer"):
    """Channel mixer: mixes the features of each token."""

    stateful: ClassVar[bool] = False  # reads earlier tokens (RWKV's channel-mixing)

    @property
    def batch_independent(self) -> bool:
        """Results are independent of the rest of the batch (not so for experts with a capacity)."""
        return True

    def visible(self, tokens: TokenFields) -> Tensor:
        """Which tokens each token reads, as for a mixer: itself, unless a part says otherwise."""
        return torch.eye(len(tokens.position), dtype=torch.bool)

    def leak(self) -> str | None:
        """Why it looks at later tokens, so that it cannot be part of a decoder; None where it does not."""
        return None

    def outputs(self, common: Common) -> int:
        """Output features, as for a mixer."""
        return common.width

    @abstractmethod
    def build(self, common: Common) -> SubLayer: ...

    @abstractmethod
    def cost(self, common: Common) -> Cost: ...

    def problems(self, common: Common) -> list[tuple[str, str]]:
        return []


def through(later: Tensor, earlier: Tensor) -> Tensor:
    """What is visible through two parts one after another, (time, time) or, for one token, (time)."""
    return (later.float() @ earlier.float()) > 0
