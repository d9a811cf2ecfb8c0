"""Messages between API processes and an engine process, over a Unix socket.

A message is a header (length of the rest, kind, number of the request) and its payload: JSON, bytes of an HTTP body, or
token ids. All tokens that a step adds to the answers of one API process are one message, and are written at once.
"""

from __future__ import annotations

import asyncio
import json
import struct
from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

from allyouneed.errors import UserError
from allyouneed.serve.errors import ApiError, internal_error

HEADER = struct.Struct("<IBI")
JSON_SIZE = struct.Struct("<I")
HIGH_WATER = 1 << 20  # bytes that wait for a slow reader before HTTP bodies wait, too


class Kind(IntEnum):
    # of an API process
    OPEN = 1  # load a model and describe it
    GENERATE = 2  # the sequences of one request
    HTTP = 3  # a request of a route that the engine process answers
    CANCEL = 4
    # of an engine process
    REPLY = 5  # to OPEN; to GENERATE: accepted
    FAIL = 6  # instead of any other answer
    TOKENS = 7  # of all requests: number of the request, of the sequence, count, tokens; each an unsigned int
    RECORDS = 8  # tokens with log-probabilities
    END = 9  # of a sequence
    START = 10  # status and headers of an HTTP answer
    BODY = 11  # a part of it; the first byte: whether more follows


class Channel(asyncio.Protocol):
    """One end of a connection."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.received = bytearray()
        self.outgoing: list[bytes] = []
        self.tokens = array("I")  # not yet in `outgoing`
        self.writable = asyncio.Event()
        self.writable.set()

    def on_message(self, kind: int, number: int, payload: bytes) -> None:
        raise NotImplementedError

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(HIGH_WATER)

    def data_received(self, data: bytes) -> None:
        self.received += data
        buffer, at = self.received, 0
        while len(buffer) - at >= HEADER.size:
            length, kind, number = HEADER.unpack_from(buffer, at)
            begin = at + HEADER.size
            if len(buffer) - begin < length:
                break
            at = begin + length
            self.on_message(kind, number, bytes(memoryview(buffer)[begin:at]))
        if at:
            del buffer[:at]

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.writable.set()

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(self, kind: int, number: int, *parts: bytes) -> None:
        """At the end of this turn of the event loop, with everything else that is sent in it."""
        self._seal_tokens()
        self._add(HEADER.pack(sum(map(len, parts)), kind, number), *parts)

    def send_json(self, kind: int, number: int, content: Any) -> None:
        self.send(kind, number, to_bytes(content))

    def send_tokens(self, number: int, sequence: int, tokens: Sequence[int]) -> None:
        if not self.tokens and not self.outgoing:
            self._add()
        self.tokens.extend((number, sequence, len(tokens)))
        self.tokens.extend(tokens)

    def _seal_tokens(self) -> None:
        if self.tokens:
            payload, self.tokens = self.tokens.tobytes(), array("I")
            self.outgoing += (HEADER.pack(len(payload), Kind.TOKENS, 0), payload)

    def _add(self, *parts: bytes) -> None:
        if not self.outgoing and not self.tokens:
            asyncio.get_running_loop().call_soon(self._flush)
        self.outgoing += parts

    def _flush(self) -> None:
        self._seal_tokens()
        outgoing, self.outgoing = self.outgoing, []
        if not self.transport.is_closing():
            self.transport.write(b"".join(outgoing))


def to_bytes(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def with_body(content: Any, body: bytes) -> tuple[bytes, bytes, bytes]:
    """Parts of a payload: JSON and bytes."""
    head = to_bytes(content)
    return JSON_SIZE.pack(len(head)), head, body


def split_body(payload: bytes) -> tuple[Any, bytes]:
    (size,) = JSON_SIZE.unpack_from(payload)
    end = JSON_SIZE.size + size
    return json.loads(payload[JSON_SIZE.size : end]), payload[end:]


def split_tokens(payload: bytes) -> Iterator[tuple[int, int, list[int]]]:
    """Number of the request, of the sequence, and its new tokens."""
    values = array("I")
    values.frombytes(payload)
    found, at = values.tolist(), 0
    while at < len(found):
        end = at + 3 + found[at + 2]
        yield found[at], found[at + 1], found[at + 3 : end]
        at = end


def error_content(error: BaseException) -> dict[str, Any]:
    """What a client reads about an error: all of an error of ours, nothing of another."""
    if isinstance(error, UserError) and not isinstance(error, ApiError):
        error = ApiError(str(error))
    known = error if isinstance(error, ApiError) else internal_error()
    names = ("message", "status", "param", "code", "retry_after")
    return {name: getattr(known, name) for name in names}
