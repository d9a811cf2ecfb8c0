"""Changed runs: values replaced, heads and blocks switched off, tokens left out, positions moved.

A change that reaches no value, or leaves every number as it was, is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from allyouneed.apps.inspect.inside.reading import Prediction, Reading
from allyouneed.apps.inspect.inside.recorder import SiteEdit
from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch, Rows, Signal

INDEX = re.compile(r"(?P<site>.+?)\[(?P<numbers>\d+(?:\s*,\s*\d+)*)\]")


@dataclass(frozen=True)
class Change:
    """A change of one value. `skip`: a block passes its input on."""

    site: str
    change: Callable[[Tensor], Tensor]
    skip: bool = False

    def edit(self) -> SiteEdit:
        return SiteEdit(self.site, self.change, self.skip)


def ablation(site: str) -> Change:
    """Switch off a block (`decoder.3`), a sub-layer (`decoder.3.mixer`), heads (`decoder.3.mixer.heads[4]`,
    `….heads[0, 2]`), or features of any other value (`encoder.0.channel.hidden[17]`)."""
    found = INDEX.fullmatch(site)
    if found is None:
        is_block = site.rpartition(".")[2].isdigit()
        return Change(site, torch.zeros_like, skip=is_block)
    numbers = [int(number) for number in found["numbers"].split(",")]

    def switch_off(value: Tensor) -> Tensor:
        axis = 1 if value.dim() == 4 else value.dim() - 1
        if max(numbers) >= value.shape[axis]:
            what = "heads" if value.dim() == 4 else "features"
            raise UserError(f"{site}: there are {value.shape[axis]} {what}, from 0")
        return value.index_fill(axis, torch.tensor(numbers, device=value.device), 0.0)

    return Change(found["site"], switch_off)


def patching(site: str, new: Any, positions: Sequence[int] | Mapping[int, int] | None) -> Change:
    """Replace a value, or its tokens at `positions`. `new`: a run (its value at the same site), a tensor of the same
    shape, a number, or a function of the old value. {here: there}: token `here` gets that of token `there`."""

    def patch(value: Tensor) -> Tensor:
        given = new[site] if hasattr(new, "values") and hasattr(new, "model") else new
        made = given(value) if callable(given) else given
        if isinstance(made, int | float):
            made = torch.full_like(value, made)
        if not isinstance(made, Tensor):
            raise UserError(f"{site}: expected a run, a tensor, a number or a function, got {type(made).__name__}")
        if positions is None:
            if made.dim() == value.dim() - 1:
                made = made[None]
            if made.shape != value.shape:
                raise UserError(
                    f"{site}: has shape {tuple(value.shape)}, the new value {tuple(made.shape)}; give positions="
                )
            return made
        pairs = dict(positions) if isinstance(positions, Mapping) else {here: here for here in positions}
        axis = value.dim() - 2
        here, there = list(pairs), list(pairs.values())
        for size, chosen, what in ((value.shape[axis], here, "this run"), (made.shape[axis], there, "the other")):
            if any(not -size <= n < size for n in chosen):
                raise UserError(f"{site}: positions {chosen}, but {what} has {size} tokens here")
        index = [torch.tensor(numbers, device=value.device) for numbers in (here, there)]
        sizes = (value.shape[axis], made.shape[axis])
        index = [numbers % size for numbers, size in zip(index, sizes, strict=True)]
        return value.index_copy(axis, index[0], made.to(value).index_select(axis, index[1]))

    return Change(site, patch)


def one_number(site: str, at: Sequence[int], number: float) -> Change:
    """Set one number of a value; `at`: its index on every axis after the batch."""

    def edit(value: Tensor) -> Tensor:
        index = tuple(at) if len(at) == value.dim() else (0, *at)
        if len(index) != value.dim() or any(not -n <= i < n for i, n in zip(index, value.shape, strict=True)):
            raise UserError(f"{site}: has shape {tuple(value.shape)}; {tuple(at)} is no index of it")
        changed = value.clone()
        changed[index] = number
        return changed

    return Change(site, edit)


# --- inputs -----------------------------------------------------------------------------------------------------------


def input_side(model: Any, stack: str) -> str:
    """Which side of the batch a stack reads: `source` or `target`."""
    if model.config.kind == "two-towers":
        return "source" if stack.startswith("image") else "target"
    return "source" if stack == "encoder" and model.config.kind in ("encoder-decoder", "retro") else "target"


def input_stacks(reading: Reading, model: Any) -> list[str]:
    """The stacks whose tokens are an input: `second` of YOCO reads those of `first`."""
    return [stack for stack in reading.tokens if stack != "second"]


def without_tokens(rows: Rows, tokens: Sequence[int]) -> Rows:
    """Rows without some tokens; the others keep their positions."""
    kept = [n for n in range(rows.tokens.shape[1]) if n not in set(tokens)]
    if not kept:
        raise UserError("every token is left out; keep at least one")
    count = rows.tokens.shape[1]
    positions = rows.positions if rows.positions is not None else torch.arange(count, device=rows.tokens.device)[None]
    positions = positions.expand_as(rows.tokens)

    def take(value: Any) -> Any:
        return value[:, kept] if isinstance(value, Tensor) and value.dim() == 2 else value

    changed = {field.name: take(getattr(rows, field.name)) for field in fields(rows)}
    return Rows(**(changed | {"positions": positions[:, kept]}))


def leave_out(model: Any, reading: Reading, stack: str, tokens: Sequence[int]) -> tuple[Reading, list[Change]]:
    """The reading without some tokens of a stack. Patches and frames cannot be removed: their vectors are set to
    zero."""
    count = len(reading.tokens.get(stack, ()))
    if not count:
        raise UserError(f"unknown stack {stack!r} (allowed: {', '.join(reading.tokens)})")
    tokens = sorted({n % count if -count <= n < count else n for n in tokens})
    if not tokens or tokens[-1] >= count or tokens[0] < 0:
        raise UserError(f"token {tokens}: expected numbers from 0 to {count - 1} in {stack}")
    side = input_side(model, stack)
    given = reading.batch.source if side == "source" else reading.batch.target
    if isinstance(given, Signal):
        site = embed_site(model, stack)
        return reading, [Change(site, lambda value: value.index_fill(1, torch.tensor(tokens), 0.0))]
    if not isinstance(given, Rows):
        raise UserError(f"{stack}: its input has no tokens that can be left out")
    rows = without_tokens(given, tokens)
    batch = replace_side(reading.batch, side, rows)
    kept = [n for n in range(count) if n not in set(tokens)]
    shown = dict(reading.tokens)
    for name in _same_side(stack):
        shown[name] = [reading.tokens[name][n] for n in kept]
    if side == "target":
        now = {old: new for new, old in enumerate(kept)}
        asked = [answer for answer in reading.answers if answer.position is None or answer.position in now]
        answers = [one if one.position is None else Prediction(now[one.position], one.id) for one in asked]
        before = {n: n for n in range(count)} if reading.moved is None else reading.moved
        moved = {first: now[then] for first, then in before.items() if then in now}
        reading = replace(reading, answers=answers, moved=moved)
    return replace(reading, batch=batch, tokens=shown), []


def _same_side(stack: str) -> tuple[str, ...]:
    return ("first", "second") if stack in ("first", "second") else (stack,)


def replace_side(batch: Batch, side: str, rows: Any) -> Batch:
    return replace(batch, source=rows) if side == "source" else replace(batch, target=rows)


def embed_site(model: Any, stack: str) -> str:
    """The site of a stack's input vectors."""
    if "." in stack:
        return f"{stack.rpartition('.')[0]}.embed"
    return "source_embed" if input_side(model, stack) == "source" else "embed"


def place_tokens(model: Any, reading: Reading, stack: str, positions: Sequence[int]) -> Reading:
    """The reading with other positions for the tokens of a stack."""
    side = input_side(model, stack)
    given = reading.batch.source if side == "source" else reading.batch.target
    if not isinstance(given, Rows):
        raise UserError(f"{stack}: the positions of patches and frames are fixed")
    numbers = torch.tensor([list(positions)], dtype=torch.long, device=given.tokens.device)
    if numbers.shape != given.tokens[:1].shape or int(numbers.min()) < 0:
        raise UserError(f"positions: expected {given.tokens.shape[1]} numbers from 0, one per token of {stack}")
    usual = torch.arange(numbers.shape[1], device=numbers.device)[None]
    if torch.equal(numbers, usual if given.positions is None else given.positions[:1]):
        raise UserError("positions: these are the positions that the tokens have")
    rows = replace(given, positions=numbers.expand_as(given.tokens).contiguous())
    return replace(reading, batch=replace_side(reading.batch, side, rows))


def repeat_rows(batch: Batch, count: int) -> Batch:
    """The first row, `count` times."""
    return batch.each(lambda value: value[:1].expand(count, *value.shape[1:]).contiguous())


def stack_rows(rows: Iterable[Rows]) -> Rows:
    """Rows of equal length as one batch."""
    some = list(rows)
    found: dict[str, Any] = {}
    for field in fields(Rows):
        values = [getattr(one, field.name) for one in some]
        found[field.name] = torch.cat(values) if isinstance(values[0], Tensor) else values[0]
    return Rows(**found)
