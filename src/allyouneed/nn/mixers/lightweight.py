"""Convolutions with softmax-normalised filters (Wu et al. 2019, "Pay Less Attention with Lightweight and Dynamic
Convolutions"): fixed filters (lightweight, 3) or filters predicted from the token (dynamic, 4). All features of a
head share a filter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.dropout import Dropout
from allyouneed.nn.mixers.convolution import RecentTokens, SlidingMixer, masked_convolution, pad_sentences, recent_cost
from allyouneed.nn.observe import observe
from allyouneed.nn.ops.banded import banded
from allyouneed.nn.ops.unpack import window_mask
from allyouneed.nn.states.base import State
from allyouneed.nn.sublayer import SubLayer

Size = Annotated[int, Field(gt=0)]


class SoftmaxConvolution(SlidingMixer):
    """out(convolution(in(x))), figure 2: `gated` doubles the input map and gates one half by the sigmoid of the other.

    `size` positions around a token, or the last ones up to it (`sees: past`); sentences are padded with zeros, which
    keep their share of the softmax. `dropout` applies to the weights (DropConnect, 3).
    """

    heads: Size
    """Number of filters; features of a head share one."""
    gated: bool = True
    """Gate the input map by a sigmoid of a second half."""
    bias: bool = True
    """Whether both linear maps have a bias."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the filter weights (DropConnect)."""

    @abstractmethod
    def filter_cost(self, common: Common) -> Cost: ...

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        width = common.width
        total = common.linear.cost(width, width * (2 if self.gated else 1), self.bias)
        total += common.linear.cost(width, width, self.bias) + self.filter_cost(common)
        return total + Cost(flops=2 * width * self.size) + recent_cost(width, self.size - 1)

    def problems(self, common: Common) -> list[tuple[str, str]]:
        if common.width % self.heads:
            return [("heads", f"width {common.width} is not divisible by {self.heads} heads")]
        return []


class LightweightConvolution(SoftmaxConvolution):
    """Section 3: y_i,c = Σ_j softmax(W_h)_j x_{i+j−⌈(k+1)/2⌉,c}, h the head of feature c."""

    kind: Literal["lightweight-convolution"] = "lightweight-convolution"

    def build(self, common: Common) -> SubLayer:
        return LightweightModule(self, common)

    def filter_cost(self, common: Common) -> Cost:
        return Cost(parameters=self.heads * self.size)


class DynamicConvolution(SoftmaxConvolution):
    """Section 4: the same with W = W^Q x_i, a filter per token."""

    kind: Literal["dynamic-convolution"] = "dynamic-convolution"

    def build(self, common: Common) -> SubLayer:
        return DynamicModule(self, common)

    def filter_cost(self, common: Common) -> Cost:
        return common.linear.cost(common.width, self.heads * self.size, False)


class SoftmaxConvolutionModule(SubLayer):
    traceable = unpacks = True

    def __init__(self, config: SoftmaxConvolution, common: Common) -> None:
        super().__init__()
        self.size, self.heads, self.reach, self.gated = config.size, config.heads, config.reach, config.gated
        self.inside = common.linear.build(common.width, common.width * (2 if config.gated else 1), config.bias)
        self.out = common.linear.build(common.width, common.width, config.bias)
        self.dropout = Dropout(config.dropout)

    def mixing_matrix(self, values: Mapping[str, Tensor], channels: Sequence[int]) -> Tensor:
        """The filters at their places. Features of a head share them."""
        v = values["v"]
        time, filters = v.shape[1], self.filters_of(v[0])  # (time, heads, size)
        offsets = torch.arange(time)[None] - torch.arange(time)[:, None] + self.reach[0]  # of key j in i's window
        inside = (offsets >= 0) & (offsets < self.size)
        at = offsets.clamp(0, self.size - 1).to(v.device)[:, None].expand(-1, filters.shape[1], -1)
        found = filters.gather(2, at).transpose(0, 1) * inside.to(v.device)  # (heads, time, time)
        return found[[channel * self.heads // v.shape[2] for channel in channels]]

    @abstractmethod
    def filters_of(self, x: Tensor) -> Tensor:
        """The filter of each token (time, width): (time, heads, size), or (1, heads, size) expanded."""

    def prepare(self, context: Context, rows: int) -> None:
        window_mask(context, self.reach)

    @abstractmethod
    def convolve_packed(self, x: Tensor, mask: Tensor) -> Tensor:
        """`mask` (batch, time, size): which positions of the window around each token belong to its sentence."""

    @abstractmethod
    def convolve(self, x: Tensor, padded: Tensor, starts: Tensor | None) -> Tensor:
        """`padded` holds the windows of all tokens; token t's starts at starts[t], or at t if `starts` is None."""

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        x = self.inside(x)
        if self.gated:
            values, gates = x.chunk(2, -1)
            x = values * gates.sigmoid()
        x = observe(self, "v", x)
        if isinstance(state, RecentTokens):
            seen = self.convolve(x, state.append(x, context), None)
        elif (mask := window_mask(context, self.reach)) is not None:
            seen = self.convolve_packed(x, mask)
        else:
            seen = self.convolve(x, *pad_sentences(x, context, self.reach))
        return self.out(observe(self, "heads", seen))

    def new_state(self) -> State | None:
        if self.reach[1]:
            raise ValueError("a convolution over later tokens cannot decode; set sees: past")
        return RecentTokens(self.size - 1) if self.size > 1 else None


class LightweightModule(SoftmaxConvolutionModule):
    def __init__(self, config: LightweightConvolution, common: Common) -> None:
        super().__init__(config, common)
        # not named `weight`: these are softmax logits, not a matrix
        self.taps = nn.Parameter(torch.empty(config.heads, config.size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.taps)

    def filters_of(self, x: Tensor) -> Tensor:
        return self.taps.softmax(-1).expand(len(x), -1, -1)

    def taps_of(self, x: Tensor) -> Tensor:
        """The filter of each feature (width, size), with dropout."""
        taps = self.dropout(self.taps.softmax(-1)).to(x.dtype)
        return taps.repeat_interleave(x.shape[2] // self.heads, 0)

    def convolve_packed(self, x: Tensor, mask: Tensor) -> Tensor:
        return masked_convolution(x, self.taps_of(x), self.reach, mask)

    def convolve(self, x: Tensor, padded: Tensor, starts: Tensor | None) -> Tensor:
        taps = self.taps_of(x)
        seen = nn.functional.conv1d(padded.transpose(1, 2), taps[:, None], groups=len(taps)).transpose(1, 2)
        return seen if starts is None else seen.gather(1, starts.expand_as(x))


class DynamicModule(SoftmaxConvolutionModule):
    def __init__(self, config: DynamicConvolution, common: Common) -> None:
        super().__init__(config, common)
        self.filters = common.linear.build(common.width, config.heads * config.size, False)

    def filters_of(self, x: Tensor) -> Tensor:
        return self.filters(x).unflatten(-1, (self.heads, self.size)).softmax(-1)

    def convolve_packed(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = self.dropout(self.filters_of(x)) * mask[:, :, None]  # (batch, time, heads, size)
        return banded(x.unflatten(-1, (self.heads, -1)), weights, self.reach[0]).flatten(2)

    def convolve(self, x: Tensor, padded: Tensor, starts: Tensor | None) -> Tensor:
        weights = self.filters_of(x)
        weights = self.dropout(weights)[..., None]  # (batch, time, heads, size, 1)
        seen = torch.zeros_like(x).unflatten(-1, (self.heads, -1))  # (batch, time, heads, width / heads)
        for offset in range(self.size):  # per offset, so that windows are never materialised
            there = padded[:, offset : offset + x.shape[1]] if starts is None else _gather(padded, starts + offset)
            seen = seen + weights[:, :, :, offset] * there.unflatten(-1, (self.heads, -1))
        return seen.flatten(2)


def _gather(padded: Tensor, starts: Tensor) -> Tensor:
    return padded.gather(1, starts.expand(-1, -1, padded.shape[2]))
