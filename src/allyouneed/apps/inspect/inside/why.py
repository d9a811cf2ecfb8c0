"""Why this word: what the choice of an output rests on.

causal      leave out a token, a head, a sub-layer or a block: the change of the word's log-probability
attention   a look: mean attention weights of the position that chose, over layers and heads
rollout     the same, followed down through all layers (Abnar, Zuidema 2020)
logits      direct logit attribution: the logit as a sum over the sub-layers that wrote to the stream; only for
            wirings whose stream is a plain sum (pre-norm, …), where it is exact
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from allyouneed.apps.inspect.inside.effects import UNITS, split_site
from allyouneed.apps.inspect.inside.reading import Prediction
from allyouneed.errors import UserError
from allyouneed.nn.heads.vocabulary import VocabularyHeadModule
from allyouneed.nn.linear.dense import MergedLinear
from allyouneed.nn.wiring.residual import FinalNorm

METHODS = ("causal", "attention", "rollout", "logits")


class Contribution(NamedTuple):
    """What one unit contributes. `tokens`: positions in the stack, for tokens; `name`: the site, or the stack of the
    tokens."""

    name: str
    tokens: tuple[int, ...]
    label: str
    value: float


@dataclass(frozen=True)
class Why:
    """`units` with their values: for `causal`, log p of the answer minus log p without the unit; for `logits`, shares
    that sum to `total`, the logit; else shares of attention. `residual`: |sum − logit| / largest |logit|."""

    answer: Prediction
    method: str
    unit: str
    units: list[Contribution]
    total: float
    residual: float | None = None


def explain(run: Any, answer: Prediction, method: str, unit: str) -> Why:
    if method not in METHODS:
        raise UserError(f"unknown method {method!r} (allowed: {', '.join(METHODS)})")
    if unit not in UNITS:
        raise UserError(f"unknown unit {unit!r} (allowed: {', '.join(UNITS)})")
    if run.reading.output == "vector":
        raise UserError("this model outputs a vector, no choice that could be explained")
    if method == "logits":
        return logit_attribution(run, answer, unit if unit != "token" else "sublayer")
    if method == "causal":
        base, number = run.log_prob(answer), run.answers.index(answer)
        units = [
            Contribution(effect.name, effect.tokens, effect.label, base - float(effect.log_probs[number]))
            for effect in run.effects(unit)
        ]
        return Why(answer, method, unit, [one for one in units if not math.isnan(one.value)], base)
    if unit != "token":
        raise UserError(f"method {method!r} gives shares of tokens; set unit='token' or method='causal'")
    shares = _attention(run, answer) if method == "attention" else _rollout(run, answer)
    units = [
        Contribution(stack, (n,), token.text, float(row[n]))
        for stack, row in shares.items()
        for n, token in enumerate(run.tokens.get(stack, ()))
        if n < len(row)
    ]
    return Why(answer, method, unit, units, float(sum(unit.value for unit in units)))


# --- attention --------------------------------------------------------------------------------------------------------


def _row(run: Any, answer: Prediction, stack: str) -> int | slice:
    """The row of a stack's last tokens that the answer is read from: all of them for an answer of the whole input."""
    return slice(None) if answer.position is None else answer.position


def final_stack(run: Any) -> str:
    """The stack that the head reads."""
    return next(stack for stack in reversed(run.stacks) if stack in ("second", "decoder") or stack.endswith("encoder"))


def _attention(run: Any, answer: Prediction) -> dict[str, Tensor]:
    found: dict[str, list[Tensor]] = {}
    top = final_stack(run)
    for site in run.mixers:
        stack, _, rest = split_site(run, site)
        if stack != top:
            continue
        matrix = run.matrix(site).average[_row(run, answer, stack)]
        matrix = matrix.mean(0) if matrix.dim() == 2 else matrix
        source = {"decoder": "encoder", "second": "first"}.get(stack, "memory") if rest.startswith("cross") else stack
        found.setdefault(source, []).append(matrix)
    same = {stack: [row for row in rows if len(row) == len(rows[0])] for stack, rows in found.items()}
    return {stack: torch.stack(rows).mean(0) for stack, rows in same.items()}


def _rollout(run: Any, answer: Prediction) -> dict[str, Tensor]:
    shares = run.rollout.get(final_stack(run))
    if shares is None:
        raise UserError("this model has no token mixer that could be followed")
    rows = {stack: share[_row(run, answer, stack)] for stack, share in shares.items()}
    return {stack: row.mean(0) if row.dim() == 2 else row for stack, row in rows.items()}


# --- direct logit attribution -----------------------------------------------------------------------------------------


def logit_attribution(run: Any, answer: Prediction, unit: str) -> Why:
    """The logit as a sum: the stream is the sum of the embedding and all sub-layers, and the final norm, with its
    statistics as they were, and the head are linear."""
    model, stack = run.model, final_stack(run)
    why_not = attribution_problem(run)
    if why_not is not None:
        raise UserError(f"the logit of this model is no sum of its parts: {why_not}; use method='causal'")
    assert answer.position is not None
    end = model.get_submodule(stack).end
    parts = list(_written(run, stack, answer.position, unit))
    stream = run[f"{stack}.{run.stacks[stack] - 1}"][0, answer.position].double()
    scale, bias, centred = _frozen_norm(end, stream)
    vector, constant = _head_row(model.head, answer.id)
    units = []
    for name, value in parts:
        centre = value - value.mean() if centred else value
        units.append(Contribution(name, (), name, float((centre * scale) @ vector)))
    units.append(Contribution("bias", (), "bias", float(bias @ vector) + constant))
    logit = float(run.logits[0, answer.position, answer.id])
    size = float(run.logits[0, answer.position].abs().max())
    residual = abs(sum(one.value for one in units) - logit) / max(size, 1e-30)
    return Why(answer, "logits", unit, units, logit, residual)


def attribution_problem(run: Any) -> str | None:
    """Why direct logit attribution is not exact for this model."""
    model, config = run.model, run.model.config
    if not isinstance(model.head if hasattr(model, "head") else None, VocabularyHeadModule):
        return "its head gives no logits of tokens"
    head = model.head
    stack = final_stack(run)
    layers = getattr(config, stack)
    if head.transform is not None or head.maxout is not None or head.soft_cap is not None:
        return "its head is not linear"
    if any(not isinstance(layer.wiring, FinalNorm) or layer.recurs for layer in layers):
        return f"wiring {layers[0].wiring.kind!r} normalises the stream itself"
    if head.product is not None:
        return "its head is quantized: rounding belongs to no part"
    if len(model.get_submodule(stack).joints):
        return "its stream is closed and opened again"
    end = model.get_submodule(stack).end
    if end is not None and config.norm.kind not in ("layer", "rms", "scale"):
        return f"norm {config.norm.kind!r} is not linear for one token"
    return None


def _written(run: Any, stack: str, position: int, unit: str) -> Iterator[tuple[str, Tensor]]:
    """What was written to the stream at a position, in float64: the embedding, then each block, sub-layer or head."""
    yield f"{stack}.0.in", run[f"{stack}.0.in"][0, position].double()
    module = run.model.get_submodule(stack)
    for block in range(run.stacks[stack]):
        site = f"{stack}.{block}"
        before, after = (run[name][0, position].double() for name in (f"{site}.in", site))
        if unit == "block":
            yield site, after - before
            continue
        wiring = module.blocks[block].wiring
        names = list(module.blocks[block].sublayers)
        left = after - before
        for number, name in enumerate(names):
            part = f"{site}.{name}"
            last = f"{part}.post_norm" if f"{part}.post_norm" in run else part
            if last == part and _normed_after(run, stack, block):
                last = f"{part}.norm"
            value = run[last][0, position].double()
            if len(getattr(wiring, "scales", ())):
                value = value * wiring.scales[number].detach().double()
            left = left - value
            heads = _head_parts(run, part, position, value) if unit == "head" and last == part else None
            if heads is not None:
                yield from heads
                value = value - sum(vector for _, vector in heads)
                part = f"{part}.bias"
            yield part, value
        if float(left.abs().max()) > 1e-3 * float(after.abs().max()):
            raise UserError(f"{site}: its sub-layers do not add up to what it writes; use unit='block'")


def _normed_after(run: Any, stack: str, block: int) -> bool:
    """Whether the norm of a sub-layer follows it (`res-post-norm`)."""
    found, at = getattr(run.model.config, stack), block
    for layer in found:
        if at < layer.repeat:
            return bool(layer.wiring.kind == "res-post-norm")
        at -= layer.repeat
    return False


def _head_parts(run: Any, part: str, position: int, whole: Tensor) -> list[tuple[str, Tensor]] | None:
    """What each head adds, its output times its columns of W_O; None where that, with the bias, is not the `whole`
    output: gates and norms follow the heads."""
    name = f"{part}.heads"
    out: Any = getattr(run.recorder.parts.get(name), "out", None)
    if name not in run or run[name].dim() != 4 or type(out) not in (torch.nn.Linear, MergedLinear):
        return None
    heads = run[name][0, :, position].double()  # (heads, head_width)
    if out.in_features != heads.numel():
        return None
    weight = out.weight.detach().double().unflatten(1, (len(heads), -1))  # (width, heads, head_width)
    found = [(f"{name}[{n}]", weight[:, n] @ heads[n]) for n in range(len(heads))]
    left = whole - sum(vector for _, vector in found)
    left = left if out.bias is None else left - out.bias.detach().double()
    return found if float(left.abs().max()) <= 1e-4 * float(whole.abs().max()) else None


def _frozen_norm(end: Any, x: Tensor) -> tuple[Tensor, Tensor, bool]:
    """A norm at x as a linear map: y = (x − mean(x) if centred) · scale + bias."""
    zero = torch.zeros_like(x)
    if end is None:
        return torch.ones_like(x), zero, False
    weight = torch.ones_like(x) if end.weight is None else end.weight.detach().double()
    bias = zero if end.bias is None else end.bias.detach().double()
    kind = type(end).__name__
    if kind == "LayerNormModule":
        return weight * (x.var(correction=0) + end.eps).rsqrt(), bias, True
    if kind == "RMSNormModule":
        return (weight + end.offset) * (x.square().mean() + end.eps).rsqrt(), bias, False
    return weight / x.norm().clamp(min=end.eps), bias, False


def _head_row(head: VocabularyHeadModule, number: int) -> tuple[Tensor, float]:
    """The row of the head's matrix for an output, and its bias."""
    row = head.weight.detach()[number].double() * head.scale
    return row, 0.0 if head.bias is None else float(head.bias[number])
