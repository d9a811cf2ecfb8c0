"""Listening sockets."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from allyouneed.apps.serve.settings import Settings
from allyouneed.errors import UserError

BACKLOG = 1024


def listen(settings: Settings) -> socket.socket:
    """The listening socket, or an error that says what is in the way."""
    return _listen(_bind(settings.host, settings.port))


def listeners(settings: Settings, count: int) -> list[socket.socket]:
    """One for each of several processes, on the same port. Linux distributes connections among them; elsewhere all are
    the same socket."""
    first = _bind(settings.host, settings.port)  # fails if the port is taken, even by sockets that would share it
    if sys.platform != "linux":
        _listen(first)
        return [first, *(first.dup() for _ in range(count - 1))]
    port = first.getsockname()[1]
    first.close()
    return [_listen(one) for one in [_bind(settings.host, port, shared=True) for _ in range(count)]]


def listen_unix(path: Path) -> socket.socket:
    """A listening socket in the file system, for processes on this machine."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.bind(str(path))
    except OSError as error:  # too long
        found.close()
        raise UserError(f"{path}: cannot listen: {error}; set TMPDIR to a shorter path") from None
    found.listen(BACKLOG)
    return found


def _bind(host: str, port: int, shared: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    # the connections of a server that has ended keep its port for a minute, unless both are opened with this option
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        raise _taken(found, (host, port), error) from None
    return found


def _listen(bound: socket.socket) -> socket.socket:
    """Fails where another socket on the same port, bound but not yet listening, was faster."""
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        raise _taken(bound, bound.getsockname(), error) from None
    return bound


def _taken(found: socket.socket, address: Sequence[Any], error: OSError) -> UserError:
    found.close()
    return UserError(f"{address[0]}:{address[1]}: cannot listen: {error.strerror}")
