"""Prefill: the model reads sources and prompts before the first token is decoded. The engine, the scheduler, draft
models and captured CUDA graphs (cuda_graph/prefill.py) all go through `start` and `prefill`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.request import Request
from allyouneed.nn.batch import MEDIA, Rows
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


class EncodedMedium(NamedTuple):
    """The vectors (slots, width) of an image or a sound in a prompt, the position of the first, and its kind."""

    at: int
    kind: str
    vectors: Tensor


def encode_media(model: Any, requests: Sequence[Request]) -> list[list[EncodedMedium]]:
    """The images and sounds of each request, encoded together; none for a draft model that reads only texts."""
    given = [(row, medium) for row, request in enumerate(requests) for medium in request.media]
    found: list[list[EncodedMedium]] = [[] for _ in requests]
    if given and hasattr(model, "encode_media"):
        from allyouneed.nn.models.interleaved import slot_vectors

        vectors = slot_vectors(model, [(medium.kind, medium.values) for _, medium in given])
        for (row, medium), some in zip(given, vectors, strict=True):
            found[row].append(EncodedMedium(medium.at, medium.kind, some))
    return found


def fill_slots(rows: Rows, media: Sequence[Sequence[EncodedMedium]], read: Sequence[int]) -> Rows:
    """Chunks of prompts with the vectors of the slots in them; `read`: how many tokens of each prompt come before."""
    time = rows.tokens.shape[1]
    inside = [
        (row, medium, medium.at - at)
        for row, (some, at) in enumerate(zip(media, read, strict=True))
        for medium in some
        if medium.at - at < time and medium.at + len(medium.vectors) > at
    ]
    if not inside:
        return rows
    vectors = inside[0][1].vectors
    filled = vectors.new_zeros(*rows.tokens.shape, vectors.shape[1])
    slots = torch.zeros_like(rows.tokens)
    for row, medium, begin in inside:
        part = slice(max(0, begin), min(time, begin + len(medium.vectors)))
        filled[row, part] = medium.vectors[part.start - begin : part.stop - begin]
        slots[row, part] = MEDIA.index(medium.kind) + 1
    return replace(rows, slots=slots, vectors=filled)


def share_rows(requests: Sequence[RequestState]) -> list[list[RequestState]]:
    """Requests with equal sources and prompts together: the model reads each once (`n` samples of one prompt)."""
    rows: dict[Any, list[RequestState]] = {}
    for state in requests:
        rows.setdefault(state.inputs, []).append(state)
    return list(rows.values())


@dataclass(eq=False)
class PrefillBatch:
    """Prompts that are being read: the requests of each row, and how many of its tokens have been read."""

    model: DecodableModel
    states: States
    rows: list[list[RequestState]]
    read: list[int]
    media: list[list[EncodedMedium]] = field(default_factory=list)  # of each row, if any row has some
    handed_over: bool = False  # its states became a running batch's

    @property
    def requests(self) -> list[RequestState]:
        return [state for row in self.rows for state in row]

    @property
    def prompts(self) -> list[Sequence[int]]:
        return [row[0].request.prompt for row in self.rows]

    def unread_tokens(self) -> Iterator[tuple[RequestState, int]]:
        """Each request and its unread tokens; the tokens of a row count for its first request."""
        for row, prompt, read in zip(self.rows, self.prompts, self.read, strict=True):
            yield from ((state, 0 if n else len(prompt) - read) for n, state in enumerate(row))

    def keep(self, rows: list[int]) -> None:
        if rows and len(rows) < len(self.rows):
            self.states.select(rows)
        elif not rows and not self.handed_over:
            self.states.close()
        self.rows, self.read = [self.rows[row] for row in rows], [self.read[row] for row in rows]
        self.media = [self.media[row] for row in rows] if self.media else []

    def drop_cancelled(self) -> None:
        if not any([state.cancelled for row in self.rows for state in row]):
            return
        left = [[state for state in row if not state.cancelled] for row in self.rows]
        kept = [number for number, row in enumerate(left) if row]
        self.keep(kept)
        self.rows = [left[number] for number in kept]
