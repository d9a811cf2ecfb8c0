"""Convolution over time.

Full, or separable into one filter per feature and a linear map of the features (Kaiser, Gomez, Chollet 2018, "Depthwise
Separable Convolutions for Neural Machine Translation", 2.1); `gated` as in Dauphin et al. 2017, "Language Modeling with
Gated Convolutional Networks", eq. 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.observe import observe
from allyouneed.nn.ops.activations import ACTIVATIONS, Activation
from allyouneed.nn.ops.unpack import window_mask
from allyouneed.nn.patterns.core import TokenFields
from allyouneed.nn.states.base import State
from allyouneed.nn.states.window import MAX_TRIM
from allyouneed.nn.sublayer import Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]


class SlidingMixer(Mixer):
    """A mixer over `size` positions around a token, or the last `size` up to it (`sees: past`)."""

    size: Size
    """Positions that the filter covers."""
    sees: Literal["around", "past"] = "around"
    """Positions around a token, or the last ones up to it (causal)."""

    @property
    def reach(self) -> tuple[int, int]:
        """Positions to the left and to the right; an even size has one more on the right (SAME padding)."""
        right = self.size // 2 if self.sees == "around" else 0
        return self.size - 1 - right, right

    def visible(self, tokens: TokenFields) -> Tensor:
        (left, right), query, key = self.reach, tokens.along(1), tokens.along(0)
        return (key.position >= query.position - left) & (key.position <= query.position + right)

    @property
    def causal(self) -> bool:
        return self.reach[1] == 0

    def leak(self) -> str | None:
        return None if self.causal else "the convolution covers later tokens; set sees: past"


class Convolution(SlidingMixer):
    """y_t = activation(Σ_j W_j x_{t+j} + b) over `size` positions around t, or the last ones up to t (`sees: past`).

    Sentences are padded with zeros. `size: 1` is a linear map and an activation. `separable`: W_j is W diag(w_j).
    `gated`: values times activation(gates) (sigmoid: Dauphin et al., eq. 1).
    """

    kind: Literal["convolution"] = "convolution"
    width: Size | None = None
    """Output features; default: the model width."""
    separable: bool = False
    """One filter per feature, then a linear map of the features."""
    gated: bool = False
    """Multiply by activation(gates) (`sigmoid`: Dauphin et al., eq. 1)."""
    activation: Activation = "identity"
    """Activation of the result, or of the gates."""
    bias: bool = True
    """Add a learned bias."""

    def outputs(self, common: Common) -> int:
        return self.width or common.width

    def sizes(self, common: Common) -> tuple[int, int]:
        """Inputs and outputs of the linear map."""
        inputs = common.width if self.separable else common.width * self.size
        return inputs, self.outputs(common) * (2 if self.gated else 1)

    def build(self, common: Common) -> SubLayer:
        return ConvolutionModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        total = common.linear.cost(*self.sizes(common), self.bias)
        if self.separable:
            total += Cost(parameters=common.width * self.size, flops=2 * common.width * self.size)
        return total + recent_cost(common.width, self.size - 1)


def recent_cost(width: int, back: int) -> Cost:
    """The cost of keeping the last `back` inputs (`RecentTokens`)."""
    return Cost(state_constant=width * (back + MAX_TRIM), trim=width * MAX_TRIM) if back else Cost()


class ConvolutionModule(SubLayer):
    traceable = unpacks = True

    def __init__(self, config: Convolution, common: Common) -> None:
        super().__init__()
        self.size, self.reach = config.size, config.reach
        self.gated, self.activation = config.gated, ACTIVATIONS[config.activation]
        # w_j as columns; not named `weight`, which inits would draw as a matrix
        self.taps = nn.Parameter(torch.empty(common.width, config.size)) if config.separable else None
        self.out = common.linear.build(*config.sizes(common), config.bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.taps is not None:
            bound = (3 / self.size) ** 0.5  # variance 1/size preserves the variance of the input
            nn.init.uniform_(self.taps, -bound, bound)

    def mixing_matrix(self, values: Mapping[str, Tensor], channels: Sequence[int]) -> Tensor | None:
        """The filters at their places, if each feature has its own."""
        if self.taps is None:
            return None
        time = values["v"].shape[1]
        offsets = torch.arange(time)[None] - torch.arange(time)[:, None] + self.reach[0]  # of key j in i's window
        inside = (offsets >= 0) & (offsets < self.size)
        found: Tensor = self.taps.detach()[list(channels)][:, offsets.clamp(0, self.size - 1)]
        return found * inside.to(found.device)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        x = x if self.taps is None else observe(self, "v", x)
        if isinstance(state, RecentTokens):
            seen = self.gather(state.append(x, context))
        elif self.size == 1:
            seen = self.gather(x)
        else:
            seen = self.over_sentences(x, context)
        seen = seen if self.taps is None else observe(self, "heads", seen)
        y: Tensor = self.out(seen)
        if not self.gated:
            return self.activation(y)
        values, gates = y.chunk(2, -1)
        return values * self.activation(gates)

    def gather(self, x: Tensor) -> Tensor:
        """(batch, time + size − 1, width) to the window of each of `time` tokens, as input of the linear map."""
        if self.taps is not None:
            taps = self.taps.to(x.dtype)[:, None]
            return nn.functional.conv1d(x.transpose(1, 2), taps, groups=len(taps)).transpose(1, 2)
        return x.unfold(1, self.size, 1).flatten(2)  # `size` positions per feature

    def prepare(self, context: Context, rows: int) -> None:
        window_mask(context, self.reach)

    def over_sentences(self, x: Tensor, context: Context) -> Tensor:
        """Whole sentences, each padded with zeros, whatever follows it in the row."""
        if (mask := window_mask(context, self.reach)) is not None:
            if self.taps is not None:
                return masked_convolution(x, self.taps.to(x.dtype), self.reach, mask)
            windows = nn.functional.pad(x, (0, 0, *self.reach)).unfold(1, self.size, 1)  # (batch, time, width, size)
            return (windows * mask[:, :, None]).flatten(2)
        padded, starts = pad_sentences(x, context, self.reach)
        seen = self.gather(padded)
        return seen if starts is None else seen.gather(1, starts.expand(-1, -1, seen.shape[2]))

    def new_state(self) -> State | None:
        if self.reach[1]:
            raise ValueError("a convolution over later tokens cannot decode; set sees: past")
        return RecentTokens(self.size - 1) if self.size > 1 else None


def masked_convolution(x: Tensor, taps: Tensor, reach: tuple[int, int], mask: Tensor) -> Tensor:
    """Σ_j w_j ⊙ x_{t+j} over the positions of each window (batch, time, size) that are not masked; taps (width,
    size)."""
    padded, y = nn.functional.pad(x, (0, 0, *reach)), torch.zeros_like(x)
    for number, tap in enumerate(taps.unbind(-1)):  # per position, so that windows are never materialised
        y = y + tap * padded[:, number : number + x.shape[1]] * mask[:, :, number, None]
    return y


def pad_sentences(x: Tensor, context: Context, reach: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    """Sentences padded with `reach` zeros on each side, (batch, length + sum of reach, width), and the start of each
    token's window (batch, time, 1); None: the window of token t starts at t."""
    layout, gap = context.queries, sum(reach)
    if layout.real is not None:
        x = x * layout.real[..., None]
    if not layout.packed:
        return nn.functional.pad(x, (0, 0, *reach)), None
    # packed sentences are spread so that no filter spans two of them
    starts, length = context.memoize(ConvolutionModule, ("starts", gap), lambda: spread_segments(layout, gap))
    padded = x.new_zeros(len(x), length, x.shape[2]).scatter(1, starts.expand_as(x), x)
    return nn.functional.pad(padded, (0, 0, *reach)), starts


def spread_segments(layout: TokenLayout, gap: int) -> tuple[Tensor, int]:
    """New index (batch, time, 1) of each token of packed rows, with a gap between segments, and the new length."""
    segments = layout.segments
    assert segments is not None
    changes = torch.zeros_like(segments)
    changes[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = torch.arange(layout.time, device=layout.device) + gap * changes.cumsum(1)
    return starts[..., None], int(starts.max()) + 1


class RecentTokens(State):
    """The most recent inputs, newest last: (batch, back + MAX_TRIM, width); zeros before the first token."""

    def __init__(self, back: int) -> None:
        self.back, self.size = back, back + MAX_TRIM
        self.tokens: Tensor | None = None
        self.lengths: Tensor | None = None  # (batch,) row lengths
        self.oldest: Tensor | None = None  # (batch,) position of the oldest stored token
        self.end = 0  # slots used by the longest row

    def append(self, x: Tensor, context: Context) -> Tensor:
        """Append x; return it preceded by the `back` inputs before it: (batch, back + time, width)."""
        layout, slots = context.queries, context.slots
        assert slots is not None
        (batch, time, width), starts = x.shape, layout.positions[:, 0].expand(len(x))
        if self.tokens is None or self.oldest is None:
            self.tokens, self.oldest = x.new_zeros(batch, self.size, width), torch.zeros_like(starts)
        both = torch.cat([self.tokens, x], 1)
        if layout.segments is None:
            self.tokens, self.lengths = both[:, time:], starts + time
        else:  # rows of unequal length
            counts = layout.segments.sum(1)
            self.tokens, self.lengths = _shift(both, counts)[:, : self.size], starts + counts
        self.oldest = self.oldest.maximum(self.lengths - self.size)
        self.end = min(slots.time, self.size)
        return both[:, MAX_TRIM:]

    def select(self, rows: Tensor) -> None:
        if self.tokens is not None and self.lengths is not None and self.oldest is not None:
            self.tokens = self.tokens.index_select(0, rows)
            self.lengths, self.oldest = self.lengths.index_select(0, rows), self.oldest.index_select(0, rows)

    def trim(self, length: int, each: Tensor | None = None) -> None:
        if self.tokens is None or self.lengths is None or self.oldest is None:
            return
        kept = self.lengths.clamp(max=length if each is None else each)
        gone = (kept < self.lengths) & (self.oldest > (kept - self.back).clamp(min=0))
        if bool(gone.any()):
            raise ValueError(f"a convolution can trim at most {MAX_TRIM} tokens")
        self.tokens, self.lengths = _shift(self.tokens, kept - self.lengths), kept
        self.end = min(self.end, length)

    @property
    def bytes(self) -> int:
        return 0 if self.tokens is None else self.tokens[:, : self.end].numel() * self.tokens.itemsize


def _shift(tokens: Tensor, by: Tensor) -> Tensor:
    """Shift each row left by `by` positions (right if negative), filling with zeros."""
    index = torch.arange(tokens.shape[1], device=tokens.device) + by[:, None]  # (batch, time)
    inside = (index >= 0) & (index < tokens.shape[1])
    return tokens.gather(1, index.where(inside, 0)[..., None].expand_as(tokens)) * inside[..., None]
