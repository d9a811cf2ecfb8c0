"""Recurrence in depth: one layer, step after step, that knows where and when it is and may stop early, token by token.

Dehghani et al. 2019, "Universal Transformers", section 2 and appendix C.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.config import Part
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.positions.absolute import Positions

Step = Callable[[Tensor], Tensor]  # (batch, time, width) to the same
Locate = Callable[[Tensor, int], Tensor]  # adds what tells this step, by its number, from the others


class Halt(Part, slot="halting"):
    """Decides for each token after how many steps it has been thought about enough."""

    @abstractmethod
    def build(self, width: int) -> Halting: ...

    @abstractmethod
    def cost(self, width: int, steps: int) -> Cost: ...


class Halting(nn.Module):
    @abstractmethod
    def forward(self, x: Tensor, locate: Locate, steps: Sequence[Step], context: Context, whole: bool) -> Tensor:
        """`whole`: all steps are taken, needed or not (decoding: the tokens to come will look at each of them)."""


class Recurrence(nn.Module):
    """All `steps` of one layer. Before each one the token learns its position and the step's number (eq. 4-5)."""

    def __init__(self, coordinates: Positions, halt: Halt | None, width: int) -> None:
        super().__init__()
        self.place, self.moment = coordinates.build(width), coordinates.build(width)
        self.halting = None if halt is None else halt.build(width)

    def forward(self, x: Tensor, steps: Sequence[Step], context: Context, whole: bool) -> Tensor:
        place: Tensor | None = self.place(context.queries.positions)  # (batch or 1, time, width)

        def locate(x: Tensor, step: int) -> Tensor:
            if place is None:
                return x
            moment: Tensor = self.moment(torch.full((1, 1), step, device=x.device))
            return x + (place + moment).to(x.dtype)

        if self.halting is not None:
            result: Tensor = self.halting(x, locate, steps, context, whole)
            return result
        for number, step in enumerate(steps):
            x = step(locate(x, number))
        return x


class ACT(Halt):
    """Adaptive computation time (Graves 2016, eq. 5-9) for each token (Dehghani et al. 2019, appendix C).

    At each step a token halts with probability p, read off its state; once all its p together exceed `threshold` it has
    halted, and what was missing to 1 before, the remainder, is the weight of that step. Tokens that have halted are
    still transformed, for others look at them; only their result stays. `ponder` weighs what is added to the loss: the
    mean number of steps plus remainder (Graves, eq. 13). `bias`: p begins at about its sigmoid.

    `result: blend` is what the authors compute, weight · state + (1 − weight) · result so far, from zero; `sum` is
    Graves' weighted sum, which the last step completes.
    """

    kind: Literal["act"] = "act"
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.99
    ponder: Annotated[float, Field(ge=0)] = 0.01
    bias: float = 1.0
    result: Literal["blend", "sum"] = "blend"

    def build(self, width: int) -> Halting:
        return ACTModule(self, width)

    def cost(self, width: int, steps: int) -> Cost:
        return Cost(parameters=width + 1, flops=2 * width * steps)


class ACTModule(Halting):
    def __init__(self, config: ACT, width: int) -> None:
        super().__init__()
        self.config = config
        self.unit = nn.Linear(width, 1, bias=False)
        self.bias = nn.Parameter(torch.full((1,), config.bias))  # apart, for an init would set a map's bias to zero

    def reset_parameters(self) -> None:
        nn.init.constant_(self.bias, self.config.bias)

    def forward(self, x: Tensor, locate: Locate, steps: Sequence[Step], context: Context, whole: bool) -> Tensor:
        exact, real = torch.promote_types(x.dtype, torch.float32), context.queries.real
        spent = torch.zeros(x.shape[:2], dtype=exact, device=x.device)  # all p so far
        running = torch.ones_like(spent, dtype=torch.bool) if real is None else real  # nobody waits for padding
        pondered, result = torch.zeros_like(spent), torch.zeros_like(x)
        for number, step in enumerate(steps):
            x = locate(x, number)
            p = (self.unit(x).squeeze(-1) + self.bias).to(exact).sigmoid()  # (batch, time)
            halts = running & (spent + p > self.config.threshold)
            if self.config.result == "sum" and number == len(steps) - 1:
                halts = running
            remainder = 1 - spent
            weight = torch.where(halts, remainder, p) * running
            pondered = pondered + running + remainder * halts
            running = running & ~halts
            spent = spent + p * running
            x = step(x)
            added = weight[..., None].to(x.dtype) * (x if self.config.result == "sum" else x - result)
            result = result + added
            if not whole and not running.any():  # further steps would weigh nothing
                break
        if self.training and context.losses is not None and self.config.ponder:
            count = pondered.numel() if real is None else real.sum().clamp(min=1)
            context.losses.append(self.config.ponder * pondered.sum() / count)
        return result
