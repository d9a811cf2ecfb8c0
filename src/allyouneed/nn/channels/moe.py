"""Mixture of experts: many channel mixers, of which each token uses a few.

An expert is whatever fills the channel slot, built through `expert.build`, so every linear map, bias and dropout in it
is as exchangeable as outside. Tokens are sorted by expert and each expert is called once, with those that chose it:
work grows with the experts in use, not with those there are.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.config import Config
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.states.base import State
from allyouneed.nn.sublayer import Channel, SubLayer

Count = Annotated[int, Field(gt=0)]
Weight = Annotated[float, Field(ge=0)]


class Groups(Config):
    """Choose groups first and experts only within them (DeepSeek-AI 2024, "DeepSeek-V2", 2.2.2).

    A group is as good as its best expert (V2), or as its two best together (V3, 2.1.2).
    """

    count: Count
    top: Count
    score: Literal["best", "two-best"] = "best"


class Router(Config):
    """How a token chooses. A plain linear map in at least single precision, whatever the rest of the model is made of
    (Fedus et al. 2022, 2.4: selective precision), for a rounding error here sends the token elsewhere."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = False  # the chosen scores are made to sum to 1 (Jiang et al. 2024, "Mixtral of Experts", 2.1)
    scale: Annotated[float, Field(gt=0)] = 1.0  # of the chosen scores, last of all (DeepSeek's routed scaling factor)
    groups: Groups | None = None
    # DeepSeek-V3, eq. 16: a term for each expert that counts in choosing only; this much is added to it where an expert
    # had less than its share of the batch, subtracted where it had more
    correction: Weight | None = None
    bias: bool = False
    jitter: Annotated[float, Field(ge=0, lt=1)] = (
        0.0  # in training, input · U(1 − jitter, 1 + jitter) (Fedus et al., appendix F)
    )
    z_loss: Weight = 0.0  # weight of the squared log-sum of exponentiated logits (Zoph et al. 2022, "ST-MoE", eq. 5)


class MoE(Channel):
    """y = Σ over the `top` chosen of score_i(x) · expert_i(x), and a `shared` one that sees every token.

    Switch (Fedus et al. 2022, eq. 2): top 1 and a capacity. Mixtral: top 2, router {normalise: true}. DeepSeek-V2: a
    shared expert and a scale; V3: sigmoid scores and a correction besides.
    """

    kind: Literal["moe"] = "moe"
    experts: Count
    top: Count = 2
    expert: Channel
    shared: Channel | None = None
    router: Router = Router()
    # Fedus et al., eq. 3: an expert takes tokens / experts · capacity, rounded up; who comes later passes it by. First
    # choices are served before second ones. null: everybody is served
    capacity: Annotated[float, Field(gt=0)] | None = None
    row_capacity: Count | None = None  # an expert takes so many tokens of a row (transformers' Switch: expert_capacity)
    balance: Weight = 0.01  # weight of the auxiliary loss (Fedus et al., eq. 4), which is 1 at perfect balance

    @property
    def alone(self) -> bool:
        unlimited = self.capacity is None and self.row_capacity is None
        return unlimited and self.expert.alone and (self.shared is None or self.shared.alone)

    def build(self, common: Common) -> SubLayer:
        return MoEModule(self, common)

    def cost(self, common: Common) -> Cost:
        """Parameters of all experts, work of those that a token uses."""
        one = self.expert.cost(common)
        total = replace(one * self.top, parameters=one.parameters * self.experts)
        total += Cost(self.experts * (common.width + self.router.bias), 2 * common.width * self.experts)
        return total if self.shared is None else total + self.shared.cost(common)

    def problems(self, common: Common) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for name, part in (("expert", self.expert), ("shared", self.shared)):
            if part is not None:
                found += [(f"{name}.{key}", text) for key, text in part.problems(common)]
                if (outputs := part.outputs(common)) != common.width:
                    found.append((name, f"gives {outputs} features where the mixture has {common.width}"))
        if self.expert.remembers:
            found.append(
                ("expert", "looks at the token before, which another expert may have; as `shared` it can stand")
            )
        if self.top > self.experts:
            found.append(("top", f"a token cannot choose {self.top} of {self.experts} experts"))
        if self.router.normalise and self.top == 1:
            found.append(("router.normalise", "one score made to sum to 1 is always 1: the router would learn nothing"))
        if self.capacity is not None and self.row_capacity is not None:
            found.append(("row_capacity", "there is a capacity of the whole batch already; say one of them"))
        if self.capacity is not None and self.capacity >= self.experts:
            found.append(("capacity", f"at {self.experts} or more an expert takes every token; say null"))
        if (groups := self.router.groups) is None:
            return found
        size = self.experts // groups.count
        if self.experts % groups.count:
            found.append(("router.groups.count", f"{self.experts} experts do not make {groups.count} equal groups"))
        elif groups.top > groups.count:
            found.append(("router.groups.top", f"a token cannot choose {groups.top} of {groups.count} groups"))
        elif self.top > groups.top * size:
            held = f"{groups.top} groups hold {groups.top * size} experts"
            found.append(("router.groups.top", f"{held}, a token chooses {self.top}"))
        elif groups.score == "two-best" and size < 2:
            found.append(("router.groups.score", "a group of one expert has no two best"))
        return found


class Choice(NamedTuple):
    weights: Tensor  # (tokens, top)
    experts: Tensor  # (tokens, top)
    shares: Tensor  # (tokens, experts): scores that sum to 1
    logits: Tensor  # (tokens, experts)
    load: Tensor  # (experts): how many chose it


class RouterModule(nn.Module):
    exact = True  # its map is never rounded: a choice between experts has no halves
    correction: Tensor | None

    def __init__(self, config: MoE, width: int) -> None:
        super().__init__()
        self.config, self.top = config.router, config.top
        self.linear = nn.Linear(width, config.experts, config.router.bias)
        self.register_buffer("correction", None if self.config.correction is None else torch.zeros(config.experts))

    def forward(self, x: Tensor, context: Context | None = None) -> Choice:
        config, exact = self.config, torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            x, weight = x.to(exact), self.linear.weight.to(exact)
            if self.training and config.jitter:
                x = x * torch.empty_like(x).uniform_(1 - config.jitter, 1 + config.jitter)
            bias = None if self.linear.bias is None else self.linear.bias.to(exact)
            logits = nn.functional.linear(x, weight, bias)
        scores = logits.softmax(-1) if config.scores == "softmax" else logits.sigmoid()
        chosen = partial(self.choose, scores.detach())
        experts = chosen() if context is None else context.decide(chosen)
        weights = scores.gather(-1, experts)
        if config.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids can all be 0
        load = experts.flatten().bincount(minlength=scores.shape[-1])
        counts = self.training and len(x) and (context is None or not context.again)
        if self.correction is not None and config.correction is not None and counts:
            self.correction += config.correction * (load.float().mean() - load).sign()
        shares = scores if config.scores == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
        return Choice(weights * config.scale, experts, shares, logits, load)

    def choose(self, scores: Tensor) -> Tensor:
        """(tokens, experts) to the indices of the chosen, best first: (tokens, top)."""
        if self.correction is not None:
            scores = scores + self.correction
        if (groups := self.config.groups) is not None:
            grouped = scores.unflatten(-1, (groups.count, -1))  # (tokens, groups, experts of a group)
            best = grouped.topk(1 if groups.score == "best" else 2, -1).values.sum(-1)
            inside = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(groups.top, -1).indices, True)
            scores = grouped.masked_fill(~inside[..., None], -math.inf).flatten(-2)
        return scores.topk(self.top, -1).indices

    def loss(self, choice: Choice, balance: float) -> Tensor:
        """Σ over experts of (share of choices) · (mean share of scores), times their number; and the z-loss."""
        chosen = choice.load.to(choice.shares.dtype) / choice.load.sum()
        loss = balance * len(chosen) * (chosen * choice.shares.mean(0)).sum()
        return loss + self.config.z_loss * choice.logits.logsumexp(-1).square().mean()


class MoEModule(SubLayer):
    def __init__(self, config: MoE, common: Common) -> None:
        super().__init__()
        self.capacity, self.row_capacity, self.balance = config.capacity, config.row_capacity, config.balance
        self.router = RouterModule(config, common.width)
        self.experts = nn.ModuleList(config.expert.build(common) for _ in range(config.experts))
        self.shared = None if config.shared is None else config.shared.build(common)
        if any(isinstance(expert, SubLayer) and expert.new_state() is not None for expert in self.experts):
            raise TypeError(
                f"{type(config.expert).__name__} looks at earlier tokens, an expert sees them out of their rows"
            )

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        real = context.queries.real
        tokens = x.flatten(0, 1) if real is None else x[real]  # (tokens, width): padding chooses nothing
        choice = self.router(tokens, context)
        if self.training and context.losses is not None and len(tokens):
            context.losses.append(self.router.loss(choice, self.balance))
        rows = torch.arange(len(x), device=x.device)[:, None].expand(x.shape[:2])  # the row of each token
        mixed = self.dispatch(tokens, rows.flatten() if real is None else rows[real], choice, context)
        mixed = mixed.view_as(x) if real is None else torch.zeros_like(x).index_put((real,), mixed)
        return mixed if self.shared is None else mixed + self.shared(x, context, state)

    def new_state(self) -> State | None:
        return None if self.shared is None else self.shared.new_state()

    def dispatch(self, tokens: Tensor, rows: Tensor, choice: Choice, context: Context) -> Tensor:
        wanted, load = choice.experts.t().flatten(), choice.load  # all first choices, then all second ones, …
        order = wanted.argsort(stable=True)  # by expert, and there in the order of arrival
        if self.capacity is not None:
            served = _arrival(wanted) < math.ceil(self.capacity * len(tokens) / len(load))
        elif self.row_capacity is not None:
            served = _arrival(wanted + len(load) * rows.repeat(choice.experts.shape[1])) < self.row_capacity
        else:
            served = None
        if served is not None:
            order, load = order[served[order]], wanted[served].bincount(minlength=len(load))
        who, weights = order % max(len(tokens), 1), choice.weights.t().flatten()[order]
        mixed = torch.zeros_like(tokens)
        parts = tokens[who].split(load.tolist())
        found = [
            expert(part[None], _only(part, context))[0]
            for expert, part in zip(self.experts, parts, strict=True)
            if len(part)
        ]
        return mixed.index_add(0, who, (torch.cat(found) * weights[:, None]).to(mixed.dtype)) if found else mixed


def _arrival(groups: Tensor) -> Tensor:
    """How many of the same group stand before each."""
    order = groups.argsort(stable=True)
    sizes = groups.unique(return_counts=True)[1]
    firsts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device) - firsts)


def _only(tokens: Tensor, context: Context) -> Context:
    """The context of tokens taken out of their rows: a channel has no use for where they stood."""
    return replace(
        context, queries=TokenLayout(torch.zeros(1, len(tokens), dtype=torch.long, device=tokens.device)), plans={}
    )
