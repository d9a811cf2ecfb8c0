"""Messages between API processes and an engine process, over a Unix socket.

A message is a header (length of the rest, kind, number of the request) and its payload: JSON, bytes of an HTTP body, or
token ids. All tokens that a step adds to the answers of one API process are one message; so are all answers it ends.
"""

from __future__ import annotations

import asyncio
import json
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

from allyouneed.apps.serve.errors import ApiError, internal_error
from allyouneed.errors import UserError

if TYPE_CHECKING:
    from allyouneed.infer.decoding.base import Hypothesis
    from allyouneed.infer.request import Request

HEADER = struct.Struct("<IBI")
JSON_SIZE = struct.Struct("<I")
END = struct.Struct("<IIdII?3x")  # request, sequence, log-probability, its terms, tokens, whether it is finished
HIGH_WATER = 1 << 20  # bytes that wait for a slow reader before HTTP bodies wait, too


class Kind(IntEnum):
    # of an API process
    OPEN = 1  # load a model and describe it
    GENERATE = 2  # the sequences of one request
    HTTP = 3  # a request of a route that the engine process answers
    CANCEL = 4
    # of an engine process
    REPLY = 5  # to OPEN
    ACCEPTED = 6  # numbers of GENERATE requests, each an unsigned int
    FAIL = 7  # instead of any other answer
    TOKENS = 8  # of all requests: number of the request, of the sequence, count, tokens; each an unsigned int
    RECORDS = 9  # tokens with log-probabilities
    ENDS = 10  # of sequences of all requests, each with one answer: `END` and its tokens
    END = 11  # of another sequence: several answers, or none
    START = 12  # status and headers of an HTTP answer
    BODY = 13  # a part of it; the first byte: whether more follows


class MessageChannel(asyncio.Protocol):
    """One end of a connection."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.received = bytearray()
        self.outgoing: list[bytes] = []
        self.ends: list[bytes] = []  # not yet in `outgoing`
        self.flushes = False  # at the end of this turn of the event loop
        self.writable = asyncio.Event()
        self.writable.set()

    def on_message(self, kind: int, number: int, payload: bytes) -> None:
        raise NotImplementedError

    def after_messages(self) -> None:
        """All messages that have arrived together were handed over."""

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
            self.after_messages()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.writable.set()

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(self, kind: int, number: int, *parts: bytes) -> None:
        """At the end of this turn of the event loop, with everything else that is sent in it."""
        self._flush_soon()
        self.outgoing += (HEADER.pack(sum(map(len, parts)), kind, number), *parts)

    def send_json(self, kind: int, number: int, content: Any) -> None:
        self.send(kind, number, to_bytes(content))

    def send_end(self, number: int, sequence: int, one: Hypothesis, tokens: Sequence[int]) -> None:
        """After all else that is sent in this turn."""
        self._flush_soon()
        head = END.pack(number, sequence, one.log_prob, len(one.log_probs), len(tokens), one.finished)
        self.ends += (head, pack_numbers(tokens))

    def _flush_soon(self) -> None:
        if not self.flushes:
            self.flushes = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self.flushes = False
        if self.ends:
            ends, self.ends = self.ends, []
            self.outgoing += (HEADER.pack(sum(map(len, ends)), Kind.ENDS, 0), *ends)
        outgoing, self.outgoing = self.outgoing, []
        if not self.transport.is_closing():
            self.transport.write(b"".join(outgoing))


def to_bytes(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def with_body(content: Any, body: bytes) -> tuple[bytes, bytes, bytes]:
    """Parts of a payload: JSON and bytes."""
    head = to_bytes(content)
    return JSON_SIZE.pack(len(head)), head, body


def split_body(payload: bytes) -> tuple[bytes, bytes]:
    """JSON, not yet parsed, and bytes."""
    (size,) = JSON_SIZE.unpack_from(payload)
    end = JSON_SIZE.size + size
    return payload[JSON_SIZE.size : end], payload[end:]


def pack_numbers(numbers: Iterable[int]) -> bytes:
    return array("I", numbers).tobytes()


def split_numbers(payload: bytes) -> list[int]:
    values = array("I")
    values.frombytes(payload)
    return values.tolist()


def pack_requests(requests: Sequence[Request], seed: int) -> bytes:
    """How many, their lengths, the most new tokens of each, a seed, and their tokens."""
    lengths, limits = [len(one.prompt) for one in requests], [one.limit for one in requests]
    prompts = chain.from_iterable([one.prompt for one in requests])
    return pack_numbers(chain([len(requests)], lengths, limits, divmod(seed, 1 << 32), prompts))


def split_requests(payload: bytes) -> tuple[list[Request], int]:
    from allyouneed.infer.request import Request

    values = split_numbers(payload)
    count = values[0]
    lengths, limits = values[1 : 1 + count], values[1 + count : 1 + 2 * count]
    high, low = values[1 + 2 * count : 3 + 2 * count]
    ends = pairwise(accumulate(lengths, initial=3 + 2 * count))
    found = [Request(values[begin:end], limit, ()) for (begin, end), limit in zip(ends, limits, strict=True)]
    return found, high << 32 | low


def split_tokens(payload: bytes) -> Iterator[tuple[int, int, list[int]]]:
    """Number of the request, of the sequence, and its new tokens."""
    found, at = split_numbers(payload), 0
    while at < len(found):
        end = at + 3 + found[at + 2]
        yield found[at], found[at + 1], found[at + 3 : end]
        at = end


def split_ends(payload: bytes) -> Iterator[tuple[int, int, Hypothesis]]:
    """Number of the request, of the sequence, and its answer. Of log-probabilities only their sum and number are
    known."""
    from allyouneed.infer.decoding.base import Hypothesis

    at = 0
    while at < len(payload):
        number, sequence, log_prob, terms, tokens, finished = END.unpack_from(payload, at)
        begin, at = at + END.size, at + END.size + 4 * tokens
        yield number, sequence, Hypothesis(split_numbers(payload[begin:at]), 0.0, log_prob, [0.0] * terms, finished)


def error_content(error: BaseException) -> dict[str, Any]:
    """What a client reads about an error: all of an error of ours, nothing of another."""
    if isinstance(error, UserError) and not isinstance(error, ApiError):
        error = ApiError(str(error))
    known = error if isinstance(error, ApiError) else internal_error()
    names = ("message", "status", "param", "code", "retry_after")
    return {name: getattr(known, name) for name in names}
