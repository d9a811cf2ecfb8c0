"""Two streams, each changed by what the other says, so that every layer's input can be computed from its output (Gomez
et al. 2017, "The Reversible Residual Network"; Kitaev et al. 2020, "Reformer", section 3, eq. 9).

Gradients need what layers had inside. It is not kept: on the way back each sub-layer's input is taken back from its
output, x1 = y1 − Attention(x2), and the sub-layer is computed once more. Memory does not grow with depth, but for the
random state that dropout begins with and the choices that layers made (`Context.decide`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, Replay
from allyouneed.nn.cost import Cost
from allyouneed.nn.dropout import Dropout
from allyouneed.nn.wiring.residual import Call, Depth, Wiring


class Reversible(Wiring):
    """y1 = x1 + Attention(LayerNorm(x2)), y2 = x2 + FFN(LayerNorm(y1)); a third sub-layer would change y1 again.

    Both streams begin as x. They end as the norm of their `mean`, or, `concat`, as the norm of both side by side, twice
    as wide as the model, for the head to read (the authors' code).
    """

    kind: Literal["reversible"] = "reversible"
    join: Literal["mean", "concat"] = "mean"

    def build(self, common: Common, sublayers: int, depth: Depth) -> nn.Module:
        return ReversibleModule(common, sublayers, depth)

    def cost(self, common: Common, sublayers: int) -> Cost:
        return common.norm.cost(common.width) * sublayers

    def begin(self, x: Tensor) -> Streams:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x  # going back must not lose bits
        return Streams(wide, wide, x.dtype, Way())

    def outputs(self, common: Common) -> int:
        return common.width * (2 if self.join == "concat" else 1)

    def end(self, common: Common) -> nn.Module:
        return ReversibleEnd(self, common)

    def end_cost(self, common: Common) -> Cost:
        return common.norm.cost(self.outputs(common))


Half = Callable[[Tensor, bool], Tensor]  # a sub-layer with its norm; whether it is computed once more


@dataclass
class Way:
    """The sub-layers passed so far, and the streams behind them: all that is needed to go back."""

    halves: list[Half] = field(default_factory=list)
    last: tuple[Tensor, Tensor] | None = None  # behind all sub-layers
    here: tuple[int, Tensor, Tensor] | None = None  # behind so many, on the way back

    def input_of(self, number: int) -> Tensor:
        """What sub-layer `number` was given."""
        assert self.last is not None
        if self.here is None or self.here[0] <= number:  # another backward pass begins
            self.here = len(self.halves), *self.last
        while self.here[0] > number + 1:  # sub-layers that needed no gradient, or nobody asked for it
            at, x, _ = self.here
            with torch.no_grad():
                self.step_back(at - 1, self.halves[at - 1](x, True))
        return self.here[1]

    def step_back(self, number: int, said: Tensor) -> None:
        """From behind a sub-layer, (b, a + f(b)), to before it, (a, b), given f(b)."""
        assert self.here is not None and self.here[0] == number + 1
        _, b, c = self.here
        self.here = number, c - said.detach().to(c.dtype), b


@dataclass
class Streams:
    """(a, b), of which the next sub-layer makes (b, a + f(norm(b)))."""

    a: Tensor
    b: Tensor
    dtype: torch.dtype  # in which sub-layers compute
    way: Way


class ReversibleModule(nn.Module):
    def __init__(self, common: Common, sublayers: int, depth: Depth) -> None:
        super().__init__()
        self.depth = depth
        self.norms = nn.ModuleList(common.norm.build(common.width) for _ in range(sublayers))
        self.dropout = Dropout(common.dropout)

    def forward(self, stream: Streams, calls: Sequence[Call], context: Context) -> Streams:
        a, b, way = stream.a, stream.b, stream.way
        for call, norm in zip(calls, self.norms, strict=True):
            half = self.computing(call, norm, context, stream.dtype)
            said = passed(half, b, way) if torch.is_grad_enabled() else half(b, False)
            a, b = b, a + said
            way.last = a.detach(), b.detach()
        return Streams(a, b, stream.dtype, way)

    def computing(self, call: Any, norm: nn.Module, context: Context, dtype: torch.dtype) -> Half:
        if not torch.is_grad_enabled():
            return lambda x, again: self.said(call, norm, x.to(dtype), context)
        replay, dice = Replay(), Dice() if self.training else None
        first = replace(context, replay=replay)
        # what it adds to the loss, it has added; who wanted to see its weights, has seen them
        second = replace(first, record=None, losses=None if context.losses is None else [])

        def compute(x: Tensor, again: bool) -> Tensor:
            replay.again = 0 if again else None
            if dice is None:
                return self.said(call, norm, x.to(dtype), second if again else first)
            with dice.thrown(x.device, again):
                return self.said(call, norm, x.to(dtype), second if again else first)

        return compute

    def said(self, call: Any, norm: nn.Module, x: Tensor, context: Context) -> Tensor:
        given = {"context": context} if "context" in getattr(call, "keywords", {}) else {}
        y: Tensor = self.dropout(call(context.call(norm, x), **given))
        return y


class Dice:
    """The random state a sub-layer began with, to begin with once more."""

    state: tuple[Tensor, Tensor | None]

    @contextmanager
    def thrown(self, device: torch.device, again: bool) -> Iterator[None]:
        cuda = device.type == "cuda"
        if not again:
            self.state = torch.get_rng_state(), torch.cuda.get_rng_state(device) if cuda else None
            yield
            return
        with torch.random.fork_rng([device] if cuda else []):
            torch.set_rng_state(self.state[0])
            if self.state[1] is not None:
                torch.cuda.set_rng_state(self.state[1], device)
            yield


def passed(half: Half, x: Tensor, way: Way) -> Tensor:
    """half(x), of which autograd keeps nothing but the way back to x."""
    number, given = len(way.halves), [x]
    way.halves.append(half)

    def compute() -> Tensor:
        if given:
            return half(given.pop(), False)
        again = way.input_of(number).detach().requires_grad_()
        said = half(again, True)
        way.step_back(number, said)
        return said

    with set_checkpoint_early_stop(False):  # it must be computed to its end, for what it said is to be taken away
        said: Tensor = checkpoint(compute, use_reentrant=False, preserve_rng_state=False)
    return said


class ReversibleEnd(nn.Module):
    def __init__(self, config: Reversible, common: Common) -> None:
        super().__init__()
        self.concat = config.join == "concat"
        self.norm = common.norm.build(config.outputs(common))

    def forward(self, stream: Streams, context: Context) -> Tensor:
        joined = torch.cat((stream.a, stream.b), -1) if self.concat else (stream.a + stream.b) / 2
        normal: Tensor = context.call(self.norm, joined.to(stream.dtype))
        return normal
