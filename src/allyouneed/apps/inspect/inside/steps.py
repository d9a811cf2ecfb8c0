"""Decoding step by step: the token that each step reads, and the states that the model keeps, as they grow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from allyouneed.apps.inspect.inside.execute import forward_pass
from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.states.base import State, States
from allyouneed.nn.states.paged import BLOCK, BlockPool, PagedStates
from allyouneed.runtime.process import evaluation_mode

WORDS = {  # what a state is called, by its class
    "KVCache": "KV cache",
    "CrossKVCache": "KV cache of the source",
    "WindowKVCache": "sliding-window KV cache (ring)",
    "PagedKVCache": "paged KV cache",
    "Recurrent": "recurrent state",
    "RecentTokens": "recent inputs",
    "CompressiveMemory": "compressive memory",
    "HashedKeyValues": "KV cache with hash buckets",
}


class StateSize(NamedTuple):
    """A state after a step: `tensors`: the shape in use of each of its tensors; `bytes`: as the state reports them."""

    site: str
    kind: str
    word: str
    tensors: dict[str, tuple[int, ...]]
    bytes: int


class Step(NamedTuple):
    """A decoding step: the model has read tokens up to `position` (inclusive), `read` of them in this step."""

    position: int
    read: int
    states: list[StateSize]
    blocks: list[int] | None = None  # of a paged cache: the block table of the row

    @property
    def bytes(self) -> int:
        return sum(state.bytes for state in self.states)


@forward_pass
def decode_steps(model: Any, batch: Batch, given: int, paged: bool = False) -> list[Step]:
    """Prefill the first `given` tokens of the target, then read one token after another, as decoding does. `paged`:
    with growing caches in blocks of a pool, as in the server."""
    if not hasattr(model, "advance") or not model.config.generates:
        raise UserError(f"a model of kind {model.config.kind} does not decode step by step")
    target = batch.rows.tokens[:1]
    prompt = None if batch.rows.prompt is None else batch.rows.prompt[:1]
    found = []
    with evaluation_mode(model), torch.no_grad():
        states = start_states(model, batch)
        if paged:
            states = PagedStates(states, BlockPool(2 * (target.shape[1] // BLOCK + 2)))
        names = state_names(model)
        begin = 0
        for end in (given, *range(given + 1, target.shape[1] + 1)):
            marks = None if prompt is None else prompt[:, begin:end]
            model.advance(Rows(target[:, begin:end], prompt=marks), states)
            blocks = list(states.block_tables[0]) if isinstance(states, PagedStates) else None
            found.append(Step(end - 1, end - begin, list(_sizes(states, names)), blocks))
            begin = end
    return found


def start_states(model: Any, batch: Batch) -> States:
    """Empty states for the first row of a batch."""
    kind = model.config.kind
    if kind == "encoder-decoder":
        assert batch.source is not None
        states: States = model.start(batch.source.each(lambda tensor: tensor[:1]))
    elif kind == "retro" and batch.source is not None:
        states = model.start(batch.source.each(lambda tensor: tensor[:1]))
    else:
        states = model.start(1)
    return states


def state_names(model: Any) -> list[str]:
    """The block of each entry of `States.layers`."""
    if hasattr(model, "first"):
        first, second = (
            [f"{name}.{n}" for n in range(len(getattr(model, name).blocks))] for name in ("first", "second")
        )
        return [*first, "keys", *second]
    if model.config.kind == "recurrent-memory":
        return ["memory"]
    return [f"decoder.{n}" for n in range(len(model.decoder.blocks))]


def _sizes(states: States, names: list[str]) -> Iterator[StateSize]:
    for name, layer in zip(names, states.layers, strict=True):
        for part, state in layer.items():
            site = name if name == part else f"{name}.{part}"
            kind = type(state).__name__
            yield StateSize(site, kind, WORDS.get(kind, "state"), dict(_tensors("", state)), state.bytes)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Shapes of the floating-point tensors of a state. Caches allocate ahead: slots after `end` are not in use."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, tuple(value.shape)
    elif isinstance(value, State):
        end = getattr(value, "end", None)
        for key, entry in vars(value).items():
            if key == "scratch":
                continue
            if isinstance(entry, Tensor) and end is not None and key in ("keys", "values", "tokens"):
                axis = 1 if key == "tokens" else 2
                entry = entry.narrow(axis, 0, min(end, entry.shape[axis]))
            yield from _tensors(f"{name}.{key}" if name else key, entry)
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _tensors(f"{name}.{key}" if name else str(key), entry)
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            yield from _tensors(f"{name}.{number}", entry)
