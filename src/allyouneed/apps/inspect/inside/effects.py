"""Causal effects: what every answer's log-probability becomes without a token, a head, a sub-layer or a block. All
answers are measured at once, each part in one row of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from allyouneed.apps.inspect.inside.changes import (
    embed_site,
    input_side,
    input_stacks,
    repeat_rows,
    replace_side,
    stack_rows,
    without_tokens,
)
from allyouneed.apps.inspect.inside.recorder import Change, SiteEdit, run_recorded
from allyouneed.errors import UserError
from allyouneed.nn.batch import Rows, Signal

UNITS = ("token", "head", "sublayer", "block")
MOST_TOKENS = 64  # groups of tokens that are left out one by one; of more, neighbours are left out together
BUDGET = 4096  # tokens in one forward pass
LOGITS = 1 << 26  # and numbers of its output
MISSING = float("nan")


class Effect(NamedTuple):
    """`name`: a site, or the stack of the `tokens`. `log_probs` (answers,): without it; NaN where it has no effect that
    could be measured: the token whose row is read, and tokens after it."""

    name: str
    tokens: tuple[int, ...]
    label: str
    log_probs: Tensor


def measure(run: Any, unit: str) -> list[Effect]:
    return list(_token_effects(run) if unit == "token" else _part_effects(run, unit))


def split_site(run: Any, name: str) -> tuple[str | None, int | None, str]:
    """Stack, block and the rest of a site."""
    for stack in run.stacks:
        if name.startswith(f"{stack}."):
            number, _, rest = name.removeprefix(f"{stack}.").partition(".")
            return (stack, int(number), rest) if number.isdigit() else (stack, None, number)
    return None, None, name


# --- tokens -----------------------------------------------------------------------------------------------------------


def _token_effects(run: Any) -> Iterator[Effect]:
    for stack in input_stacks(run.reading, run.model):
        side = input_side(run.model, stack)
        given = run.batch.source if side == "source" else run.batch.target
        groups = token_groups(run.tokens[stack], MOST_TOKENS)
        if isinstance(given, Signal):
            site = embed_site(run.model, stack)
            found = _row_effects(run, [(site, _without(group)) for group in groups])
        elif isinstance(given, Rows):
            found = _without_rows(run, side, given, groups)
        else:
            continue
        for group, log_probs in zip(groups, found, strict=True):
            label = "".join(run.tokens[stack][n].text for n in group)
            yield Effect(stack, tuple(group), label, log_probs)


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


def _without_rows(run: Any, side: str, given: Rows, groups: list[list[int]]) -> list[Tensor]:
    """The rest of the row keeps its positions; rows of equal length share a batch."""
    found = [torch.full((len(run.answers),), MISSING)] * len(groups)
    by_size: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        by_size.setdefault(len(group), []).append(number)
    one, count = given.each(lambda value: value[:1]), given.tokens.shape[1]
    for size, numbers in by_size.items():
        if size >= count:
            continue
        for some in _chunks(run, numbers, count):
            rows = stack_rows(without_tokens(one, groups[n]) for n in some)
            batch = replace_side(repeat_rows(run.batch, len(some)), side, rows)
            logits = _rows(run, run_recorded(run.model, batch, keep=_nothing)[0])
            for row, n in enumerate(some):
                found[n] = _log_probs(run, logits[row], groups[n] if side == "target" else [])
    return found


# --- parts ------------------------------------------------------------------------------------------------------------


def _part_effects(run: Any, unit: str) -> Iterator[Effect]:
    changes: list[tuple[str, Change]] = []
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
                changes.append((name, _without([head])))
    if not changes:
        raise UserError(f"this model has no {unit} that can be left out")
    for name, log_probs in zip(names, _row_effects(run, changes), strict=True):
        yield Effect(name, (), name, log_probs)


def _always(new: Tensor) -> Change:
    return lambda value: new


def _without(rows: list[int]) -> Change:
    return lambda value: value.index_fill(0, torch.tensor(rows, device=value.device), 0.0)


def _row_effects(run: Any, changes: list[tuple[str, Change]]) -> list[Tensor]:
    """The effects of each change alone: one row of a batch each."""
    found: list[Tensor] = []
    longest = max(len(tokens) for tokens in run.tokens.values())
    for some in _chunks(run, changes, longest):
        by_site: dict[str, list[int]] = {}
        for row, (site, _) in enumerate(some):
            by_site.setdefault(site, []).append(row)
        edits = [SiteEdit(site, _in_rows({row: some[row][1] for row in rows})) for site, rows in by_site.items()]
        logits = run_recorded(run.model, repeat_rows(run.batch, len(some)), edits, keep=_nothing)[0]
        found += [_log_probs(run, row, []) for row in _rows(run, logits)]
    return found


def _in_rows(changes: dict[int, Change]) -> Change:
    """Each row of a batch changed in its own way."""

    def change(value: Tensor) -> Tensor:
        changed = value.clone()
        for row, one in changes.items():
            changed[row] = one(value[row])
        return changed

    return change


# --- outputs ----------------------------------------------------------------------------------------------------------


def _nothing(name: str) -> bool:
    return False


def _rows(run: Any, logits: Tensor) -> Tensor:
    """The output of each row; of two towers (images, texts), the pairs."""
    return logits.diagonal()[:, None] if run.reading.output == "similarity" else logits


def _log_probs(run: Any, logits: Tensor, gone: Sequence[int]) -> Tensor:
    """Log-probabilities of all answers in the output of one row without the tokens `gone`."""
    found = torch.full((len(run.answers),), MISSING)
    for number, answer in enumerate(run.answers):
        position: int | None = answer.position
        if position is not None and gone:
            if position in gone or (run.decodes and gone[0] > position):
                continue
            position -= sum(token < position for token in gone)
        row = logits if position is None else logits[position]
        row = row if row.dtype == torch.float64 else row.float()
        found[number] = row[answer.id] if run.reading.output == "similarity" else row.log_softmax(-1)[answer.id]
    return found


def _chunks(run: Any, items: Sequence[Any], length: int) -> Iterator[list[Any]]:
    numbers = run.logits[0].numel()
    size = max(1, min(BUDGET // max(length, 1), LOGITS // max(numbers, 1)))
    for at in range(0, len(items), size):
        yield list(items[at : at + size])
