"""The process: uvicorn with a timeout for headers, and an orderly end.

After SIGTERM, SIGINT or SIGHUP the server still listens: new requests get status 503, accepted ones are finished, and
then it exits. A second one of the first two, or the end of the grace period, cuts off what is left.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from allyouneed.apps.serve.gate import Gate
from allyouneed.apps.serve.listener import listen as listen
from allyouneed.apps.serve.settings import Settings
from allyouneed.runtime.process import HANG_UP, stop_signals_handled

QUIET = 0.1  # seconds without a request in progress before the end: answers reach their clients


class TimedProtocol(H11Protocol):
    """Closes a connection whose request header is not complete in time."""

    header_seconds = 10.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.header_seconds, self._expire)

    def data_received(self, data: bytes) -> None:
        if self._timer is None:  # the first bytes of another request on the same connection
            self._timer = self.loop.call_later(self.header_seconds, self._expire)
        super().data_received(data)
        self._check()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._check()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _check(self) -> None:
        """A request has begun: its header is complete."""
        if self._timer is not None and self.scope is not None and self.conn.trailing_data[0] == b"":
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class Server(uvicorn.Server):
    """`supervised`: a worker gets a signal from its supervisor and may get the same from whoever stopped that (Ctrl-C,
    systemd), so that a second one means nothing; the supervisor kills it if it has to end at once."""

    def __init__(self, gate: Gate, settings: Settings, supervised: bool = False) -> None:
        limits = settings.limits
        protocol = type("TimedProtocol", (TimedProtocol,), {"header_seconds": limits.header_seconds})
        super().__init__(
            uvicorn.Config(
                gate,
                host=settings.host,
                port=settings.port,
                http=protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=limits.header_bytes,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=1,  # of connections without a request: those were waited for before
            )
        )
        self.gate, self.grace, self.supervised = gate, settings.grace_seconds, supervised
        logging.getLogger("uvicorn.access").disabled = True  # it writes query strings, which may contain texts

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.gate.draining:
            if not self.supervised and sig != HANG_UP:  # kernel and shell may both send that one
                super().handle_exit(sig, frame)  # the second signal
                self.force_exit = True
            return
        self.gate.draining = True
        asyncio.get_event_loop().call_soon_threadsafe(lambda: asyncio.ensure_future(self._drain()))

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """As uvicorn's, but for SIGHUP too, and a process that ends after a signal exits with status 0."""
        return stop_signals_handled(self.handle_exit)

    async def _drain(self) -> None:
        logging.getLogger("allyouneed.serve").info("stopping: %d requests in progress", self.gate.in_progress)
        try:
            async with asyncio.timeout(self.grace):
                while self.gate.in_progress:
                    await asyncio.sleep(0.02)
            await asyncio.sleep(QUIET)
        except TimeoutError:
            self.force_exit = True
        self.should_exit = True
