"""An engine process: it has the models and their engine loops, and no HTTP. API processes (api_process.py) send it
token ids to continue, and whole requests of the routes that need a model at hand (embeddings, translation, …)."""

from __future__ import annotations

import asyncio
import json
import socket
from array import array
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from allyouneed.apps.serve.engine.forward import current_client
from allyouneed.apps.serve.engine.registry import Entry
from allyouneed.apps.serve.errors import ApiError, internal_error, log_failure
from allyouneed.apps.serve.gate import Answer, Gate, Replay
from allyouneed.apps.serve.unknown_fields import begin_request
from allyouneed.apps.serve.workers.channel import (
    Kind,
    MessageChannel,
    error_content,
    pack_numbers,
    split_body,
    split_requests,
)
from allyouneed.errors import UserError
from allyouneed.runtime.process import stop_signals_handled

if TYPE_CHECKING:
    from allyouneed.apps.serve.engine.delivery import Delivery
    from allyouneed.apps.serve.engine.loop import Wanted
    from allyouneed.apps.serve.engine.served_model import ServedModel
    from allyouneed.infer.decoding.base import RequestState
    from allyouneed.infer.decoding.options import Decoding
    from allyouneed.infer.request import Request

Message = MutableMapping[str, Any]
KNOWN = 256  # kinds of requests


class EngineServer:
    """Serves API processes on a Unix socket. `gate`: of an application with models; only what is behind it is used."""

    def __init__(self, gate: Gate) -> None:
        app: Any = gate.app
        self.app, self.registry = app, app.state.registry
        self.connections: set[ApiConnection] = set()
        self.stopping = asyncio.Event()

    async def serve(self, listener: socket.socket, grace: float = 0.0) -> None:
        """Until `stopping` is set; then, for at most `grace` seconds, until all API processes have finished."""
        async with self.app.router.lifespan_context(self.app):
            server = await asyncio.get_running_loop().create_unix_server(lambda: ApiConnection(self), sock=listener)
            await self.stopping.wait()
            end = asyncio.get_running_loop().time() + grace
            while self.connections and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(0.02)
            server.close()
            for connection in list(self.connections):
                connection.transport.abort()


def run(gate: Gate, listener: socket.socket, grace: float) -> None:
    """Until a signal."""

    async def serve() -> None:
        server, event_loop = EngineServer(gate), asyncio.get_running_loop()
        with stop_signals_handled(lambda *_: event_loop.call_soon_threadsafe(server.stopping.set)):
            await server.serve(listener, grace)

    asyncio.run(serve())


class ApiConnection(MessageChannel):
    """The requests of one API process. When it ends, they are cancelled."""

    def __init__(self, server: EngineServer) -> None:
        super().__init__()
        self.server = server
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.asked: list[tuple[int, bytes]] = []  # GENERATE messages that have just arrived
        self.generations: dict[int, RemoteGeneration] = {}

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.server.connections.discard(self)
        for task in self.tasks.values():
            task.cancel()
        for run in list(self.generations.values()):
            run.cancel()

    def on_message(self, kind: int, number: int, payload: bytes) -> None:
        if kind == Kind.GENERATE:
            self.asked.append((number, payload))
        elif kind == Kind.CANCEL:
            self.after_messages()  # it may be among them
            if number in self.tasks:
                self.tasks[number].cancel()
            if number in self.generations:
                self.generations[number].cancel()
        else:
            self._begin({Kind.OPEN: self._open, Kind.HTTP: self._http}[Kind(kind)], number, payload)

    def put_nowait(self, tokens: array[int]) -> None:
        """Send the tokens of a step (`Delivery.post_tokens`)."""
        self.send(Kind.TOKENS, 0, tokens.tobytes())

    def after_messages(self) -> None:
        if self.asked:
            asked, self.asked = self.asked, []
            self._generate(asked)

    def _begin(self, answer: Callable[[int, bytes], Awaitable[None]], number: int, payload: bytes) -> None:
        task = asyncio.ensure_future(self._answer(answer, number, payload))
        self.tasks[number] = task
        task.add_done_callback(lambda _: self.tasks.pop(number, None))

    async def _answer(self, answer: Callable[[int, bytes], Awaitable[None]], number: int, payload: bytes) -> None:
        try:
            await answer(number, payload)
        except Exception as error:
            self._fail(number, error)

    def _fail(self, number: int, error: Exception) -> None:
        if not isinstance(error, UserError):
            log_failure(error, "a request failed")
        self.send_json(Kind.FAIL, number, error_content(error))

    async def _open(self, number: int, payload: bytes) -> None:
        async with self.server.registry.use(json.loads(payload)) as model:
            self.send_json(Kind.REPLY, number, model.description)

    def _generate(self, asked: list[tuple[int, bytes]]) -> None:
        """Requests that have arrived together are submitted together, without a task for each: when the answers of many
        clients end at once, their next requests arrive at once, and the engine's thread waits for this one."""
        runs: dict[ServedModel, list[tuple[RemoteGeneration, list[Wanted]]]] = {}
        for number, payload in asked:
            try:
                head, requests = split_body(payload)
                wanted = parse_wanted(head)
                entry = self.server.registry.find(wanted.model)
                if entry.model is None:
                    self._begin(self._generate_when_loaded, number, payload)
                else:
                    run = RemoteGeneration(self, number, entry, wanted)
                    runs.setdefault(entry.model, []).append((run, run.sequences(*split_requests(requests))))
            except Exception as error:
                self._fail(number, error)
        for model, some in runs.items():
            post_end = model.loop.delivery.post_end
            found = model.loop.submit_each(
                [(sequences, run.wanted.exact, partial(post_end, run, run.wanted.draws)) for run, sequences in some]
            )
            for (run, _), states in zip(some, found, strict=True):
                if isinstance(states, Exception):
                    self._fail(run.number, states)
                else:
                    run.begin(states)
            if accepted := [run.number for run, _ in some if run.states]:
                self.send(Kind.ACCEPTED, 0, pack_numbers(accepted))

    async def _generate_when_loaded(self, number: int, payload: bytes) -> None:
        async with self.server.registry.use(parse_wanted(split_body(payload)[0]).model):
            self._generate([(number, payload)])

    async def _http(self, number: int, payload: bytes) -> None:
        head, body = split_body(payload)
        given = json.loads(head)

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in message["headers"]]
                self.send_json(Kind.START, number, [message["status"], headers])
            else:
                more = bool(message.get("more_body"))
                self.send(Kind.BODY, number, bytes([more]), message.get("body", b""))
                await self.writable.wait()

        answer = Answer(send, given["path"], begin_request())
        state = {"client": given["client"]}
        current_client.set(given["client"])
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "root_path": "",
            "method": given["method"],
            "path": given["path"],
            "raw_path": given["raw_path"].encode("latin-1"),
            "query_string": given["query_string"].encode("latin-1"),
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in given["headers"]],
            "client": None,
            "server": None,
            "state": state,
        }
        try:
            await self.server.app(scope, Replay(body).receive, answer.send)
        except ApiError as error:
            await answer.fail(error)
        except Exception as error:
            log_failure(error, "internal error", self.server.app.state.settings.log_texts)
            await answer.fail(internal_error())


class WantedGeneration(NamedTuple):
    """What a GENERATE message asks for, besides its requests and a seed. `rules`: arguments of `LogitsRules`."""

    model: str
    decoding: Decoding
    rules: Sequence[Any] | None
    draws: int
    exact: bool
    client: str
    streams: bool


@lru_cache(KNOWN)
def parse_wanted(head: bytes) -> WantedGeneration:
    """Most requests of a client are alike: those that differ in nothing but their prompts are parsed once."""
    from allyouneed.infer.decoding.options import Decoding  # imports torch

    content = json.loads(head)
    if (rules := content["rules"]) is not None:
        rules[0] = {int(token): value for token, value in rules[0].items()}
    return WantedGeneration(**content | {"decoding": Decoding(**content["decoding"])})


class RemoteListener:
    """The listener of a streamed sequence: its tokens join those of all streams of the API process."""

    def __init__(self, delivery: Delivery, connection: ApiConnection, number: int, sequence: int) -> None:
        self.delivery, self.connection, self.number, self.sequence = delivery, connection, number, sequence

    def __call__(self, token: int) -> None:
        self.extend((token,))

    def extend(self, tokens: Sequence[int]) -> None:
        self.delivery.post_tokens(self.connection, self.number, self.sequence, tokens)


class RemoteGeneration:
    """The sequences of a client of an API process, and their queue: what is put into it is sent. The model is not
    unloaded before they have ended."""

    paced = False

    def __init__(self, connection: ApiConnection, number: int, entry: Entry, wanted: WantedGeneration) -> None:
        self.connection, self.number, self.entry, self.wanted = connection, number, entry, wanted
        self.model: ServedModel = entry.model
        # at the end: the stream has not had them
        self.sends_tokens = not wanted.streams or wanted.decoding.method == "beam"
        self.states: Sequence[RequestState] = ()
        self.left = 0

    def sequences(self, requests: list[Request], seed: int) -> list[Wanted]:
        """To be submitted."""
        from allyouneed.apps.serve.engine.logits_rules import LogitsRules  # imports torch
        from allyouneed.apps.serve.engine.text_models import LanguageModel, with_seed

        wanted, model, text = self.wanted, self.model, self.model.text
        assert isinstance(text, LanguageModel)
        spec = text.spec_of(wanted.decoding)
        if seed:
            spec = with_seed(spec, seed)
        if wanted.rules is not None:
            spec = replace(spec, logits_processor=LogitsRules(*wanted.rules))
        specs, delivery = [spec] * len(requests), model.loop.delivery
        return text.sequences(requests, specs, wanted.draws, wanted.client, delivery, self, wanted.streams)

    def begin(self, states: Sequence[RequestState]) -> None:
        self.states, self.left = states, len(states)
        self.entry.used += 1
        self.connection.generations[self.number] = self

    def cancel(self) -> None:
        self.model.cancel(self.states)
        self._end()

    def _end(self) -> None:
        self.states = ()  # they refer to this queue: without them it is freed at once, not by the next collection
        del self.connection.generations[self.number]
        self.entry.end_use()

    def listener(self, delivery: Delivery, sequence: int) -> RemoteListener:
        return RemoteListener(delivery, self.connection, self.number, sequence)

    def put_nowait(self, item: tuple[int, list[Any] | None]) -> None:
        sequence, records = item
        if self.connection.generations.get(self.number) is not self:
            return  # cancelled
        if records is None:
            self._send_end(sequence)
        else:
            self.connection.send_json(Kind.RECORDS, self.number, [sequence, records])

    def _send_end(self, sequence: int) -> None:
        state, connection = self.states[sequence], self.connection
        found = [(one, one.tokens if self.sends_tokens else []) for one in state.hypotheses]
        if state.done and state.error is None and len(found) == 1:
            connection.send_end(self.number, sequence, *found[0])
        else:
            content: dict[str, Any] = {"sequence": sequence, "done": state.done}
            if state.error is not None:
                content["error"] = error_content(state.error)
            elif state.done:
                content["hypotheses"] = [
                    [tokens, one.log_prob, len(one.log_probs), one.finished] for one, tokens in found
                ]
            connection.send_json(Kind.END, self.number, content)
        self.left -= 1
        if not self.left:
            self._end()
