"""Answers that are streamed: server-sent events (OpenAI) and lines of JSON (Ollama)."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from allyouneed.apps.serve.errors import ApiError, internal_error, log_failure
from allyouneed.errors import UserError

Events = AsyncIterator[dict[str, Any]]


def to_json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def json_response(content: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(content), media_type="application/json", headers=dict(headers or {}))


async def large_response(build: Callable[[], Any]) -> Response:
    """JSON that may be long: built and encoded in a thread."""
    return await asyncio.to_thread(lambda: Response(_in_steps(build()), media_type="application/json"))


def _in_steps(content: Any) -> bytes:
    """As `to_json`, in many short calls: no other thread runs during one."""
    if isinstance(content, dict):
        return b"{" + b",".join([to_json(name) + b":" + _in_steps(value) for name, value in content.items()]) + b"}"
    if isinstance(content, list) and content and isinstance(content[0], dict | list):
        return b"[" + b",".join(map(_in_steps, content)) + b"]"
    return to_json(content)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


class StreamedResponse(Response):
    """Sends each event as it comes. An error after the first one is sent as an event of its own, for the status is
    sent already."""

    def __init__(
        self,
        first: dict[str, Any],
        events: Events,
        media_type: str,
        encode: Callable[[dict[str, Any]], bytes],
        failure: Callable[[ApiError], dict[str, Any]],
        end: bytes,
        headers: Mapping[str, str],
    ) -> None:
        self.first, self.events, self.encode, self.failure, self.end = first, events, encode, failure, end
        self.status_code, self.media_type = 200, media_type
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(content: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": content, "more_body": more})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await write(self.encode(self.first))
            try:
                async for event in self.events:
                    await write(self.encode(event))
            except UserError as error:
                known = error if isinstance(error, ApiError) else ApiError(str(error))
                await write(self.encode(self.failure(known)))
            except Exception as error:
                log_failure(error, "a stream failed")
                await write(self.encode(self.failure(internal_error())))
            await write(self.end, more=False)
        finally:
            await self.events.aclose()  # type: ignore[attr-defined]


async def event_stream(events: Events, headers: Mapping[str, str] | None = None) -> Response:
    """Server-sent events, ended by `[DONE]`. An error before the first event has a status of its own."""
    first = await anext(events)
    return StreamedResponse(
        first,
        events,
        "text/event-stream",
        lambda event: b"data: " + to_json(event) + b"\n\n",
        lambda error: error.openai(),
        b"data: [DONE]\n\n",
        headers or {},
    )


async def json_lines(events: Events) -> Response:
    """One JSON object per line."""
    first = await anext(events)
    return StreamedResponse(
        first,
        events,
        "application/x-ndjson",
        lambda event: to_json(event) + b"\n",
        lambda error: {"error": error.message},
        b"",
        {},
    )
