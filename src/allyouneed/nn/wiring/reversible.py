"""Reversible residual streams: layer inputs are recomputed from outputs (Gomez et al. 2017, "The Reversible Residual
Network"; Kitaev et al. 2020, "Reformer", section 3, eq. 9).

Activations are not stored: in backward, the input of each sub-layer is recovered from its output, x1 = y1 −
Attention(x2), and the sub-layer is recomputed. Memory does not grow with depth, except for random states of dropout and
recorded decisions (`Context.decide`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, ReplayedDecisions
from allyouneed.nn.cost import Cost
from allyouneed.nn.dropout import Dropout
from allyouneed.nn.init.depth import Depth
from allyouneed.nn.wiring.residual import Wiring


class Reversible(Wiring):
    """y1 = x1 + Attention(LayerNorm(x2)), y2 = x2 + FFN(LayerNorm(y1)); a third sub-layer would update y1 again.

    Both streams start as x. The output is the norm of their `mean` or, with `concat`, the norm of both concatenated,
    twice as wide as the model, for the head (the authors' code).
    """

    kind: Literal["reversible"] = "reversible"
    join: Literal["mean", "concat"] = "mean"
    """The output is the mean of both streams, or both side by side (twice as wide)."""

    def build(self, common: Common, sublayers: int, depth: Depth) -> nn.Module:
        return ReversibleModule(common, sublayers, depth)

    def cost(self, common: Common, sublayers: int) -> Cost:
        return common.norm.cost(common.width) * sublayers

    def begin(self, x: Tensor) -> Streams:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x  # inversion must not lose bits
        return Streams(wide, wide, x.dtype, ReversiblePass())

    def outputs(self, common: Common) -> int:
        return common.width * (2 if self.join == "concat" else 1)

    def end(self, common: Common) -> nn.Module:
        return ReversibleEnd(self, common)

    def end_cost(self, common: Common) -> Cost:
        return common.norm.cost(self.outputs(common))


Half = Callable[[Tensor, bool], Tensor]  # (x, recompute) -> output of a sub-layer with its norm


@dataclass
class ReversiblePass:
    """Sub-layers run so far and the streams after them: all that backward needs."""

    halves: list[Half] = field(default_factory=list)
    last: tuple[Tensor, Tensor] | None = None  # after all sub-layers
    current: tuple[int, Tensor, Tensor] | None = None  # in backward: streams after this many sub-layers

    def input_of(self, number: int) -> Tensor:
        """Recover the input of sub-layer `number`."""
        assert self.last is not None
        if self.current is None or self.current[0] <= number:  # a new backward pass
            self.current = len(self.halves), *self.last
        while self.current[0] > number + 1:  # sub-layers without gradient
            at, x, _ = self.current
            with torch.no_grad():
                self.step_back(at - 1, self.halves[at - 1](x, True))
        return self.current[1]

    def step_back(self, number: int, output: Tensor) -> None:
        """The streams before a sub-layer, (a, b), from those after it, (b, a + f(b)), given f(b)."""
        assert self.current is not None and self.current[0] == number + 1
        _, b, c = self.current
        self.current = number, c - output.detach().to(c.dtype), b


@dataclass
class Streams:
    """(a, b); the next sub-layer gives (b, a + f(norm(b)))."""

    a: Tensor
    b: Tensor
    dtype: torch.dtype  # compute dtype of sub-layers
    history: ReversiblePass


class ReversibleModule(nn.Module):
    def __init__(self, common: Common, sublayers: int, depth: Depth) -> None:
        super().__init__()
        self.depth = depth
        self.norms = nn.ModuleList(common.norm.build(common.width) for _ in range(sublayers))
        self.dropout = Dropout(common.dropout)

    def forward(self, stream: Streams, parts: Sequence[tuple[nn.Module, Any]], context: Context) -> Streams:
        a, b, history = stream.a, stream.b, stream.history
        for (part, state), norm in zip(parts, self.norms, strict=True):
            half = self.make_half(partial(self.output, part, state, norm), context, stream.dtype)
            output = checkpoint_half(half, b, history) if torch.is_grad_enabled() else half(b, False)
            a, b = b, a + output
            history.last = a.detach(), b.detach()
        return Streams(a, b, stream.dtype, history)

    def make_half(self, output: Callable[[Tensor, Context], Tensor], context: Context, dtype: torch.dtype) -> Half:
        if not torch.is_grad_enabled():
            return lambda x, again: output(x.to(dtype), context)
        replay, random_state = ReplayedDecisions(), SavedRandomState() if self.training else None
        first = replace(context, replay=replay)
        # losses and recorded weights were collected in the first pass
        second = replace(first, record=None, losses=None if context.losses is None else [])

        def compute(x: Tensor, again: bool) -> Tensor:
            replay.next = 0 if again else None
            if random_state is None:
                return output(x.to(dtype), second if again else first)
            with random_state.restored(x.device, again):
                return output(x.to(dtype), second if again else first)

        return compute

    def output(self, part: nn.Module, state: Any, norm: nn.Module, x: Tensor, context: Context) -> Tensor:
        return self.dropout(context.call(part, context.call(norm, x), state))


class SavedRandomState:
    """The random state before a sub-layer, restored for recomputation."""

    state: tuple[Tensor, Tensor | None]

    @contextmanager
    def restored(self, device: torch.device, again: bool) -> Iterator[None]:
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


def checkpoint_half(half: Half, x: Tensor, history: ReversiblePass) -> Tensor:
    """half(x) under checkpointing: backward recovers x and recomputes."""
    number, given = len(history.halves), [x]
    history.halves.append(half)

    def compute() -> Tensor:
        if given:
            return half(given.pop(), False)
        again = history.input_of(number).detach().requires_grad_()
        output = half(again, True)
        history.step_back(number, output)
        return output

    with set_checkpoint_early_stop(False):  # recompute to the end: the output is subtracted from the stream
        output: Tensor = checkpoint(compute, use_reentrant=False, preserve_rng_state=False)
    return output


class ReversibleEnd(nn.Module):
    def __init__(self, config: Reversible, common: Common) -> None:
        super().__init__()
        self.concat = config.join == "concat"
        self.norm = common.norm.build(config.outputs(common))

    def forward(self, stream: Streams, context: Context) -> Tensor:
        joined = torch.cat((stream.a, stream.b), -1) if self.concat else (stream.a + stream.b) / 2
        return context.call(self.norm, joined.to(stream.dtype))
