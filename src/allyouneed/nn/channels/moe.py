"""Mixture of experts: each token uses a few of many channel mixers.

An expert is any part of the channel slot, built by `expert.build`. Tokens are sorted by expert and each expert runs
once on its tokens: compute grows with the experts in use, not with their number. On a GPU, experts made of dense maps
run all at once (nn/ops/experts.py), by shapes that do not depend on the routing: nothing waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.config import Config
from allyouneed.kernels import usable
from allyouneed.nn.channels.feedforward import FFNModule, GLUModule
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.linear.dense import MergedLinear
from allyouneed.nn.observe import is_observed, observe, show
from allyouneed.nn.ops.experts import Groups, arrival, collect, count, grouped_linear, spread
from allyouneed.nn.patterns.core import TokenFields
from allyouneed.nn.states.base import State
from allyouneed.nn.sublayer import Channel, SubLayer

Count = Annotated[int, Field(gt=0)]
Weight = Annotated[float, Field(ge=0)]


class ExpertGroups(Config):
    """Group-limited routing: experts are chosen within the best groups (DeepSeek-AI 2024, "DeepSeek-V2", 2.2.2).

    A group is scored by its best expert (V2) or by the sum of its two best (V3, 2.1.2).
    """

    count: Count
    """Number of groups; it divides the number of experts."""
    top: Count
    """Groups that a token may choose experts from."""
    score: Literal["best", "two-best"] = "best"
    """Score a group by its best expert (DeepSeek-V2) or by the sum of its two best (V3)."""


class Router(Config):
    """How tokens choose experts: a linear map in at least fp32, whatever the precision of the model (Fedus et al. 2022,
    2.4: selective precision), since rounding errors change the choice."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores."""
    normalise: bool = False
    """Rescale the chosen scores to sum to 1 (Jiang et al. 2024, "Mixtral of Experts", 2.1)."""
    scale: Annotated[float, Field(gt=0)] = 1.0
    """Multiplies the chosen scores (DeepSeek's routed scaling factor)."""
    groups: ExpertGroups | None = None
    """Choose experts within the best groups only; default: among all."""
    correction: Weight | None = None
    """Step of a bias per expert, used for choosing only: it grows when the expert got less than its share of the batch
    and shrinks when it got more (DeepSeek-V3, eq. 16); default: none."""
    bias: bool = False
    """Whether the router's linear map has a bias."""
    jitter: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """In training, multiply the input by U(1 − jitter, 1 + jitter) (Fedus et al. 2022, appendix F)."""
    z_loss: Weight = 0.0
    """Weight of the squared logsumexp of the logits in the loss (Zoph et al. 2022, "ST-MoE", eq. 5)."""


class MoE(Channel):
    """y = Σ over the `top` chosen of score_i(x) · expert_i(x), plus an optional `shared` expert for every token.

    Switch (Fedus et al. 2022, eq. 2): top 1 and a capacity. Mixtral: top 2, router {normalise: true}. DeepSeek-V2: a
    shared expert and a scale; V3: also sigmoid scores and a correction.
    """

    kind: Literal["moe"] = "moe"
    experts: Annotated[int, Field(gt=0, le=1 << 16)]
    """Number of experts."""
    top: Count = 2
    """Experts that each token uses."""
    expert: Channel
    """The channel mixer that each expert is."""
    shared: Channel | None = None
    """A channel mixer that every token uses in addition; default: none."""
    router: Router = Router()
    """How tokens choose experts."""
    capacity: Annotated[float, Field(gt=0)] | None = None
    """An expert processes at most tokens / experts · capacity, rounded up; later tokens skip it, first choices come
    before second ones (Fedus et al. 2022, eq. 3); default: no limit."""
    row_capacity: Count | None = None
    """The same limit as tokens per expert and row (transformers' Switch: expert_capacity); default: no limit."""
    balance: Weight = 0.01
    """Weight of the load-balancing loss (Fedus et al. 2022, eq. 4), which is 1 at perfect balance."""

    @property
    def batch_independent(self) -> bool:
        unlimited = self.capacity is None and self.row_capacity is None
        return unlimited and self.expert.batch_independent and (self.shared is None or self.shared.batch_independent)

    def visible(self, tokens: TokenFields) -> Tensor:
        seen = self.expert.visible(tokens)
        return seen if self.shared is None else seen | self.shared.visible(tokens)

    def build(self, common: Common) -> SubLayer:
        return MoEModule(self, common)

    def cost(self, common: Common) -> Cost:
        """Parameters of all experts, FLOPs of those used by a token."""
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
                    found.append((name, f"outputs {outputs} features; it must output the width {common.width}"))
        if self.expert.stateful:
            found.append(("expert", "reads the previous token, which may go to another expert; use it as `shared`"))
        if self.top > self.experts:
            found.append(("top", f"{self.top} exceeds the number of experts ({self.experts})"))
        if self.router.normalise and self.top == 1:
            found.append(
                ("router.normalise", "with top: 1 the normalised score is always 1 and the router gets no gradient")
            )
        if self.capacity is not None and self.row_capacity is not None:
            found.append(("row_capacity", "capacity and row_capacity are exclusive; set one"))
        if self.capacity is not None and self.capacity >= self.experts:
            found.append(("capacity", f"a capacity of at least {self.experts} drops no token; set null"))
        if (groups := self.router.groups) is None:
            return found
        size = self.experts // groups.count
        if self.experts % groups.count:
            found.append(
                ("router.groups.count", f"{self.experts} experts are not divisible into {groups.count} groups")
            )
        elif groups.top > groups.count:
            found.append(("router.groups.top", f"{groups.top} exceeds the number of groups ({groups.count})"))
        elif self.top > groups.top * size:
            held = f"{groups.top} groups hold {groups.top * size} experts"
            found.append(("router.groups.top", f"{held}, fewer than top ({self.top})"))
        elif groups.score == "two-best" and size < 2:
            found.append(("router.groups.score", "two-best needs groups of at least 2 experts"))
        return found


# of all experts: the maps to the hidden layer, those from it, and an expert for what is between, which has no weights
ExpertMaps = tuple[list[nn.Linear], list[nn.Linear], Any]


class Routing(NamedTuple):
    weights: Tensor  # (tokens, top)
    experts: Tensor  # (tokens, top)
    shares: Tensor  # (tokens, experts): scores that sum to 1
    logits: Tensor  # (tokens, experts)
    load: Tensor  # (experts): tokens per expert
    real: Tensor | None = None  # (tokens,) bool; None: all


class RouterModule(nn.Module):
    exact = True  # never quantized: rounding would change the choice
    correction: Tensor | None

    def __init__(self, config: MoE, width: int) -> None:
        super().__init__()
        self.config, self.top = config.router, config.top
        self.linear = nn.Linear(width, config.experts, config.router.bias)
        self.register_buffer("correction", None if self.config.correction is None else torch.zeros(config.experts))

    def forward(self, x: Tensor, context: Context | None = None, real: Tensor | None = None) -> Routing:
        """x (tokens, width); those that are not `real` (tokens,) count nowhere, and their choice has no meaning."""
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
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
        load = count(
            experts.flatten(), scores.shape[-1], None if real is None else real[:, None].expand_as(experts).flatten()
        )
        counts = self.training and len(x) and (context is None or not context.is_recomputing)
        if self.correction is not None and config.correction is not None and counts:
            self.correction += config.correction * (load.float().mean() - load).sign()
        shares = scores if config.scores == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
        weights = observe(self, "weights", weights * config.scale)
        show(self, "", lambda: logits)
        show(self, "experts", lambda: experts)
        show(self, "shares", lambda: shares)
        return Routing(weights, experts, shares, logits, load, real)

    def choose(self, scores: Tensor) -> Tensor:
        """(tokens, experts) scores to expert indices, best first: (tokens, top)."""
        if self.correction is not None:
            scores = scores + self.correction
        if (groups := self.config.groups) is not None:
            grouped = scores.unflatten(-1, (groups.count, -1))  # (tokens, groups, experts of a group)
            best = grouped.topk(1 if groups.score == "best" else 2, -1).values.sum(-1)
            inside = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(groups.top, -1).indices, True)
            scores = grouped.masked_fill(~inside[..., None], -math.inf).flatten(-2)
        return scores.topk(self.top, -1).indices

    def loss(self, choice: Routing, balance: float) -> Tensor:
        """Load-balancing loss: experts · Σ over experts of (share of choices) · (mean share of scores); plus the
        z-loss."""
        chosen = choice.load.to(choice.shares.dtype) / choice.load.sum().clamp(min=1)
        loss = balance * len(chosen) * (chosen * _mean(choice.shares, choice.real)).sum()
        return loss + self.config.z_loss * _mean(choice.logits.logsumexp(-1).square(), choice.real)


class MoEModule(SubLayer):
    may_skip_parameters = True  # an expert without tokens has no gradient; read by data-parallel training
    calls_maps = False  # one grouped product of all experts

    def __init__(self, config: MoE, common: Common) -> None:
        super().__init__()
        self.capacity, self.row_capacity, self.balance = config.capacity, config.row_capacity, config.balance
        self.router = RouterModule(config, common.width)
        self.experts = nn.ModuleList(config.expert.build(common) for _ in range(config.experts))
        self.shared = None if config.shared is None else config.shared.build(common)
        if any(isinstance(expert, SubLayer) and expert.new_state() is not None for expert in self.experts):
            raise TypeError(
                f"{type(config.expert).__name__} has a state and cannot be an expert, whose tokens leave their rows"
            )

    @property
    def traceable(self) -> bool:  # type: ignore[override]  # per instance, not per class
        shared = self.shared is None or self.shared.traceable
        return shared and usable(self.router.linear.weight) and self.grouped_maps() is not None

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        real = context.queries.real
        rows = torch.arange(x.shape[0], device=x.device)[:, None].expand(x.shape[:2]).flatten()  # of each token
        maps = self.grouped_maps() if usable(x) else None
        if maps is not None:
            tokens, kept = x.flatten(0, 1), None if real is None else real.flatten()
            tokens = tokens if kept is None else tokens.masked_fill(~kept[:, None], 0.0)
            choice = self.choose(tokens, context, kept)
            mixed = self.run_groups(tokens, choice, self.kept(choice, rows, len(x)), maps).view_as(x)
        else:
            tokens = x.flatten(0, 1) if real is None else x[real]  # (tokens, width), without padding
            choice = self.choose(tokens, context)
            kept = self.kept(choice, rows if real is None else rows[real.flatten()], len(x))
            mixed = self.run_each(tokens, choice, kept, context)
            mixed = mixed.view_as(x) if real is None else torch.zeros_like(x).index_put((real,), mixed)
        return mixed if self.shared is None else mixed + self.shared(x, context, state)

    def choose(self, tokens: Tensor, context: Context, real: Tensor | None = None) -> Routing:
        choice: Routing = self.router(tokens, context, real)
        if self.training and context.losses is not None and len(tokens):
            context.losses.append(self.router.loss(choice, self.balance))
        return choice

    def new_state(self) -> State | None:
        return None if self.shared is None else self.shared.new_state()

    def kept(self, choice: Routing, rows: Tensor, batch: int) -> Tensor | None:
        """(top, tokens) bool: choices within the capacity, where first choices come first; None: all. `rows` (tokens,):
        which of the `batch` rows each token is in."""
        chosen, tokens, experts = choice.experts.t(), len(choice.experts), len(choice.load)
        if self.capacity is None and self.row_capacity is None:
            return None
        groups, size = chosen, experts
        if self.row_capacity is not None:
            groups, size = chosen + experts * rows, experts * batch
        if choice.real is not None:  # padding takes no room: a group of its own
            groups, size = groups.masked_fill(~choice.real, size), size + 1
        many: Tensor | int = tokens if choice.real is None else choice.real.sum(dtype=torch.double)
        limit = _ceil(self.capacity * many / experts) if self.capacity is not None else self.row_capacity or 0
        return (arrival(groups.flatten(), size) < limit).view_as(chosen)

    def run_each(self, tokens: Tensor, choice: Routing, kept: Tensor | None, context: Context) -> Tensor:
        """The definition: expert after expert."""
        chosen, load = choice.experts.t().flatten(), choice.load
        order = chosen.argsort(stable=True)  # by expert, in order of arrival
        if kept is not None:
            order = order[kept.flatten()[order]]
            load = count(chosen[order], len(load))
        token_ids, weights = order % max(len(tokens), 1), choice.weights.t().flatten()[order]
        mixed = torch.zeros_like(tokens)
        parts = tokens[token_ids].split(load.tolist())
        found = [
            expert(part[None], _flat_context(part, context))[0]
            for expert, part in zip(self.experts, parts, strict=True)
            if len(part)
        ]
        return mixed.index_add(0, token_ids, (torch.cat(found) * weights[:, None]).to(mixed.dtype)) if found else mixed

    def run_groups(self, tokens: Tensor, choice: Routing, kept: Tensor | None, maps: ExpertMaps) -> Tensor:
        """All experts at once. Choices beyond the capacity and those of padding are computed too, with weight 0."""
        weights = choice.weights.t()  # (top, tokens)
        weights = weights if kept is None else weights * kept
        weights = weights if choice.real is None else weights * choice.real
        groups = Groups.of(choice.experts.t(), len(self.experts))
        up, down, first = maps
        hidden = first.hidden(grouped_linear(spread(tokens, groups), up, groups.ends))
        found = collect(grouped_linear(hidden, down, groups.ends), groups)  # (top, tokens, width)
        return (found * weights[..., None]).sum(0).to(tokens.dtype)

    def grouped_maps(self) -> ExpertMaps | None:
        """The two maps of every expert, if each is a feed-forward network of dense ones, and nothing observes them."""
        if is_observed():
            return None
        up: list[Any] = []
        down: list[Any] = []
        for expert in self.experts:
            if not isinstance(expert, FFNModule | GLUModule) or expert.norm is not None:
                return None
            up.append(expert.up if isinstance(expert, FFNModule) else expert.gate_up)
            down.append(expert.down)
        if not all(type(one) in (nn.Linear, MergedLinear) and type(one.weight) is nn.Parameter for one in (*up, *down)):
            return None  # quantized, or distributed over devices
        return up, down, self.experts[0]


def _ceil(number: Tensor | float) -> Tensor | int:
    return number.ceil() if isinstance(number, Tensor) else math.ceil(number)


def _mean(values: Tensor, real: Tensor | None) -> Tensor:
    """The mean over the real tokens (dim 0)."""
    if real is None:
        return values.mean(0)
    shape = (-1,) + (1,) * (values.dim() - 1)
    return (values * real.view(shape)).sum(0) / real.sum().clamp(min=1)


def _flat_context(tokens: Tensor, context: Context) -> Context:
    """Context of tokens taken out of their rows; channel mixers do not use positions."""
    return replace(
        context, queries=TokenLayout(torch.zeros(1, len(tokens), dtype=torch.long, device=tokens.device)), memo={}
    )
