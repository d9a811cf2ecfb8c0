"""An engine process: it has the models and their engine loops, and no HTTP. API processes (api_process.py) send it
token ids to continue, and whole requests of the routes that need a model at hand (embeddings, translation, …)."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from allyouneed.errors import UserError
from allyouneed.serve.engine.generation import Generation
from allyouneed.serve.errors import ApiError, internal_error, log_failure
from allyouneed.serve.gate import Answer, Gate
from allyouneed.serve.sampling import GenerationOptions
from allyouneed.serve.unknown_fields import begin_request
from allyouneed.serve.workers.channel import Channel, Kind, error_content, split_body

Message = MutableMapping[str, Any]


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
    """Until SIGTERM."""

    async def serve() -> None:
        server, event_loop = EngineServer(gate), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            event_loop.add_signal_handler(number, server.stopping.set)
        await server.serve(listener, grace)

    asyncio.run(serve())


class ApiConnection(Channel):
    """The requests of one API process. When it ends, they are cancelled."""

    def __init__(self, server: EngineServer) -> None:
        super().__init__()
        self.server = server
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.server.connections.discard(self)
        for task in self.tasks.values():
            task.cancel()

    def on_message(self, kind: int, number: int, payload: bytes) -> None:
        if kind == Kind.CANCEL:
            if number in self.tasks:
                self.tasks[number].cancel()
            return
        answer = {Kind.OPEN: self._open, Kind.GENERATE: self._generate, Kind.HTTP: self._http}[Kind(kind)]
        task = asyncio.ensure_future(self._answer(answer, number, payload))
        self.tasks[number] = task
        task.add_done_callback(lambda _: self.tasks.pop(number, None))

    async def _answer(self, answer: Callable[[int, bytes], Awaitable[None]], number: int, payload: bytes) -> None:
        try:
            await answer(number, payload)
        except Exception as error:
            if not isinstance(error, UserError):
                log_failure(error, "a request failed")
            self.send_json(Kind.FAIL, number, error_content(error))

    async def _open(self, number: int, payload: bytes) -> None:
        async with self.server.registry.use(json.loads(payload)) as model:
            self.send_json(Kind.REPLY, number, model.description)

    async def _generate(self, number: int, payload: bytes) -> None:
        from allyouneed.serve.engine.text_models import EncodedPrompt  # imports torch

        wanted = json.loads(payload)
        streams, options = wanted["streams"], options_from(wanted["options"])
        async with self.server.registry.use(wanted["model"]) as model:
            run = Generation(model, [EncodedPrompt(ids, ids) for ids in wanted["prompts"]], options, wanted["client"])
            run.queue = outlet = SequenceOutlet(self, number, run, tokens=not streams or options.beam is not None)
            try:
                await run.start(streams)
                self.send(Kind.REPLY, number, b"null")
                await outlet.ended.wait()
            finally:
                run.cancel()

    async def _http(self, number: int, payload: bytes) -> None:
        given, body = split_body(payload)
        asked = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            if (message := next(asked, None)) is not None:
                return message
            await asyncio.Event().wait()  # the API process watches the connection, and cancels
            raise AssertionError

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
            await self.server.app(scope, receive, answer.send)
        except ApiError as error:
            await answer.fail(error)
        except Exception as error:
            log_failure(error, "internal error", self.server.app.state.settings.log_texts)
            await answer.fail(internal_error())


class SequenceOutlet:
    """The queue of a generation whose client is in an API process: what is put into it is sent. `tokens`: the ends of
    sequences have theirs."""

    paced = False

    def __init__(self, connection: ApiConnection, number: int, run: Generation, tokens: bool) -> None:
        self.connection, self.number, self.run, self.tokens = connection, number, run, tokens
        self.left = len(run.choices)
        self.records = run.options.logprobs is not None
        self.ended = asyncio.Event()

    def put_nowait(self, item: tuple[int, list[Any] | None]) -> None:
        sequence, tokens = item
        if tokens is None:
            self._end(sequence)
        elif self.records:
            self.connection.send_json(Kind.RECORDS, self.number, [sequence, tokens])
        else:
            self.connection.send_tokens(self.number, sequence, tokens)

    def _end(self, sequence: int) -> None:
        job = self.run.jobs[sequence]
        content: dict[str, Any] = {"sequence": sequence, "done": job.done}
        if job.error is not None:
            content["error"] = error_content(job.error)
        elif job.done:
            content["hypotheses"] = [
                [one.tokens if self.tokens else [], one.log_prob, len(one.log_probs), one.finished]
                for one in job.hypotheses
            ]
        self.connection.send_json(Kind.END, self.number, content)
        self.left -= 1
        if not self.left:
            self.ended.set()


def options_from(content: dict[str, Any]) -> GenerationOptions:
    bias = {int(token): value for token, value in content.pop("logit_bias").items()}
    return GenerationOptions(**content | {"stop": tuple(content["stop"]), "logit_bias": bias})
