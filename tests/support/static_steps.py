"""Prefilled rows that continue in the slots of a step of fixed shape, beside the plain path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from allyouneed.nn.batch import Rows
from allyouneed.runtime.cuda.decode_step import DecodeStep
from allyouneed.runtime.cuda.multi_token import MultiTokenStep, accept
from allyouneed.runtime.cuda.static_cache import StaticStates
from any_part import VOCAB

SOURCES, PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [2, 2]], [[1, 2, 3, 4, 5], [3], []]
SLOTS, GROUP, STEPS = [2, 0, 1], 2, 4  # the slots of the three rows; beams of a slot


class Decoded(NamedTuple):
    found: Tensor  # logits (steps, rows, vocab)
    wanted: Tensor
    before: list[int]  # addresses of all tensors of the states
    after: list[int]


def decode_both(
    plain: Any, model: Any, sources: list[list[int]], prepare: Callable[[Callable[[], None]], Callable[[], None]]
) -> Decoded:
    """`plain` decodes as usual; `model`, equal but perhaps on another device, by steps of fixed shape: beams of unequal
    length in slots in any order, reordered after each step. `prepare` makes a function of the step that can be called
    again, without arguments: it may capture it."""
    states = StaticStates(model, len(SLOTS), GROUP, 16, 8 if sources else 0)
    device = states.device
    step = DecodeStep(model, states)
    tokens = torch.ones(states.rows, dtype=torch.long, device=device)
    order = torch.arange(states.rows, device=device)
    logits = step(tokens)  # allocates the states

    def once() -> None:
        logits.copy_(step(tokens))
        states.reorder(order)

    run = prepare(once)
    past, rows = start_both(plain, model, sources, states)
    before, found, wanted = addresses(states), [], []
    for number in range(STEPS):
        new = (torch.arange(len(rows)) * 3 + number) % (VOCAB - 1) + 1
        parents = [group * GROUP + (row + number) % 3 % GROUP for group in range(len(SLOTS)) for row in range(GROUP)]
        tokens[rows.to(device)] = new.to(device)
        order[rows.to(device)] = rows[parents].to(device)
        run()
        found.append(logits.cpu()[rows])
        wanted.append(plain.head(plain.advance(Rows(new[:, None]), past))[:, 0])
        past.select(parents)
    return Decoded(torch.stack(found), torch.stack(wanted), before, addresses(states))


def start_both(plain: Any, model: Any, sources: list[list[int]], states: StaticStates) -> tuple[Any, Tensor]:
    """Prefill both, `model` into `states`; the states of `plain`, and the row of `states` that each of its rows has."""
    states.device_lengths.zero_()
    past, given = start(plain, sources), start(model, sources)
    states.load(torch.tensor(SLOTS, device=states.device), given, torch.tensor(given.lengths, device=states.device))
    past.repeat_rows(GROUP)
    return past, torch.tensor([slot * GROUP + beam for slot in SLOTS for beam in range(GROUP)])


def start(model: Any, sources: list[list[int]]) -> Any:
    device = next(model.parameters()).device
    past = model.start(Rows.of(sources, pad=3).to(device) if sources else len(PROMPTS))
    model.advance(Rows.of(PROMPTS, pad=0).to(device), past)
    return past


def addresses(states: StaticStates) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors_in(states.layers)]


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from tensors_in(entry)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif type(value).__module__.startswith("allyouneed.runtime.cuda"):
        yield from tensors_in({name: held for name, held in vars(value).items() if name not in ("states", "part")})


TOKENS, ROUNDS = 3, 3  # read at once


def decode_many(
    plain: Any, model: Any, sources: list[list[int]], prepare: Callable[[Callable[[], None]], Callable[[], None]]
) -> Decoded:
    """`model` reads several tokens per row at once, of which one, two or three stay; `plain` reads only these."""
    states = StaticStates(model, len(SLOTS), GROUP, 24, 8 if sources else 0, TOKENS)
    device, step = states.device, MultiTokenStep(model, states)
    tokens = torch.ones(states.rows, TOKENS, dtype=torch.long, device=device)
    counts = torch.ones(states.rows, dtype=torch.long, device=device)
    logits = step(tokens)  # allocates the states

    def once() -> None:
        logits.copy_(step(tokens))
        accept(states, states.device_lengths, counts)

    run = prepare(once)
    past, rows = start_both(plain, model, sources, states)
    before, found, wanted = addresses(states), [], []
    for number in range(ROUNDS):
        new = (torch.arange(len(rows) * TOKENS).view(-1, TOKENS) * 3 + number) % (VOCAB - 1) + 1
        kept = (torch.arange(len(rows)) + number) % TOKENS + 1
        tokens[rows.to(device)], counts[rows.to(device)] = new.to(device), kept.to(device)
        run()
        hidden = plain.advance(Rows(new, kept), past)
        real = torch.arange(TOKENS) < kept[:, None]
        found.append(logits.cpu().unflatten(0, (-1, TOKENS))[rows][real])
        wanted.append(plain.head(hidden)[real])
    return Decoded(torch.cat(found), torch.cat(wanted), before, addresses(states))
