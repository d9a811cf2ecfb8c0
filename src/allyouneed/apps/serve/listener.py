"""Listening sockets."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from allyouneed.apps.serve.settings import Settings
from allyouneed.errors import UserError

BACKLOG = 1024


def listen(settings: Settings) -> socket.socket:
    """The listening socket, or an error that says what is in the way."""
    found = _bind(settings.host, settings.port)
    found.listen(BACKLOG)
    return found


def listeners(settings: Settings, count: int) -> list[socket.socket]:
    """One for each of several processes, on the same port. Linux distributes connections among them; elsewhere all are
    the same socket."""
    first = _bind(settings.host, settings.port)  # fails if the port is taken, even by sockets that would share it
    if sys.platform != "linux":
        first.listen(BACKLOG)
        return [first, *(first.dup() for _ in range(count - 1))]
    port = first.getsockname()[1]
    first.close()
    found = [_bind(settings.host, port, shared=True) for _ in range(count)]
    for one in found:
        one.listen(BACKLOG)
    return found


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
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise UserError(f"{host}:{port}: cannot listen: {error.strerror}") from None
    return found
