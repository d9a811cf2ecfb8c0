"""An API process's connection to an engine process, and the requests that it is waiting for."""

from __future__ import annotations

import asyncio
import itertools
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allyouneed.apps.serve.errors import ApiError, log
from allyouneed.apps.serve.workers.channel import Kind, MessageChannel, split_ends, split_numbers, split_tokens

if TYPE_CHECKING:
    from allyouneed.apps.serve.engine.sequences import SequenceGroup
    from allyouneed.infer.decoding.base import Hypothesis

RETRY = 0.1  # seconds between attempts to connect


class PendingRequest(ABC):
    """A request that has not been answered completely. `accepted`: the first reply, or why there is none."""

    def __init__(self, engine: EngineConnection) -> None:
        self.engine, self.number = engine, 0
        self.accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.accepted.add_done_callback(_retrieve)

    @abstractmethod
    def receive(self, kind: int, payload: bytes) -> bool:
        """A message; whether it is the last one."""

    def fail(self, error: ApiError) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(error)

    def cancel(self) -> None:
        """No effect once it is answered."""
        self.engine.cancel(self)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """An error that is not awaited, because the client has left, is not logged."""
    if not future.cancelled():
        future.exception()


class Question(PendingRequest):
    """With one reply."""

    def receive(self, kind: int, payload: bytes) -> bool:
        if not self.accepted.done():
            self.accepted.set_result(json.loads(payload))
        return True


class RemoteSequences(PendingRequest):
    """The sequences of a `SequenceGroup`. Of their states, `done`, `error` and `hypotheses` are known at their end."""

    def __init__(self, engine: EngineConnection, group: SequenceGroup) -> None:
        from allyouneed.infer.decoding.base import RequestState  # imports torch

        super().__init__(engine)
        self.queue, self.left = group.queue, group.count
        both = zip(group.requests, group.specs, strict=True)
        self.states = [RequestState(one, spec, one.limit) for one, spec in both for _ in range(group.draws)]

    def receive(self, kind: int, payload: bytes) -> bool:
        content = json.loads(payload)
        if kind == Kind.RECORDS:
            self._add_records(*content)
            return False
        return self._end(**content)

    def _add_records(self, sequence: int, records: list[Any]) -> None:
        from allyouneed.apps.serve.engine.logits_rules import TokenRecord  # imports torch

        found = [TokenRecord(token, value, tuple((n, one) for n, one in top)) for token, value, top in records]
        self.queue.put_nowait((sequence, found))

    def _end(self, sequence: int, done: bool, error: Any = None, hypotheses: Any = ()) -> bool:
        from allyouneed.infer.decoding.base import Hypothesis

        found = [Hypothesis(tokens, 0.0, log_prob, [0.0] * n, ended) for tokens, log_prob, n, ended in hypotheses]
        return self.end(sequence, found, done, None if error is None else ApiError(**error))

    def end(
        self, sequence: int, hypotheses: list[Hypothesis], done: bool = True, error: ApiError | None = None
    ) -> bool:
        """Record the end of a sequence; return whether it is the last one."""
        state = self.states[sequence]
        state.hypotheses, state.done, state.error = hypotheses, done, error
        self.left -= 1
        self.queue.put_nowait((sequence, None))
        return not self.left

    def fail(self, error: ApiError) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(error)
            return
        for number, state in enumerate(self.states):
            if not state.done and state.error is None:
                state.error = error
                self.queue.put_nowait((number, None))


class ForwardedRequest(PendingRequest):
    """A request that the engine process answers. `messages`: ASGI's, of the answer, or the error that ended it."""

    def __init__(self, engine: EngineConnection) -> None:
        super().__init__(engine)
        self.messages: asyncio.Queue[dict[str, Any] | ApiError] = asyncio.Queue()

    def receive(self, kind: int, payload: bytes) -> bool:
        if kind == Kind.START:
            status, headers = json.loads(payload)
            encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
            self.messages.put_nowait({"type": "http.response.start", "status": status, "headers": encoded})
            return False
        more = bool(payload[0])
        self.messages.put_nowait({"type": "http.response.body", "body": payload[1:], "more_body": more})
        return not more

    def fail(self, error: ApiError) -> None:
        self.messages.put_nowait(error)


class EngineConnection(MessageChannel):
    """To one engine process, which may end and be started again: then the pending requests have failed, and new ones
    wait until it is connected."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.pending: dict[int, PendingRequest] = {}
        self.numbers = itertools.count(1)
        self.connected = asyncio.Event()
        self.closing = False
        self.connecting: asyncio.Task[None] | None = None

    def connect(self) -> None:
        self.connecting = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        """The supervisor keeps the socket open: while the engine process starts, the connection waits for it."""
        while not self.closing:
            try:
                await asyncio.get_running_loop().create_unix_connection(lambda: self, str(self.path))
                return
            except OSError:
                await asyncio.sleep(RETRY)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.received.clear()
        self.connected.set()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.connected.clear()
        pending, self.pending = self.pending, {}
        for request in pending.values():
            request.fail(engine_ended())
        if not self.closing:
            log.error("the engine process has ended; %d requests failed", len(pending))
            self.connect()

    def close(self) -> None:
        self.closing = True
        if self.connecting is not None:
            self.connecting.cancel()
        if self.transport is not None:
            self.transport.close()

    async def ask(self, request: PendingRequest, kind: Kind, *parts: bytes) -> None:
        await self.connected.wait()
        request.number = next(self.numbers)
        self.pending[request.number] = request
        self.send(kind, request.number, *parts)

    def cancel(self, request: PendingRequest) -> None:
        if self.pending.pop(request.number, None) is not None:
            self.send(Kind.CANCEL, request.number)

    def on_message(self, kind: int, number: int, payload: bytes) -> None:
        pending = self.pending
        if kind == Kind.TOKENS:
            for owner, sequence, tokens in split_tokens(payload):
                request = pending.get(owner)
                if isinstance(request, RemoteSequences):  # else it was cancelled
                    request.queue.put_nowait((sequence, tokens))
        elif kind == Kind.ENDS:
            for owner, sequence, hypothesis in split_ends(payload):
                request = pending.get(owner)
                if isinstance(request, RemoteSequences) and request.end(sequence, [hypothesis]):
                    del pending[owner]
        elif kind == Kind.ACCEPTED:
            for owner in split_numbers(payload):
                if (request := pending.get(owner)) is not None:
                    request.accepted.set_result(None)
        elif (request := pending.get(number)) is None:
            return
        elif kind == Kind.FAIL:
            del pending[number]
            request.fail(ApiError(**json.loads(payload)))
        elif request.receive(kind, payload):
            del pending[number]


def engine_ended() -> ApiError:
    return ApiError("the engine process ended and is being restarted; try again", 503, None, "engine_ended", 1)
