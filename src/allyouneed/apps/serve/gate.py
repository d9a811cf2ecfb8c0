"""What every request passes before its route: Host and key, limits on body, time and number, and the end of the server.

The route runs as a task of its own. When the client disconnects, the task is cancelled, so that a route only has to
release what it holds when it is cancelled, whether it streams or not.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from allyouneed.apps.serve.engine.forward import current_client
from allyouneed.apps.serve.errors import LIBRE_ROUTES, ApiError, internal_error, log, log_failure
from allyouneed.apps.serve.metrics import Metrics
from allyouneed.apps.serve.page import is_open
from allyouneed.apps.serve.security import Keys, body_key, check_host, header
from allyouneed.apps.serve.settings import Settings
from allyouneed.apps.serve.unknown_fields import HEADER, begin_request, header_value

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

SHOWN = 2000  # bytes of a body in the log
DISCARD, DISCARD_SECONDS = 4, 1.0  # what is read of a refused body: multiples of the limit, and seconds
ALWAYS = ("/healthz", "/readyz", "/metrics")  # answered by a busy or stopping server too


class Gate:
    """ASGI middleware. `in_progress`: requests that were accepted and not yet answered. `draining`: the server is
    stopping, and new requests get status 503."""

    def __init__(self, app: App, settings: Settings, metrics: Metrics) -> None:
        self.app, self.settings, self.limits, self.metrics = app, settings, settings.limits, metrics
        self.keys = Keys(settings.keys)
        self.in_progress, self.buffered, self.draining = 0, 0, False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        answer = Answer(send, scope["path"], begin_request())
        started = time.monotonic()
        self.in_progress += 1
        try:
            self._admit(scope)
            body = await self._read_body(scope, receive)
            if scope["state"]["client"] is None:
                found = body_key(scope["headers"], body)
                scope["state"]["client"] = self.keys.client(scope["headers"], scope["query_string"], found)
            self.buffered += len(body)
            try:
                current_client.set(scope["state"]["client"])
                if self.settings.log_texts:
                    log.info("%s %s %r", scope["method"], scope["path"], body[:SHOWN])
                await self._run(scope, body, receive, answer)
            finally:
                self.buffered -= len(body)
        except ApiError as error:
            await answer.fail(error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log_failure(error, "internal error", self.settings.log_texts)
            await answer.fail(internal_error())
        finally:
            self.in_progress -= 1
            seconds = time.monotonic() - started
            self.metrics.answered(scope["method"], answer.status, seconds)
            log.info("%s %s %s %.3f s", scope["method"], scope["path"], answer.status or "left", seconds)

    def _admit(self, scope: Message) -> None:
        headers = scope["headers"]
        if (size := sum([len(name) + len(value) for name, value in headers])) > self.limits.header_bytes:
            raise ApiError(f"the header has {size} bytes, the limit is {self.limits.header_bytes}", 431)
        check_host(self.settings, headers)
        address = scope.get("client") or ("unknown", 0)
        try:
            client = self.keys.client(headers, scope["query_string"]) if self.keys else f"address {address[0]}"
        except ApiError:
            if scope["path"] in LIBRE_ROUTES:
                client = None  # the key may be in the body
            elif is_open(scope["method"], scope["path"], ALWAYS if self.settings.open_probes else ()):
                client = f"address {address[0]}"
            else:
                raise
        scope["state"]["client"] = client
        if scope["path"] in ALWAYS:
            return
        if self.draining:
            raise ApiError("the server is stopping", 503, code="stopping", retry_after=5)
        if self.in_progress > self.limits.concurrent:
            raise ApiError(
                f"{self.limits.concurrent} requests are in progress, the limit; try again",
                429,
                code="too_many_requests",
                retry_after=1,
            )

    async def _read_body(self, scope: Message, receive: Receive) -> bytes:
        headers = scope["headers"]
        if header(headers, b"content-encoding") not in ("", "identity"):
            raise ApiError("compressed bodies are not accepted; remove Content-Encoding", 415)
        upload = header(headers, b"content-type").lower().startswith("multipart/form-data")
        most = self.limits.upload_bytes if upload else self.limits.body_bytes
        declared = header(headers, b"content-length")
        if declared.isdigit() and int(declared[:20]) > most:
            await self._discard(receive, DISCARD * most)
            raise _too_large(declared, most)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError("the client disconnected", 400)
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        await self._discard(receive, DISCARD * most)
                        raise _too_large(size, most)
                    if self.buffered + size > self.limits.buffered_bytes:
                        raise ApiError("the server is busy with large requests; try again", 429, retry_after=1)
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(f"the body did not arrive within {self.limits.body_seconds:g} s", 408) from None

    async def _discard(self, receive: Receive, most: int) -> None:
        """Read what a client is still sending, within bounds: a connection that is closed with unread data is reset,
        and the client may never see the answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(min(DISCARD_SECONDS, self.limits.body_seconds)):
                while most > 0:
                    message = await receive()
                    if not message.get("more_body"):
                        return
                    most -= len(message.get("body", b""))

    async def _run(self, scope: Message, body: bytes, receive: Receive, answer: Answer) -> None:
        replay = Replay(body)
        route = asyncio.ensure_future(self.app(scope, replay.receive, answer.send))
        left = asyncio.ensure_future(_disconnected(receive))
        try:
            done, _ = await asyncio.wait(
                {route, left}, timeout=self.limits.request_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise ApiError(f"not answered within {self.limits.request_seconds:g} s", 504, code="timeout")
            if route in done:
                route.result()
        finally:
            left.cancel()
            if not route.done():
                route.cancel()
                await asyncio.wait({route})


class Replay:
    """Hands a body that was read to the route, and then waits: the gate watches the connection."""

    def __init__(self, body: bytes) -> None:
        self.body: bytes | None = body

    async def receive(self) -> Message:
        if self.body is None:
            await asyncio.Event().wait()
        body, self.body = self.body, None
        return {"type": "http.request", "body": body, "more_body": False}


class Answer:
    """The answer to a request: remembers its status, turns errors into the form of its API, and names the fields of the
    request that were `ignored`."""

    def __init__(self, send: Send, path: str, ignored: list[str]) -> None:
        self._send, self.path, self.ignored, self.status = send, path, ignored, 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.ignored:
                named = (HEADER.lower().encode(), header_value(self.ignored).encode())
                message = {**message, "headers": [*message.get("headers", ()), named]}
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        if self.status:  # too late for another status: the connection is closed
            return
        content = json.dumps(error.body(self.path), ensure_ascii=False).encode()
        fields = {"Content-Type": "application/json", "Content-Length": str(len(content)), **error.headers}
        if error.status in (408, 413, 431, 503):
            fields["Connection"] = "close"
        headers = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
        await self.send({"type": "http.response.start", "status": error.status_for(self.path), "headers": headers})
        await self.send({"type": "http.response.body", "body": content})


def _too_large(size: int | str, most: int) -> ApiError:
    return ApiError(f"the body has {size} bytes, the limit is {most}", 413, code="body_too_large")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
