"""Several processes behind one port: the supervisor starts workers, starts dead ones again, and stops them all.

A worker answers HTTP and computes. Or these are separate: API processes answer HTTP (api_process.py), an engine process
per device computes (engine_process.py), and Unix sockets connect them.

Every process that answers HTTP has a listening socket of its own on the same port (SO_REUSEPORT), and the kernel
distributes connections among them. The supervisor opens all sockets and keeps them open: connections that arrive while
a process is started again wait for it. Where the system does not distribute, the workers share one socket.

What a worker has to know is a line of JSON on its standard input, which stays open as long as the supervisor lives
(worker.py). The workers' phases are files in a folder that all of them read (phases.py), and so are their metrics
(apps/serve/metrics.py).
"""

from __future__ import annotations

import json
import logging
import os
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
from typing import Any, Literal

from prometheus_client.multiprocess import mark_process_dead

from allyouneed import plugins
from allyouneed.apps.serve.listener import listen_unix, listeners
from allyouneed.apps.serve.settings import Settings
from allyouneed.apps.serve.workers.phases import FOLDER_VARIABLE, Phases
from allyouneed.runtime.process import HANG_UP, server_environment, stop_signals_handled

log = logging.getLogger("allyouneed.serve")

COMMAND = (sys.executable, "-m", "allyouneed.apps.serve.workers.worker")
POLL = 0.05  # seconds
LOOK = 1.0  # seconds between two looks at the signs of life of a worker
STABLE = 30.0  # seconds after which a worker counts as well started
MAX_DELAY = 30.0  # seconds before a worker that keeps dying is started again
MAX_API_PROCESSES = 8  # by default
LATE = 15.0  # seconds after the grace period until workers are killed


@dataclass(frozen=True)
class ServerTask:
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
            "plugins": plugins.sources(),
        }
        return json.dumps(found | more).encode() + b"\n"


@dataclass(eq=False)
class Worker:
    number: int
    listener: socket.socket | None
    device: str
    role: Literal["worker", "api", "engine"] = "worker"
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    failures: int = 0  # since it last was stable
    start_at: float = 0.0
    look_at: float = 0.0  # for signs of life


class Supervisor:
    """`devices`: given to the workers in turn. `command`: of a worker. `api_processes`: if there are any, they answer
    HTTP, and the workers are engine processes."""

    def __init__(
        self,
        task: ServerTask,
        workers: int,
        devices: Sequence[str] = ("auto",),
        command: Sequence[str] = COMMAND,
        api_processes: int = 0,
    ) -> None:
        self.task, self.command = task, list(command)
        self.sockets = listeners(task.settings, api_processes or workers)
        given = [devices[number % len(devices)] for number in range(workers)]
        if api_processes:
            self.workers = [Worker(number, None, device, "engine") for number, device in enumerate(given)]
            self.workers += [Worker(workers + n, one, "cpu", "api") for n, one in enumerate(self.sockets)]
        else:
            self.workers = [Worker(n, self.sockets[n], device) for n, device in enumerate(given)]
        self.threads = max(1, usable_cpus() // workers)
        limits = task.settings.limits
        # a worker that is stuck: all requests that it had accepted have got status 504 by then
        self.patience = max(limits.step_seconds, limits.request_seconds)
        self.signals = 0

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.sockets[0].getsockname()[:2]
        return str(host), int(port)

    def run(self) -> None:
        """Until all workers have ended after a signal."""
        with ExitStack() as stack:
            stack.enter_context(stop_signals_handled(self._on_signal))
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="allyouneed-serve-")))
            self.phases = Phases(self.folder, len(self.workers))
            for worker in self.workers:
                if worker.role == "engine":
                    worker.listener = listen_unix(self._engine_socket(worker))
            stack.callback(self._kill)
            while not self.signals:
                for worker in self.workers:
                    self._tend(worker)
                time.sleep(POLL)
            self._stop()

    def _engine_socket(self, worker: Worker) -> Path:
        return self.folder / f"engine-{worker.number}.socket"

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number != HANG_UP or not self.signals:  # kernel and shell may both send one
            self.signals += 1

    def _tend(self, worker: Worker) -> None:
        """Start it, or start it again if it has ended."""
        now, process = time.monotonic(), worker.process
        if process is not None:
            if (status := process.poll()) is None:
                if now >= worker.look_at:
                    worker.look_at = now + LOOK
                    if (silence := self.phases.silence(worker.number, process.pid)) > self.patience:
                        log.error("%s has been stuck for %.0f s; it is ended", _name(worker), silence)
                        process.kill()
                return
            mark_process_dead(process.pid, str(self.folder))
            worker.failures = 1 if now - worker.started > STABLE else worker.failures + 1
            delay = min(MAX_DELAY, 0.25 * 2 ** (worker.failures - 1)) if worker.failures > 1 else 0.0
            log.error(
                "%s ended with status %s; it is started again%s",
                _name(worker),
                status,
                f" in {delay:g} s" if delay else "",
            )
            self.phases.write(worker.number, {"pid": process.pid, "status": "restarting"})
            worker.process, worker.start_at = None, now + delay
        if now >= worker.start_at:
            self._start(worker)

    def _start(self, worker: Worker) -> None:
        threads = 1 if worker.role == "api" else self.threads
        environment = server_environment(threads) | {FOLDER_VARIABLE: str(self.folder)}
        assert worker.listener is not None
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
        task = ServerTask(self.task.folders, settings, self.task.default, self.task.aliases, self.task.quiet)
        engines = [str(self._engine_socket(one)) for one in self.workers if one.role == "engine"]
        assert worker.process.stdin is not None
        try:
            own = task.to_json(
                listener=fd, worker=worker.number, workers=len(self.workers), role=worker.role, engines=engines
            )
            worker.process.stdin.write(own)
            worker.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: the next turn starts it again

    def _stop(self) -> None:
        """Let the workers finish what they have accepted, engine processes last. A second signal ends them at once."""
        for listener in self.sockets:  # the workers' own copies stay open until each has finished
            listener.close()
        end = time.monotonic() + self.task.settings.grace_seconds + LATE
        for roles in (("worker", "api"), ("engine",)):
            running = [one.process for one in self.workers if one.process is not None and one.role in roles]
            for process in running:
                process.terminate()
            while self.signals < 2 and time.monotonic() < end and any(process.poll() is None for process in running):
                time.sleep(POLL)

    def _kill(self) -> None:
        for listener in self.sockets:
            listener.close()
        for worker in self.workers:
            if worker.process is not None:
                worker.process.kill()
                worker.process.wait()
            if worker.listener is not None:
                worker.listener.close()


def _name(worker: Worker) -> str:
    role = worker.role if worker.role == "worker" else f"{worker.role} process"
    return f"{role} {worker.number} (pid {'' if worker.process is None else worker.process.pid})"


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_api_processes(devices: Sequence[str]) -> int:
    """None on a CPU, which they would share with the model. For a GPU, as many as keep up with it, on half the cores at
    most. (Whether there is a GPU is asked without torch, which takes seconds to import.)"""
    gpu = any(one.startswith("cuda") for one in devices) or ("auto" in devices and _has_gpu())
    return min(MAX_API_PROCESSES, max(1, usable_cpus() // 2)) if gpu else 0


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
