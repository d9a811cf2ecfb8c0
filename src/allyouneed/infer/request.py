"""What a caller asks of the engine: one `Request`. How it is decoded is a `DecodingSpec`, and its progress a
`RequestState` (decoding/base.py)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class StopCondition(Protocol):
    """Decides from the last tokens of a text whether it ends there."""

    reach: int  # number of last tokens it needs

    def __call__(self, tokens: Sequence[int]) -> bool: ...


class BeamObserver(Protocol):
    """Receives the candidates of every step of a beam search, and which of them continue (decoding/beam_record.py)."""

    def add_step(self, spec: Any, length: int, candidates: Sequence[Any], rows: Sequence[int]) -> None: ...


@dataclass(frozen=True, eq=False)
class Medium:
    """An image or a sound in a prompt: its `kind` (`image`, `audio`), the position of its first slot and how many there
    are, and its `values`: pixels (channels, height, width) or log-mel frames (mels, time)."""

    kind: str
    at: int
    slots: int
    values: Tensor

    @cached_property
    def number(self) -> int:
        """A hash of the content: equal media have equal numbers."""
        values = self.values.detach().float().cpu().contiguous()
        digest = hashlib.sha256(f"{self.kind} {tuple(values.shape)}".encode() + values.numpy().tobytes()).digest()
        return int.from_bytes(digest[:16], "big")


class Request(NamedTuple):
    """`prompt`: first tokens of the target, begin token included. `limit`: the most new tokens. `sample_key`: with the
    seed it decides the samples, so that they do not depend on the rest of the batch. `source`: input of an encoder.
    `stop`: ends the text, besides the end token. `listener` gets each token as it is decoded; those of a beam search
    at its end. The `client` that has received least is admitted first; of its requests the one with the highest
    `priority`, then the oldest. `observer`: records the steps of a beam search. `media`: images and sounds in the
    prompt, in order; the tokens at their slots are not read. `allowed`: the only tokens it may generate;
    default: what the model's shortlist allows, or all."""

    prompt: Sequence[int]
    limit: int
    sample_key: tuple[int, ...]
    source: Sequence[int] | None = None
    stop: StopCondition | None = None
    listener: Callable[[int], None] | None = None
    priority: int = 0
    client: str = ""
    observer: BeamObserver | None = None
    media: tuple[Medium, ...] = ()
    allowed: Sequence[int] | Tensor | None = None

    def prompt_with_media(self) -> list[int]:
        """The prompt, with the number of each medium in place of the tokens at its slots: equal for equal prompts."""
        key = list(self.prompt)
        for medium in self.media:
            key[medium.at : medium.at + medium.slots] = [-1 - medium.number] * medium.slots
        return key

    @property
    def size(self) -> int:
        """Tokens it adds to a padded batch."""
        return len(self.prompt) + self.limit if self.source is None else len(self.source)
