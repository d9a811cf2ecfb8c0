"""What becomes of a request: who asked for what, and how far it has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from allyouneed.infer.decoding.base import Hypothesis, RequestState
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Request
from allyouneed.nn.states.base import States


@dataclass(eq=False)
class RequestHandle:
    """What became of a request. `tokens`: those it has heard so far; of a beam search all of the best, at its end.
    `answer`: the hypotheses, best first, once it is `done`. `error`: what its own listener raised."""

    request: Request
    decoding: Decoding
    priority: int
    client: str
    number: int
    asked: RequestState
    listener: Callable[[int], None] | None = None
    tokens: list[int] = field(default_factory=list)
    answer: list[Hypothesis] | None = None
    error: Exception | None = None
    since: int = 0  # the step in which it came
    reserved: list[int] = field(default_factory=list)  # blocks for what of its states does not lie in blocks

    @property
    def done(self) -> bool:
        return self.answer is not None or self.asked.cancelled

    @property
    def cancelled(self) -> bool:
        return self.asked.cancelled

    def cancel(self) -> None:
        """Nobody waits for it any more. What has been said stays in `tokens`; of one that is done, everything."""
        if not self.asked.done:
            self.asked.cancelled = True

    def hear(self, token: int) -> None:
        """A listener that fails loses its own request and nobody else's."""
        if self.error is not None:
            return
        self.tokens.append(token)
        if self.listener is not None:
            try:
                self.listener(token)
            except Exception as error:
                self.error = error
                self.cancel()


@dataclass(eq=False)
class PrefillBatch:
    """Requests whose prompts are being read: how many tokens of each have been."""

    states: States
    tickets: list[RequestHandle]
    read: list[int]
    taken: bool = False  # its states have become a crew's

    @property
    def left(self) -> list[int]:
        """How many tokens of each are not yet read."""
        return [len(ticket.request.prompt) - at for ticket, at in zip(self.tickets, self.read, strict=True)]
