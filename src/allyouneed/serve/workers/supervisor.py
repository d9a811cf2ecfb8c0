"""Several processes behind one port: the supervisor starts workers, starts dead ones again, and stops them all.

Every worker has a listening socket of its own on the same port (SO_REUSEPORT), and the kernel distributes connections
among them. The supervisor opens all of these and keeps them open: connections that arrive while a worker is started
again wait for it. Where the system does not distribute, the workers share one socket.

What a worker has to know is a line of JSON on its standard input, which stays open as long as the supervisor lives
(worker.py). The workers' phases are files in a folder that all of them read (phases.py), and so are their metrics
(serve/metrics.py).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from allyouneed.runtime.process import server_environment
from allyouneed.serve.listener import listeners
from allyouneed.serve.settings import Settings
from allyouneed.serve.workers.phases import FOLDER_VARIABLE, Phases

log = logging.getLogger("allyouneed.serve")

COMMAND = (sys.executable, "-m", "allyouneed.serve.workers.worker")
POLL = 0.05  # seconds
STABLE = 30.0  # seconds after which a worker counts as well started
MAX_DELAY = 30.0  # seconds before a worker that keeps dying is started again
LATE = 15.0  # seconds after the grace period until workers are killed


@dataclass(frozen=True)
class Task:
    """What a server serves; see `create_app`."""

    folders: Mapping[str, Path]
    settings: Settings
    default: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    quiet: bool = False

    def to_json(self, **more: Any) -> bytes:
        found = {
            "folders": {name: str(path) for name, path in self.folders.items()},
            "settings": self.settings.model_dump(mode="json"),
            "default": self.default,
            "aliases": dict(self.aliases),
            "quiet": self.quiet,
        }
        return json.dumps(found | more).encode() + b"\n"


@dataclass(eq=False)
class Worker:
    number: int
    listener: socket.socket
    device: str
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    failures: int = 0  # since it last was stable
    start_at: float = 0.0


class Supervisor:
    """`devices`: given to the workers in turn. `command`: of a worker."""

    def __init__(
        self, task: Task, workers: int, devices: Sequence[str] = ("auto",), command: Sequence[str] = COMMAND
    ) -> None:
        self.task, self.command = task, list(command)
        self.sockets = listeners(task.settings, workers)
        self.workers = [
            Worker(number, self.sockets[number], devices[number % len(devices)]) for number in range(workers)
        ]
        self.threads = max(1, usable_cpus() // workers)
        self.signals = 0

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.sockets[0].getsockname()[:2]
        return str(host), int(port)

    def run(self) -> None:
        """Until all workers have ended after a signal."""
        with ExitStack() as stack:
            for number in (signal.SIGTERM, signal.SIGINT):
                stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="allyouneed-serve-")))
            self.phases = Phases(self.folder, len(self.workers))
            stack.callback(self._kill)
            while not self.signals:
                for worker in self.workers:
                    self._tend(worker)
                time.sleep(POLL)
            self._stop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals += 1

    def _tend(self, worker: Worker) -> None:
        """Start it, or start it again if it has ended."""
        now, process = time.monotonic(), worker.process
        if process is not None:
            if (status := process.poll()) is None:
                return
            mark_process_dead(process.pid, str(self.folder))
            worker.failures = 1 if now - worker.started > STABLE else worker.failures + 1
            delay = min(MAX_DELAY, 0.25 * 2 ** (worker.failures - 1)) if worker.failures > 1 else 0.0
            log.error(
                "worker %d (pid %d) ended with status %s; it is started again%s",
                worker.number,
                process.pid,
                status,
                f" in {delay:g} s" if delay else "",
            )
            self.phases.write(worker.number, "restarting", process.pid)
            worker.process, worker.start_at = None, now + delay
        if now >= worker.start_at:
            self._start(worker)

    def _start(self, worker: Worker) -> None:
        environment = server_environment(self.threads) | {FOLDER_VARIABLE: str(self.folder)}
        fd = worker.listener.fileno()
        # a session of its own: Ctrl-C in a terminal is for the supervisor, which lets the workers finish
        worker.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, env=environment, pass_fds=[fd], start_new_session=True
        )
        worker.started = time.monotonic()
        settings = self.task.settings
        # glossaries that are not stored for good are kept here, so that all workers know them
        glossaries = settings.glossaries or self.folder / "glossaries"
        settings = settings.model_copy(update={"device": worker.device, "glossaries": glossaries})
        task = Task(self.task.folders, settings, self.task.default, self.task.aliases, self.task.quiet)
        assert worker.process.stdin is not None
        try:
            worker.process.stdin.write(task.to_json(listener=fd, worker=worker.number, workers=len(self.workers)))
            worker.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: the next turn starts it again

    def _stop(self) -> None:
        """Let the workers finish what they have accepted. A second signal ends them at once."""
        for listener in self.sockets:  # the workers' own copies stay open until each has finished
            listener.close()
        running = [worker.process for worker in self.workers if worker.process is not None]
        for process in running:
            process.terminate()
        end = time.monotonic() + self.task.settings.grace_seconds + LATE
        while self.signals < 2 and time.monotonic() < end and any(process.poll() is None for process in running):
            time.sleep(POLL)

    def _kill(self) -> None:
        for listener in self.sockets:
            listener.close()
        for worker in self.workers:
            if worker.process is not None:
                worker.process.kill()
                worker.process.wait()


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
