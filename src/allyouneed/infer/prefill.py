"""Prefill: the model reads sources and prompts before the first token is decoded. The engine, the scheduler, draft
models and captured CUDA graphs (cuda_graph/prefill.py) all go through `start` and `prefill`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from allyouneed.infer.decoding.base import RequestState
from allyouneed.nn.batch import Rows
from allyouneed.nn.states.base import States


class DecodableModel(Protocol):
    """What decoding needs of a model."""

    head: Any  # hidden states -> logits

    def start(self, source: Any) -> States:
        """`source`: rows to encode; for a model without an encoder, the number of texts."""

    def advance(self, new: Rows, states: States, last: bool = False) -> Tensor: ...


def start(model: Any, sources: Rows | int, retrieve: Callable[..., Any] | None = None) -> States:
    """States of rows that have read their sources and no prompt. `retrieve`: finds neighbours of a retrieval model."""
    states: States = model.start(sources) if retrieve is None else model.start(sources, search=retrieve)
    return states


def prefill(model: DecodableModel, states: States, tokens: Rows, bidirectional: bool = False) -> Tensor:
    """Read one chunk of each row's prompt; hidden states of the last tokens (rows, width). `bidirectional`: tokens of
    the chunk attend to each other, so that it must be the whole prompt."""
    if bidirectional:
        device, time = tokens.tokens.device, tokens.tokens.shape[1]
        lengths = torch.full((len(tokens.tokens),), time, device=device) if tokens.lengths is None else tokens.lengths
        tokens = replace(tokens, prompt=torch.arange(time, device=device) < lengths[:, None])
    return model.advance(tokens, states, last=True)[:, 0]


@dataclass(eq=False)
class PrefillBatch:
    """Requests whose prompts are being read, and how many tokens of each have been."""

    model: DecodableModel
    states: States
    requests: list[RequestState]
    read: list[int]
    handed_over: bool = False  # its states became a running batch's

    @property
    def unread(self) -> list[int]:
        return [len(state.request.prompt) - at for state, at in zip(self.requests, self.read, strict=True)]

    def keep(self, rows: list[int]) -> None:
        if rows and len(rows) < len(self.requests):
            self.states.select(rows)
        elif not rows and not self.handed_over:
            self.states.close()
        self.requests, self.read = [self.requests[row] for row in rows], [self.read[row] for row in rows]
