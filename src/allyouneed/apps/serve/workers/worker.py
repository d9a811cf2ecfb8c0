"""One of the processes of a server (supervisor.py): `python -m allyouneed.apps.serve.workers.worker`.

What it serves is a line of JSON on its standard input; when that is closed, the supervisor is gone, and the process
stops."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from allyouneed import plugins
from allyouneed.apps.serve.app import create_app
from allyouneed.apps.serve.settings import Settings
from allyouneed.apps.serve.workers.phases import FOLDER_VARIABLE, Phases
from allyouneed.config import parse
from allyouneed.errors import UserError


def main() -> None:
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        task = json.loads(stdin.readline())
    number, role = task["worker"], task["role"]
    level = logging.WARNING if task["quiet"] else logging.INFO
    name = f"worker {number}" if role == "worker" else f"{role} process {number}"
    logging.basicConfig(level=level, format=f"%(asctime)s {name}: %(message)s", stream=sys.stderr)
    try:
        plugins.load_all(task["plugins"])
    except UserError as error:
        sys.exit(f"{name}: {error}")
    settings: Settings = parse(Settings, task["settings"], "serve")
    phases = Phases(Path(os.environ[FOLDER_VARIABLE]), task["workers"], number)
    folders = {name: Path(path) for name, path in task["folders"].items()}
    threading.Thread(target=_stop_without_supervisor, daemon=True).start()
    with socket.socket(fileno=task["listener"]) as listener:
        if role == "engine":
            _serve_engine(folders, settings, task, phases, listener)
        else:
            _serve_http(folders, settings, task, phases, listener)


def _serve_http(
    folders: dict[str, Path], settings: Settings, task: dict[str, Any], phases: Phases, listener: socket.socket
) -> None:
    from allyouneed.apps.serve.server import Server

    if task["role"] == "api":
        from allyouneed.apps.serve.workers.api_process import create_api

        sockets = [Path(path) for path in task["engines"]]
        gate = create_api(folders, settings, sockets, task["default"], task["aliases"], phases)
    else:
        gate = create_app(folders, settings, task["default"], task["aliases"], phases=phases)
    Server(gate, settings, supervised=True).run(sockets=[listener])


def _serve_engine(
    folders: dict[str, Path], settings: Settings, task: dict[str, Any], phases: Phases, listener: socket.socket
) -> None:
    from allyouneed.apps.serve.workers.engine_process import run

    gate = create_app(folders, settings, task["default"], task["aliases"], phases=phases)
    run(gate, listener, settings.grace_seconds)


def _stop_without_supervisor() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
