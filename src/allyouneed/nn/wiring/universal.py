"""Recurrence in depth: one layer applied repeatedly, with position and step embeddings and optional per-token halting.

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

Step = Callable[[Tensor], Tensor]  # (batch, time, width) -> (batch, time, width)
Locate = Callable[[Tensor, int], Tensor]  # adds position and step embeddings


class Halt(Part, slot="halting"):
    """Decides per token after how many steps to stop."""

    def leak(self) -> str | None:
        """Why it looks at later tokens, so that it cannot be part of a decoder; None where it does not."""
        return None

    @abstractmethod
    def build(self, width: int) -> Halting: ...

    @abstractmethod
    def cost(self, width: int, steps: int) -> Cost: ...


class Halting(nn.Module):
    @abstractmethod
    def forward(self, x: Tensor, locate: Locate, steps: Sequence[Step], context: Context, whole: bool) -> Tensor:
        """`whole`: run all steps (needed for decoding, where later tokens attend to each of them)."""


class Recurrence(nn.Module):
    """All steps of one layer; position and step embeddings are added before each (eq. 4-5)."""

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
            return self.halting(x, locate, steps, context, whole)
        for number, step in enumerate(steps):
            x = step(locate(x, number))
        return x


class ACT(Halt):
    """Adaptive computation time (Graves 2016, eq. 5-9) per token (Dehghani et al. 2019, appendix C).

    At each step a token halts with probability p, computed from its state; once its accumulated p exceeds `threshold`
    it has halted, and the remainder to 1 is the weight of that step. Halted tokens are still transformed, since others
    attend to them; only their result is fixed. `ponder` weighs the auxiliary loss: mean number of steps plus remainder
    (Graves, eq. 13). `bias`: initial logit of p, approximately.

    `result: blend` is the authors' code, weight · state + (1 − weight) · result so far, from zero; `sum` is Graves'
    weighted sum, completed by the last step. `per: text` halts all tokens of a text at once, by the mean of their p
    (the authors' `act_type: global`); it is not for decoders.
    """

    kind: Literal["act"] = "act"
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """Accumulated halting probability at which a token halts."""
    ponder: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the auxiliary loss: mean number of steps plus remainder (Graves, eq. 13)."""
    bias: float = 1.0
    """Initial logit of the halting probability, approximately."""
    result: Literal["blend", "sum"] = "blend"
    """`blend`: as in the authors' code; `sum`: Graves' weighted sum."""
    per: Literal["token", "text"] = "token"
    """Whether each token halts separately, or all tokens of a text at once (`act_type: global` of the authors'
    code)."""

    def leak(self) -> str | None:
        return "it halts by the mean of all tokens of a text; set per: token" if self.per == "text" else None

    def build(self, width: int) -> Halting:
        return ACTModule(self, width)

    def cost(self, width: int, steps: int) -> Cost:
        return Cost(parameters=width + 1, flops=2 * width * steps)


class ACTModule(Halting):
    def __init__(self, config: ACT, width: int) -> None:
        super().__init__()
        self.config = config
        self.unit = nn.Linear(width, 1, bias=False)
        self.bias = nn.Parameter(torch.full((1,), config.bias))  # separate, because inits zero the bias of a linear map

    def reset_parameters(self) -> None:
        nn.init.constant_(self.bias, self.config.bias)

    def forward(self, x: Tensor, locate: Locate, steps: Sequence[Step], context: Context, whole: bool) -> Tensor:
        exact, real = torch.promote_types(x.dtype, torch.float32), context.queries.real
        spent = torch.zeros(x.shape[:2], dtype=exact, device=x.device)  # accumulated p
        running = torch.ones_like(spent, dtype=torch.bool) if real is None else real  # padding never runs
        pondered, result = torch.zeros_like(spent), torch.zeros_like(x)
        for number, step in enumerate(steps):
            x = locate(x, number)
            p = (self.unit(x).squeeze(-1) + self.bias).to(exact).sigmoid()  # (batch, time)
            p = p if self.config.per == "token" else mean_of_text(p, context)
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
            if not whole and not running.any():  # further steps have weight 0
                break
        if self.training and context.losses is not None and self.config.ponder:
            count = pondered.numel() if real is None else real.sum().clamp(min=1)
            context.losses.append(self.config.ponder * pondered.sum() / count)
        return result


def mean_of_text(p: Tensor, context: Context) -> Tensor:
    """(batch, time): for every token, the mean over the tokens of its text; padding counts as a text of its own."""
    segments = context.queries.segments
    if segments is None:
        return p.mean(1, keepdim=True).expand_as(p)
    zeros = p.new_zeros(len(p), int(segments.max()) + 1)
    segments = segments.expand_as(p)
    sums, counts = (zeros.scatter_add(1, segments, part) for part in (p, torch.ones_like(p)))
    return (sums / counts.clamp(min=1)).gather(1, segments)
