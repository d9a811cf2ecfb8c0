"""What every request passes before its route: Host, Origin and key, limits on body, time and number,
and the end of the server.

The route runs as a task of its own. When the client disconnects, the task is cancelled, so that a route only has to
release what it holds when it is cancelled, whether it streams or not.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from itertools import chain
from typing import Any

from allyouneed.apps.serve.engine.forward import current_client
from allyouneed.apps.serve.errors import LIBRE_ROUTES, ApiError, internal_error, log, log_failure
from allyouneed.apps.serve.metrics import Metrics
from allyouneed.apps.serve.page import OPEN
from allyouneed.apps.serve.security import Headers, Keys, OriginPolicy, body_key, missing_key, preflight
from allyouneed.apps.serve.settings import Settings
from allyouneed.apps.serve.unknown_fields import HEADER, begin_request, header_value

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

SHOWN = 2000  # bytes of a body in the log
DISCARD, DISCARD_SECONDS = 4, 1.0  # what is read of a refused body: multiples of the limit, and seconds
SHARE = 0.75  # the most that one client gets of what the server can hold: others are always let in
UPLOADS = ("/v1/audio/", "/v1/documents/")  # routes that take files
PREFLIGHT = b"access-control-request-method"
ALWAYS = ("/healthz", "/readyz", "/metrics")  # answered by a busy or stopping server too


class Shares:
    """Something that requests in progress hold, of which one client gets at most a share. `what`: for messages."""

    def __init__(self, most: int, what: str, code: str) -> None:
        self.most, self.share = most, math.ceil(most * SHARE)
        self.what, self.code = what, code
        self.total, self.held = 0, Counter[str]()

    def take(self, client: str, amount: int = 1) -> None:
        if self.total + amount > self.most:
            self._refuse(f"{self.most} {self.what} in progress, the limit; try again")
        if self.held[client] + amount > self.share:
            self._refuse(f"{self.share} {self.what} of one client in progress, the limit; try again")
        self.total += amount
        self.held[client] += amount

    def give_back(self, client: str, amount: int = 1) -> None:
        self.total -= amount
        self.held[client] -= amount
        if not self.held[client]:
            del self.held[client]

    def _refuse(self, message: str) -> None:
        raise ApiError(message, 429, code=self.code, retry_after=1)


class Reservation:
    """What one request holds: a place among those in progress, and the bytes of its body, announced or received."""

    def __init__(self, requests: Shares, bodies: Shares, client: str) -> None:
        self.requests, self.bodies, self.client, self.bytes = requests, bodies, client, 0
        requests.take(client)

    def reserve(self, size: int) -> None:
        """Bytes of the body, in all."""
        if size > self.bytes:
            self.bodies.take(self.client, size - self.bytes)
            self.bytes = size

    def leave(self) -> None:
        self.requests.give_back(self.client)
        self.bodies.give_back(self.client, self.bytes)


class Gate:
    """ASGI middleware. `in_progress`: requests that were accepted and not yet answered. `draining`: the server is
    stopping, and new requests get status 503."""

    def __init__(self, app: App, settings: Settings, metrics: Metrics) -> None:
        self.app, self.settings, self.limits, self.metrics = app, settings, settings.limits, metrics
        self.keys, self.origins = Keys(settings.keys), OriginPolicy(settings)
        self.in_progress, self.draining = 0, False
        self.public = {*OPEN, *(ALWAYS if settings.open_probes else ())}  # paths that need no key
        limits = self.limits
        self.requests = Shares(limits.concurrent, "requests", "too_many_requests")
        self.keyless = Shares(limits.keyless, "requests without a key", "too_many_requests")
        self.bodies = Shares(limits.buffered_bytes, "bytes of requests", "too_many_bytes")

    @property
    def buffered(self) -> int:
        """Bytes of bodies, announced or received."""
        return self.bodies.total

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        answer = Answer(send, scope["path"], begin_request())
        started = time.monotonic()
        self.in_progress += 1
        try:
            await self._answer(scope, dict(scope["headers"]), receive, answer)
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

    async def _answer(self, scope: Message, headers: Headers, receive: Receive, answer: Answer) -> None:
        method, path = scope["method"], scope["path"]
        if (size := sum(map(len, chain.from_iterable(scope["headers"])))) > self.limits.header_bytes:
            raise ApiError(f"the header has {size} bytes, the limit is {self.limits.header_bytes}", 431)
        if b"content-length" in headers and b"transfer-encoding" in headers:  # a proxy may read another body than we
            raise ApiError("both Content-Length and Transfer-Encoding; send one", 400, code="ambiguous_length")
        public = path in self.public and method in ("GET", "HEAD")
        if headers.get(b"host") not in self.origins.hosts:
            self.origins.check_host(headers)
        if b"origin" in headers or b"sec-fetch-site" in headers:  # a browser
            answer.headers = self.origins.check_origin(headers, public)
        if method == "OPTIONS" and answer.headers and PREFLIGHT in headers:
            await answer.empty(204, preflight(headers))
            return
        client, keyed = None, bool(self.settings.keys)
        if keyed and not public:
            client = self.keys.client(headers, path, scope["query_string"])
            if client is None and path not in LIBRE_ROUTES:  # there, the key may be in the body
                raise missing_key()
        keyless = keyed and client is None
        client = client or _by_address((scope.get("client") or ("unknown",))[0])
        if path in ALWAYS:
            await self._run(scope, client, b"", receive, answer)
            return
        if self.draining:
            raise ApiError("the server is stopping", 503, code="stopping", retry_after=5)
        held = Reservation(self.keyless if keyless else self.requests, self.bodies, client)
        try:
            body = b"" if public else await self._read_body(headers, path, receive, held, keyless)
            if keyless and not public:
                client = self.keys.named(await body_key(headers, body, self.limits))
                known = Reservation(self.requests, self.bodies, client)
                held.leave()
                held = known
                held.reserve(len(body))
            if self.settings.log_texts:
                log.info("%s %s %r", method, path, body[:SHOWN])
            await self._run(scope, client, body, receive, answer)
        finally:
            held.leave()

    async def _read_body(
        self, headers: Headers, path: str, receive: Receive, held: Reservation, keyless: bool
    ) -> bytes:
        if headers.get(b"content-encoding", b"") not in (b"", b"identity"):
            raise ApiError("compressed bodies are not accepted; remove Content-Encoding", 415)
        most = self.limits.upload_bytes if path.startswith(UPLOADS) else self.limits.body_bytes
        if keyless:
            most = min(most, self.limits.keyless_bytes)
        declared = headers.get(b"content-length", b"")
        expected = int(declared[:20]) if declared.isdigit() else 0
        if expected > most:
            await self._discard(receive, DISCARD * most)
            raise _too_large(declared.decode(), most, keyless)
        if expected:
            held.reserve(expected)
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
                        parts.clear()
                        await self._discard(receive, DISCARD * most)
                        raise _too_large(size, most, keyless)
                    if size > expected:
                        held.reserve(size)
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

    async def _run(self, scope: Message, client: str, body: bytes, receive: Receive, answer: Answer) -> None:
        scope["state"]["client"] = client
        current_client.set(client)
        if scope["method"] == "HEAD":  # the server sends the header of the answer to GET, and no body
            scope = {**scope, "method": "GET"}
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
    """Hands a body that was read to the route, and then waits: who has read it watches the connection."""

    def __init__(self, body: bytes) -> None:
        self.body: bytes | None = body

    async def receive(self) -> Message:
        if self.body is None:
            await asyncio.Event().wait()
        body, self.body = self.body, None
        return {"type": "http.request", "body": body, "more_body": False}


class Answer:
    """The answer to a request: remembers its status, turns errors into the form of its API, names the fields of the
    request that were `ignored`, and adds `headers`."""

    def __init__(self, send: Send, path: str, ignored: list[str]) -> None:
        self._send, self.path, self.ignored, self.status = send, path, ignored, 0
        self.headers: list[tuple[bytes, bytes]] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            more = self.headers
            if self.ignored:
                more = [*more, (HEADER.lower().encode(), header_value(self.ignored).encode())]
            if more:
                message = {**message, "headers": [*message.get("headers", ()), *more]}
        await self._send(message)

    async def empty(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """An answer without content."""
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": b""})

    async def fail(self, error: ApiError) -> None:
        if self.status:  # too late for another status: the connection is closed
            return
        content = json.dumps(error.body(self.path), ensure_ascii=False).encode()
        fields = {"Content-Type": "application/json", "Content-Length": str(len(content)), **error.headers}
        if error.status in (408, 413, 431, 503) or error.code == "ambiguous_length":
            fields["Connection"] = "close"
        headers = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
        await self.send({"type": "http.response.start", "status": error.status_for(self.path), "headers": headers})
        await self.send({"type": "http.response.body", "body": content})


def _too_large(size: int | str, most: int, keyless: bool) -> ApiError:
    hint = "; send the key in a header, `Authorization: Bearer KEY`, for a larger one" if keyless else ""
    return ApiError(f"the body has {size} bytes, the limit is {most}{hint}", 413, code="body_too_large")


def _by_address(address: str) -> str:
    """The client at an address; of IPv6 in its network, for a machine has many addresses."""
    found: Any = address
    if ":" in address:
        with suppress(ValueError):
            exact = ipaddress.IPv6Address(address)
            found = exact.ipv4_mapped or ipaddress.IPv6Network((exact, 64), strict=False)
    return f"address {found}"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
