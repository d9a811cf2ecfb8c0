"""One of several worker processes (supervisor.py): `python -m allyouneed.serve.workers.worker`. What it serves is a
line of JSON on its standard input; when that is closed, the supervisor is gone, and the worker stops."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from allyouneed.config import parse
from allyouneed.serve.app import create_app
from allyouneed.serve.server import Server
from allyouneed.serve.settings import Settings
from allyouneed.serve.workers.phases import FOLDER_VARIABLE, Phases


def main() -> None:
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        task = json.loads(stdin.readline())
    number = task["worker"]
    level = logging.WARNING if task["quiet"] else logging.INFO
    logging.basicConfig(level=level, format=f"%(asctime)s worker {number}: %(message)s", stream=sys.stderr)
    settings: Settings = parse(Settings, task["settings"], "serve")
    phases = Phases(Path(os.environ[FOLDER_VARIABLE]), task["workers"], number)
    folders = {name: Path(path) for name, path in task["folders"].items()}
    gate = create_app(folders, settings, task["default"], task["aliases"], phases=phases)
    threading.Thread(target=_stop_without_supervisor, daemon=True).start()
    with socket.socket(fileno=task["listener"]) as listener:
        Server(gate, settings, supervised=True).run(sockets=[listener])


def _stop_without_supervisor() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
