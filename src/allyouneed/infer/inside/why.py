"""Why this word: what the choice of an output rests on.

causal      leave out a token, a head, a sub-layer or a block: the change of the word's log-probability
attention   a look: mean attention weights of the position that chose, over layers and heads
rollout     the same, followed down through all layers (Abnar, Zuidema 2020)
logits      direct logit attribution: the logit as a sum over the sub-layers that wrote to the stream; only for
            wirings whose stream is a plain sum (pre-norm, …), where it is exact
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from allyouneed.errors import UserError
from allyouneed.infer.inside.changes import (
    embed_site,
    input_side,
    input_stacks,
    repeat_rows,
    replace_side,
    stack_rows,
    without_tokens,
)
from allyouneed.infer.inside.reading import Answer
from allyouneed.infer.inside.recorder import Edit, run_recorded
from allyouneed.nn.batch import Rows, Signal
from allyouneed.nn.heads.vocabulary import VocabularyHeadModule
from allyouneed.nn.linear.dense import MergedLinear
from allyouneed.nn.wiring.residual import FinalNorm

METHODS = ("causal", "attention", "rollout", "logits")
UNITS = ("token", "head", "sublayer", "block")
MOST_TOKENS = 128  # groups of tokens that are left out one by one; of more, neighbours are left out together
BUDGET = 4096  # tokens in one forward pass
EXACT = 1e-5


class Unit(NamedTuple):
    """What was left out. `tokens`: positions in the stack, for tokens; `name`: the site, or the stack of the tokens."""

    name: str
    tokens: tuple[int, ...]
    label: str
    value: float


@dataclass(frozen=True)
class Why:
    """`units` with their values: for `causal`, log p of the answer minus log p without the unit; for `logits`, shares
    that sum to `total`, the logit; else shares of attention. `residual`: |sum − logit| / largest |logit|."""

    answer: Answer
    method: str
    unit: str
    units: list[Unit]
    total: float
    residual: float | None = None


def explain(run: Any, answer: Answer, method: str, unit: str) -> Why:
    if method not in METHODS:
        raise UserError(f"unknown method {method!r} (allowed: {', '.join(METHODS)})")
    if unit not in UNITS:
        raise UserError(f"unknown unit {unit!r} (allowed: {', '.join(UNITS)})")
    if run.reading.output == "vector":
        raise UserError("this model outputs a vector, no choice that could be explained")
    if method == "logits":
        return logit_attribution(run, answer, unit if unit != "token" else "sublayer")
    if method == "causal":
        units = list((_token_effects if unit == "token" else _part_effects)(run, answer, unit))
        return Why(answer, method, unit, units, run.log_prob(answer))
    if unit != "token":
        raise UserError(f"method {method!r} gives shares of tokens; set unit='token' or method='causal'")
    shares = _attention(run, answer) if method == "attention" else _rollout(run, answer)
    units = [
        Unit(stack, (n,), token.text, float(row[n]))
        for stack, row in shares.items()
        for n, token in enumerate(run.tokens.get(stack, ()))
        if n < len(row)
    ]
    return Why(answer, method, unit, units, float(sum(unit.value for unit in units)))


# --- causal effects ---------------------------------------------------------------------------------------------------


def _token_effects(run: Any, answer: Answer, unit: str) -> Iterator[Unit]:
    """The token whose row is read has no effect of its own: without it there is no row."""
    base = run.log_prob(answer)
    for stack in input_stacks(run.reading, run.model):
        side = input_side(run.model, stack)
        given = run.batch.source if side == "source" else run.batch.target
        groups = token_groups(run.tokens[stack], MOST_TOKENS)
        if side == "target" and (at := answer.position) is not None:
            groups = [group for group in groups if at not in group and (group[0] < at or not run.decodes)]
        if isinstance(given, Signal):
            effects = _without_vectors(run, answer, embed_site(run.model, stack), groups)
        elif isinstance(given, Rows):
            effects = _without_rows(run, answer, side, given, groups)
        else:
            continue
        for group, value in zip(groups, effects, strict=True):
            label = "".join(run.tokens[stack][n].text for n in group)
            yield Unit(stack, tuple(group), label, base - value)


def token_groups(tokens: Sequence[Any], most: int) -> list[list[int]]:
    """Tokens of one character together; neighbours together if there are more than `most` groups."""
    groups: list[list[int]] = []
    for n, token in enumerate(tokens):
        if n and token.group == tokens[n - 1].group:
            groups[-1].append(n)
        else:
            groups.append([n])
    size = -(-len(groups) // most)
    return [[n for group in groups[at : at + size] for n in group] for at in range(0, len(groups), size)]


def _without_rows(run: Any, answer: Answer, side: str, given: Rows, groups: list[list[int]]) -> list[float]:
    found = [0.0] * len(groups)
    by_size: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        by_size.setdefault(len(group), []).append(number)
    one = given.each(lambda value: value[:1])
    for size, numbers in by_size.items():
        if size >= given.tokens.shape[1]:
            continue
        for some in _chunks(numbers, given.tokens.shape[1]):
            rows = stack_rows(without_tokens(one, groups[n]) for n in some)
            batch = replace_side(repeat_rows(run.batch, len(some)), side, rows)
            logits = run_recorded(run.model, batch, keep=lambda name: False)[0]
            for row, n in enumerate(some):
                position = answer.position
                if position is not None and side == "target":
                    position -= sum(token < position for token in groups[n])
                found[n] = _log_prob(logits[row], position, answer.id)
    return found


def _without_vectors(run: Any, answer: Answer, site: str, groups: list[list[int]]) -> list[float]:
    def change(group: list[int]) -> Callable[[Tensor], Tensor]:
        return lambda vectors: vectors.index_fill(0, torch.tensor(group, device=vectors.device), 0.0)

    return _row_effects(run, answer, [(site, change(group)) for group in groups])


def _part_effects(run: Any, answer: Answer, unit: str) -> Iterator[Unit]:
    changes: list[tuple[str, Callable[[Tensor], Tensor]]] = []
    names: list[str] = []
    for name in run.values:
        _, block, rest = split_site(run, name)
        if block is None or "@" in name:
            continue
        if unit == "block" and rest == "":
            names.append(name)
            changes.append((name, _always(run[f"{name}.in"][0])))
        elif unit == "sublayer" and rest in ("mixer", "cross", "channel"):
            names.append(name)
            changes.append((name, torch.zeros_like))
        elif unit == "head" and name.endswith(".heads") and run[name].dim() == 4 and run[name].shape[0] == 1:
            for head in range(run.names[name][1]):
                names.append(f"{name}[{head}]")
                changes.append((name, _without(head)))
    if not changes:
        raise UserError(f"this model has no {unit} that can be left out")
    base = run.log_prob(answer)
    for name, value in zip(names, _row_effects(run, answer, changes), strict=True):
        yield Unit(name, (), name, base - value)


def _always(new: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda value: new


def _without(row: int) -> Callable[[Tensor], Tensor]:
    return lambda value: value.index_fill(0, torch.tensor(row, device=value.device), 0.0)


def split_site(run: Any, name: str) -> tuple[str | None, int | None, str]:
    """Stack, block and the rest of a site."""
    for stack in run.stacks:
        if name.startswith(f"{stack}."):
            number, _, rest = name.removeprefix(f"{stack}.").partition(".")
            return (stack, int(number), rest) if number.isdigit() else (stack, None, number)
    return None, None, name


def _row_effects(run: Any, answer: Answer, changes: list[tuple[str, Callable[[Tensor], Tensor]]]) -> list[float]:
    """log p of the answer with each change alone: one row of a batch each."""
    found: list[float] = []
    longest = max(len(tokens) for tokens in run.tokens.values())
    for some in _chunks(changes, longest):
        by_site: dict[str, list[int]] = {}
        for row, (site, _) in enumerate(some):
            by_site.setdefault(site, []).append(row)

        def edit(site: str, rows: list[int], some: Any = some) -> Edit:
            def change(value: Tensor) -> Tensor:
                changed = value.clone()
                for row in rows:
                    changed[row] = some[row][1](value[row])
                return changed

            return Edit(site, change)

        edits = [edit(site, rows) for site, rows in by_site.items()]
        logits = run_recorded(run.model, repeat_rows(run.batch, len(some)), edits, keep=lambda name: False)[0]
        if run.model.config.kind == "two-towers":  # images × texts: the pairs
            logits = logits.diagonal()[:, None]
        found += [_log_prob(row, answer.position, answer.id) for row in logits]
    return found


def _chunks(items: Sequence[Any], length: int) -> Iterator[list[Any]]:
    size = max(1, BUDGET // max(length, 1))
    for at in range(0, len(items), size):
        yield list(items[at : at + size])


def _log_prob(logits: Tensor, position: int | None, number: int) -> float:
    row = logits if position is None else logits[position]
    row = row if row.dtype == torch.float64 else row.float()
    return float(row.log_softmax(-1)[number] if row.numel() > 1 else row[0])


# --- attention --------------------------------------------------------------------------------------------------------


def _row(run: Any, answer: Answer, stack: str) -> int | slice:
    """The row of a stack's last tokens that the answer is read from: all of them for an answer of the whole input."""
    return slice(None) if answer.position is None else answer.position


def final_stack(run: Any) -> str:
    """The stack that the head reads."""
    return next(stack for stack in reversed(run.stacks) if stack in ("second", "decoder") or stack.endswith("encoder"))


def _attention(run: Any, answer: Answer) -> dict[str, Tensor]:
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


def _rollout(run: Any, answer: Answer) -> dict[str, Tensor]:
    shares = run.rollout.get(final_stack(run))
    if shares is None:
        raise UserError("this model has no token mixer that could be followed")
    rows = {stack: share[_row(run, answer, stack)] for stack, share in shares.items()}
    return {stack: row.mean(0) if row.dim() == 2 else row for stack, row in rows.items()}


# --- direct logit attribution -----------------------------------------------------------------------------------------


def logit_attribution(run: Any, answer: Answer, unit: str) -> Why:
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
        units.append(Unit(name, (), name, float((centre * scale) @ vector)))
    units.append(Unit("bias", (), "bias", float(bias @ vector) + constant))
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
