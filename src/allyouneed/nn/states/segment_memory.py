"""Segment recurrence: a model reads long texts in segments over many batches (Dai et al. 2019, 3.2), and its states can
be written to a checkpoint.

States were computed with the weights of earlier steps and cannot be recomputed: resuming exactly requires saving them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.nn.batch import Batch
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.states.base import State, States

Tensors = dict[str, Tensor]
PLAIN = (bool, int, float, str)


class SegmentMemory:
    """A model whose `run` continues from the states of the batch before, with the gradient cut; `Batch.begins`
    marks batches that start new texts."""

    def __init__(self, model: Any) -> None:
        self.model, self.head = model, model.head
        self.states: States | None = None

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def run(self, batch: Batch, losses: list[Tensor] | None) -> tuple[Tensor, TokenLayout]:
        rows = batch.rows
        if self.states is None or batch.begins:
            self.states = self.model.start(len(rows.tokens))
        self.states.detach()
        asking = {} if batch.source is None else {"query_stream": batch.source}  # after the rows (models/two_stream.py)
        return self.model.advance(rows, self.states, losses=losses, **asking), TokenLayout.of(rows)

    def reset(self) -> None:
        self.states = None

    def export(self) -> tuple[Tensors, Any]:
        """All states: tensors by name, and a JSON tree of their structure."""
        tensors: Tensors = {}
        if self.states is None:
            return tensors, None
        layers = [
            {name: _pack(state, f"{number}.{name}", tensors) for name, state in layer.items()}
            for number, layer in enumerate(self.states.layers)
        ]
        marks = {name: _pack(value, f"marks.{name}", tensors) for name, value in self.states.marks.items()}
        return tensors, {"lengths": self.states.lengths, "marks": marks, "layers": layers}

    def restore(self, tensors: Tensors, tree: Any) -> None:
        """Load the result of `export`."""
        if tree is None:
            self.reset()
            return
        states: States = self.model.start(len(tree["lengths"]))
        states.lengths = list(tree["lengths"])
        states.marks = {name: _unpack(value, None, tensors, states.device) for name, value in tree["marks"].items()}
        for layer, saved in zip(states.layers, tree["layers"], strict=True):
            for name, value in saved.items():
                _unpack(value, layer[name], tensors, states.device)
        self.states = states

    def select(self, rows: range) -> None:
        """Keep these rows only."""
        if self.states is not None:
            self.states.select(rows)

    def merge(self, parts: Iterable[tuple[Tensors, Any]]) -> tuple[Tensors, Any]:
        """The exports of several processes with rows of their own, as one export."""
        whole = SegmentMemory(self.model)
        for tensors, tree in parts:
            one = SegmentMemory(self.model)
            one.restore(tensors, tree)
            if whole.states is None or one.states is None:
                whole = one
            else:
                whole.states.join(one.states)
        return whole.export()


def with_segment_memory(model: Any, carries: bool) -> Any:
    """The model itself, or with states carried from batch to batch."""
    return SegmentMemory(model) if carries else model


def _pack(value: Any, path: str, tensors: Tensors) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": path}
    if value is None or isinstance(value, PLAIN):
        return {"plain": value}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_pack(entry, f"{path}.{n}", tensors) for n, entry in enumerate(value)]}
    if isinstance(value, dict):
        return {"dict": {key: _pack(entry, f"{path}.{key}", tensors) for key, entry in value.items()}}
    if isinstance(value, State):
        return {"state": {name: _pack(entry, f"{path}.{name}", tensors) for name, entry in vars(value).items()}}
    return {}  # a function or a module: a new state has its own


def _unpack(tree: Any, fresh: Any, tensors: Tensors, device: torch.device) -> Any:
    """`fresh`: the value in a new state."""
    if not tree:
        return fresh
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value].to(device)
    if kind == "plain":
        return value
    if kind == "state":
        for name, entry in value.items():
            setattr(fresh, name, _unpack(entry, vars(fresh)[name], tensors, device))
        return fresh
    if kind == "dict":
        known = fresh if isinstance(fresh, dict) else {}
        return {key: _unpack(entry, known.get(key), tensors, device) for key, entry in value.items()}
    there = list(fresh) if isinstance(fresh, tuple | list) and len(fresh) == len(value) else [None] * len(value)
    found = [_unpack(entry, old, tensors, device) for entry, old in zip(value, there, strict=True)]
    return tuple(found) if kind == "tuple" else found
