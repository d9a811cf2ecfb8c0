"""What a caller asks of the engine: one `Request`. How it is decoded is a `DecodingSpec`, and its progress a
`RequestState` (decoding/base.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class StopCondition(Protocol):
    """Decides from the last tokens of a text whether it ends there."""

    reach: int  # number of last tokens it needs

    def __call__(self, tokens: Sequence[int]) -> bool: ...


class BeamObserver(Protocol):
    """Receives the candidates of every step of a beam search, and which of them continue (decoding/beam_record.py)."""

    def add_step(self, spec: Any, length: int, candidates: Sequence[Any], rows: Sequence[int]) -> None: ...


class Request(NamedTuple):
    """`prompt`: first tokens of the target, begin token included. `limit`: the most new tokens. `sample_key`: with the
    seed it decides the samples, so that they do not depend on the rest of the batch. `source`: input of an encoder.
    `stop`: ends the text, besides the end token. `listener` gets each token as it is decoded; those of a beam search
    at its end. A higher `priority` is admitted first; among equals the `client` that has received least, then the
    oldest request. `observer`: records the steps of a beam search."""

    prompt: Sequence[int]
    limit: int
    sample_key: tuple[int, ...]
    source: Sequence[int] | None = None
    stop: StopCondition | None = None
    listener: Callable[[int], None] | None = None
    priority: int = 0
    client: str = ""
    observer: BeamObserver | None = None

    @property
    def size(self) -> int:
        """Tokens it adds to a padded batch."""
        return len(self.prompt) + self.limit if self.source is None else len(self.source)
