"""How tokens and ends of sequences get from an engine loop's thread to the event loop: once per step, all together."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allyouneed.infer.decoding.base import RequestState

CROWD = 32  # streams whose tokens are delivered after every step; of more, less often
EVENT_SECONDS = 3e-4  # between two deliveries, for each stream: sending takes the event loop a third of it


class TokenOutlet:
    """The listener of a request: its tokens on their way to the event loop, where the queue gets (`number`, tokens)."""

    def __init__(self, delivery: Delivery, queue: Any, number: int) -> None:
        self.delivery, self.queue, self.number = delivery, queue, number
        self.tokens: list[Any] = []
        self.first = True  # nothing has been delivered
        self.paced = getattr(queue, "paced", True)  # each delivery costs this process an event

    def __call__(self, token: Any) -> None:
        self.extend((token,))

    def extend(self, tokens: Sequence[Any]) -> None:
        if not self.tokens:
            self.delivery.outlets.append(self)
        self.tokens += tokens

    def take(self) -> tuple[int, list[Any]]:
        tokens, self.tokens, self.first = self.tokens, [], False
        return self.number, tokens


class Delivery:
    """To queues of `event_loop`. All methods but `listener` are called in the engine loop's thread."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self.event_loop = event_loop
        self.outbox: list[tuple[Any, Any]] = []  # (queue, item)
        self.outlets: list[TokenOutlet] = []  # with tokens to deliver
        self.batches: dict[Any, array[int]] = {}  # tokens for other processes, by the queue of each
        self.delivered = 0.0  # when all outlets were

    def listener(self, queue: Any, number: int) -> Callable[[int], None]:
        """The listener of a streamed sequence: what its queue wants, or else a `TokenOutlet`."""
        own: Callable[[Delivery, int], Callable[[int], None]] | None = getattr(queue, "listener", None)
        return TokenOutlet(self, queue, number) if own is None else own(self, number)

    def post_end(self, queue: Any, draws: int, state: RequestState) -> None:
        """Tell a queue, after this step, which of its sequences has ended: there are `draws` of each prompt."""
        prompt, draw = state.request.sample_key
        self.outbox.append((queue, (prompt * draws + draw, None)))

    def post_tokens(self, queue: Any, number: int, sequence: int, tokens: Sequence[int]) -> None:
        """After this step the queue gets those of all its requests at once (workers/channel.py `Kind.TOKENS`)."""
        batch = self.batches.get(queue)
        if batch is None:
            batch = self.batches[queue] = array("I")
        batch.extend((number, sequence, len(tokens)))
        batch.extend(tokens)

    def deliver(self) -> None:
        """Tokens first, then what is posted. All at once if there are few or some time has passed; else only those of
        answers that begin or end."""
        if not (self.outbox or self.outlets or self.batches):
            return
        now, count = time.monotonic(), sum([one.paced for one in self.outlets])
        if count <= CROWD or now - self.delivered > count * EVENT_SECONDS:
            due, self.outlets, self.delivered = self.outlets, [], now
        else:
            ending = {id(queue) for queue, _ in self.outbox}
            due, later = list[TokenOutlet](), list[TokenOutlet]()
            for one in self.outlets:
                (due if one.first or not one.paced or id(one.queue) in ending else later).append(one)
            self.outlets = later
        outbox = [*self.batches.items(), *[(one.queue, one.take()) for one in due], *self.outbox]
        self.batches, self.outbox = {}, []
        if outbox and not self.event_loop.is_closed():
            self.event_loop.call_soon_threadsafe(_put_all, outbox)


def _put_all(outbox: list[tuple[Any, Any]]) -> None:
    for queue, item in outbox:
        queue.put_nowait(item)
