"""Convolution over time: a token mixes with its neighbours, each at its own distance, and with nobody else.

Full, or separable into one filter per feature and a linear map of the features (Kaiser, Gomez, Chollet 2018, "Depthwise
Separable Convolutions for Neural Machine Translation", 2.1); `gated` as in Dauphin et al. 2017, "Language Modeling with
Gated Convolutional Networks", eq. 1.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.channels.feedforward import ACTIVATIONS, Activation
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.states.base import State
from allyouneed.nn.states.window import MAX_TRIM
from allyouneed.nn.sublayer import Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]


class Sliding(Mixer):
    """Something that looks at `size` places around a token, or at the last ones up to it (`sees: past`)."""

    size: Size
    sees: Literal["around", "past"] = "around"

    @property
    def reach(self) -> tuple[int, int]:
        """Places seen on the left and on the right; an even size sees one more on the right (as padding SAME does)."""
        right = self.size // 2 if self.sees == "around" else 0
        return self.size - 1 - right, right

    @property
    def causal(self) -> bool:
        return self.reach[1] == 0

    def leak(self) -> str | None:
        return None if self.causal else "a convolution around a token sees those on its right: say sees: past"


class Convolution(Sliding):
    """y_t = activation(Σ_j W_j x_{t+j} + b) over the `size` places around t, or the last ones up to t (`sees: past`).

    Beyond the sentence's ends there are zeros. `size: 1` is a linear map and an activation. `separable`: W_j is
    W diag(w_j). `gated`: values times activation(gates), both made alike (with sigmoid Dauphin et al., eq. 1).
    """

    kind: Literal["convolution"] = "convolution"
    width: Size | None = None  # features that come out, as many as the model has when not given
    separable: bool = False
    gated: bool = False
    activation: Activation = "identity"
    bias: bool = True

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
        return total + Cost(state_constant=common.width * (self.size - 1 + MAX_TRIM) if self.size > 1 else 0)


class ConvolutionModule(SubLayer):
    def __init__(self, config: Convolution, common: Common) -> None:
        super().__init__()
        self.size, self.reach = config.size, config.reach
        self.gated, self.activation = config.gated, ACTIVATIONS[config.activation]
        # w_j, side by side; not called a weight, for inits draw those as matrices, and these only add `size` numbers up
        self.taps = nn.Parameter(torch.empty(common.width, config.size)) if config.separable else None
        self.out = common.linear.build(*config.sizes(common), config.bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.taps is not None:
            bound = (3 / self.size) ** 0.5  # variance 1/size: as large comes out as went in
            nn.init.uniform_(self.taps, -bound, bound)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        if isinstance(state, Recent):
            seen = self.gather(state.append(x, context))
        elif self.size == 1:
            seen = self.gather(x)
        else:
            seen = self.over_sentences(x, context)
        y: Tensor = self.out(seen)
        if not self.gated:
            return self.activation(y)
        values, gates = y.chunk(2, -1)
        return values * self.activation(gates)

    def gather(self, x: Tensor) -> Tensor:
        """(batch, time + size − 1, width) to what each of `time` tokens sees, ready for the linear map."""
        if self.taps is not None:
            taps = self.taps.to(x.dtype)[:, None]
            return nn.functional.conv1d(x.transpose(1, 2), taps, groups=len(taps)).transpose(1, 2)
        return x.unfold(1, self.size, 1).flatten(2)  # per feature, its `size` places

    def over_sentences(self, x: Tensor, context: Context) -> Tensor:
        """Whole sentences; each one ends in zeros, whatever the row holds beyond it."""
        lined, places = lined_up(x, context, self.reach)
        seen = self.gather(lined)
        return seen if places is None else seen.gather(1, places.expand(-1, -1, seen.shape[2]))

    def new_state(self) -> State | None:
        if self.reach[1]:
            raise ValueError("a convolution that sees later tokens cannot decode; say sees: past")
        return Recent(self.size - 1) if self.size > 1 else None


def lined_up(x: Tensor, context: Context, reach: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    """Sentences with `reach` zeros before and behind each, (batch, length + sum of reach, width); and the places
    (batch, time, 1) where what each token sees begins in it. None: token t's begins at t."""
    layout, gap = context.queries, sum(reach)
    if layout.real is not None:
        x = x * layout.real[..., None]
    if not layout.packed:
        return nn.functional.pad(x, (0, 0, *reach)), None
    # sentences of a packed row are moved apart, so that no filter reaches from one to the next
    places, length = context.plan(("apart", gap), lambda: apart(layout, gap))
    lined = x.new_zeros(len(x), length, x.shape[2]).scatter(1, places.expand_as(x), x)
    return nn.functional.pad(lined, (0, 0, *reach)), places


def apart(layout: TokenLayout, gap: int) -> tuple[Tensor, int]:
    """Places (batch, time, 1) of packed rows' tokens with a gap wherever the segment changes; how many there are."""
    segments = layout.segments
    assert segments is not None
    changes = torch.zeros_like(segments)
    changes[:, 1:] = segments[:, 1:] != segments[:, :-1]
    places = torch.arange(layout.time, device=layout.device) + gap * changes.cumsum(1)
    return places[..., None], int(places.max()) + 1


class Recent(State):
    """The last tokens that came in, each row's newest at the end: (batch, back + SLACK, width); zeros before them."""

    def __init__(self, back: int) -> None:
        self.back, self.size = back, back + MAX_TRIM
        self.tokens: Tensor | None = None
        self.lengths: Tensor | None = None  # (batch,) tokens of each row
        self.oldest: Tensor | None = None  # (batch,) position of the first token that is still known
        self.end = 0  # places in use in the longest row

    def append(self, x: Tensor, context: Context) -> Tensor:
        """Take in these tokens; return them with the `back` ones before them: (batch, back + time, width)."""
        layout, slots = context.queries, context.slots
        assert slots is not None
        (batch, time, width), starts = x.shape, layout.positions[:, 0].expand(len(x))
        if self.tokens is None or self.oldest is None:
            self.tokens, self.oldest = x.new_zeros(batch, self.size, width), torch.zeros_like(starts)
        both = torch.cat([self.tokens, x], 1)
        if layout.segments is None:
            self.tokens, self.lengths = both[:, time:], starts + time
        else:  # rows got unequal numbers of tokens
            counts = layout.segments.sum(1)
            self.tokens, self.lengths = _moved(both, counts)[:, : self.size], starts + counts
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
            raise ValueError(f"a convolution can take back {MAX_TRIM} tokens, not more: the others are gone")
        self.tokens, self.lengths = _moved(self.tokens, kept - self.lengths), kept
        self.end = min(self.end, length)

    @property
    def bytes(self) -> int:
        return 0 if self.tokens is None else self.tokens[:, : self.end].numel() * self.tokens.itemsize


def _moved(tokens: Tensor, by: Tensor) -> Tensor:
    """Each row moved to the left by so many places (to the right if negative), with zeros where nothing comes in."""
    places = torch.arange(tokens.shape[1], device=tokens.device) + by[:, None]  # (batch, time)
    inside = (places >= 0) & (places < tokens.shape[1])
    return tokens.gather(1, places.where(inside, 0)[..., None].expand_as(tokens)) * inside[..., None]
