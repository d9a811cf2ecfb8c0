"""Requests to an ASGI application, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Got(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


async def ask(
    app: Any,
    method: str,
    path: str,
    body: bytes | Iterable[bytes] = b"",
    headers: Mapping[str, str] | None = None,
    query: str = "",
    address: str = "127.0.0.1",
    hangs: bool = False,
) -> Got:
    """`body`: whole, or in parts as they arrive. `hangs`: the last part never comes."""
    parts = [body] if isinstance(body, bytes) else list(body)
    given = {"host": "localhost", **(headers or {})}
    if isinstance(body, bytes):
        given.setdefault("content-length", str(len(body)))
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    for number, part in enumerate(parts, 1):
        messages.put_nowait({"type": "http.request", "body": part, "more_body": hangs or number < len(parts)})
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in given.items()],
        "client": (address, 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    await app(scope, messages.get, send)
    start = sent[0]
    found = {name.decode(): value.decode("latin-1") for name, value in start["headers"]}
    return Got(start["status"], found, b"".join(message.get("body", b"") for message in sent[1:]))
