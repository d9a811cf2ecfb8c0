"""`allyouneed serve`: models behind HTTP."""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from typing import Annotated

from allyouneed.cli.messages import is_quiet, show_status
from allyouneed.cli.options import DtypeOption, argument, option
from allyouneed.errors import UserError

NETWORK, SIZES = "Network and keys", "Sizes"
KEY_VARIABLE = "ALLYOUNEED_API_KEY"
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def serve(
    folders: Annotated[
        list[str] | None, argument("FOLDER", "model folders, or NAME=FOLDER; default: the bundled translator")
    ] = None,
    *,
    default: Annotated[str | None, option(metavar="NAME", help="model of requests that name none")] = None,
    alias: Annotated[list[str] | None, option(metavar="ALIAS=NAME", help="another name of a model; repeatable")] = None,
    device: Annotated[
        str,
        option(
            metavar="auto|cpu|cuda",
            show_default=True,
            help="auto: a GPU if there is one; int8 models: the CPU. cuda:0,cuda:1: a worker on each",
        ),
    ] = "auto",
    dtype: DtypeOption = None,
    exact: Annotated[bool, option("--exact", help="answer every request bit for bit as if it were alone")] = False,
    host: Annotated[str, option(panel=NETWORK, show_default=True, help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, option(panel=NETWORK, show_default=True, min=0, max=65535, help="0: any free port")] = 8000,
    key_file: Annotated[
        Path | None, option(panel=NETWORK, metavar="FILE", help=f"API keys, one per line; or set {KEY_VARIABLE}")
    ] = None,
    no_auth: Annotated[
        bool, option("--no-auth", panel=NETWORK, help="let other machines use the server without a key")
    ] = False,
    closed_probes: Annotated[
        bool, option("--closed-probes", panel=NETWORK, help="/healthz, /readyz and /metrics need a key, too")
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        option(panel=NETWORK, metavar="NAME", help="name allowed in the Host header, or '*'; repeatable"),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        option(
            panel=NETWORK,
            metavar="ORIGIN",
            help="web pages that may send requests, e.g. https://app.example.com, or '*'; repeatable",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        option(panel=SIZES, metavar="BYTES", help="most weights loaded at once, e.g. 8GB; unloads the least recent"),
    ] = None,
    workers: Annotated[
        int | None, option(panel=SIZES, metavar="N", min=1, help="processes behind the port; default: one per device")
    ] = None,
    api_processes: Annotated[
        int | None,
        option(
            panel=SIZES,
            metavar="N",
            min=0,
            help="processes for HTTP and text besides those that compute; 0: none; default: none on a CPU, up to 8 "
            "for a GPU",
        ),
    ] = None,
    kv_memory: Annotated[
        str | None,
        option(
            panel=SIZES,
            metavar="BYTES",
            help="keys and values of a paged model, e.g. 2GB; default: 1/4 of what is free",
        ),
    ] = None,
    prefix_memory: Annotated[
        str | None,
        option(
            panel=SIZES,
            metavar="BYTES",
            help="of them, those of prompts that are kept for later ones; default: on a CPU as many bytes as the "
            "weights, at most 1/8 of what is free; on a GPU all that requests leave",
        ),
    ] = None,
    no_paging: Annotated[
        bool, option("--no-paging", panel=SIZES, help="keys and values in tensors of each batch: no shared prefixes")
    ] = False,
    rows: Annotated[int, option(panel=SIZES, show_default=True, min=1, help="sequences decoded at once")] = 64,
    limit: Annotated[
        list[str] | None,
        option(panel=SIZES, metavar="NAME=NUMBER", help="change a limit of docs/serving.md; repeatable"),
    ] = None,
    glossaries: Annotated[
        Path | None, option(metavar="FOLDER", help="keep stored glossaries here; default: in memory")
    ] = None,
    runs: Annotated[
        Path | None, option(metavar="FOLDER", help="training runs that the page may replay: a folder of run folders")
    ] = None,
    grace: Annotated[
        float, option(panel=SIZES, show_default=True, min=0.1, help="seconds for accepted requests after SIGTERM")
    ] = 60.0,
    log_texts: Annotated[bool, option("--log-texts", help="write the texts of requests to the log")] = False,
) -> None:
    """Serve models over HTTP: OpenAI's API and others, with continuous batching.

    `allyouneed serve` serves the bundled translator on http://127.0.0.1:8000. `allyouneed serve chat=FOLDER FOLDER`
    serves two models, each loaded when first asked for.
    """
    from allyouneed.errors.extras import missing, require

    require("serve", "serve")
    from allyouneed.apps.serve.engine.registry import check_names, parse_folders
    from allyouneed.apps.serve.security import check_binding
    from allyouneed.apps.serve.settings import Settings
    from allyouneed.apps.serve.workers.supervisor import ServerTask, Supervisor, default_api_processes
    from allyouneed.config import parse

    logging.basicConfig(
        level=logging.WARNING if is_quiet() else logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr
    )
    devices = _devices(device)
    count = workers or len(devices)
    if count < len(devices):
        raise UserError(f"--workers {count}: {len(devices)} devices need a worker each")
    settings: Settings = parse(
        Settings,
        {
            "host": host,
            "port": port,
            "keys": _keys(key_file),
            "hosts": tuple(allow_host or ()),
            "origins": tuple(allow_origin or ()),
            "device": devices[0],
            "dtype": dtype,
            "rows": rows,
            "memory": None if memory is None else _bytes(memory, "--memory"),
            "kv_memory": None if kv_memory is None else _bytes(kv_memory, "--kv-memory"),
            "prefix_memory": None if prefix_memory is None else _bytes(prefix_memory, "--prefix-memory"),
            "paged": not no_paging,
            "glossaries": glossaries,
            "runs": runs,
            "exact": exact,
            "grace_seconds": grace,
            "log_texts": log_texts,
            "open_probes": not closed_probes,
            "limits": dict(_pair(one, "--limit") for one in limit or []),
        },
        "serve",
    )
    check_binding(settings, no_auth)
    if runs is not None and not runs.is_dir():
        raise UserError(f"--runs {runs}: no such folder")
    aliases = dict(_pair(one, "--alias") for one in alias or [])
    task = ServerTask(parse_folders(folders or []), settings, default, aliases, is_quiet())
    check_names(task.folders, default, aliases)
    api = default_api_processes(devices) if api_processes is None else api_processes
    if count > 1 or api:
        supervisor = Supervisor(task, count, devices, api_processes=api)
        _show_address(*supervisor.address, f"{api} API, {count} engine processes" if api else f"{count} workers")
        supervisor.run()
        return
    try:
        from allyouneed.apps.serve.app import create_app
        from allyouneed.apps.serve.server import Server, listen
    except ImportError:
        raise missing("serve", "serve") from None
    server = Server(create_app(task.folders, settings, default, aliases), settings)
    with listen(settings) as listener:
        _show_address(*listener.getsockname()[:2])
        server.run(sockets=[listener])


def _show_address(host: str, port: int, more: str = "") -> None:
    shown = f"[{host}]" if ":" in host else host
    show_status(f"allyouneed: serving on http://{shown}:{port} (OpenAI: /v1{', ' + more if more else ''})")
    local = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, shown)
    show_status(f"allyouneed: see inside the model at http://{local}:{port}/")


def _devices(text: str) -> list[str]:
    found = text.split(",")
    for one in found:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", one):
            raise UserError(f"--device {text}: unknown device {one!r} (allowed: auto, cpu, cuda, cuda:0, …)")
    return found


def _keys(file: Path | None) -> tuple[str, ...]:
    if file is None:
        key = os.environ.get(KEY_VARIABLE, "").strip()
        return (key,) if key else ()
    try:
        lines = file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: the keys cannot be read: {error}") from None
    if not lines:
        raise UserError(f"{file}: no keys; write one per line")
    return tuple(lines)


def _pair(text: str, what: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if not given or not name or not value:
        raise UserError(f"{what} {text}: expected NAME=VALUE")
    return name, value


def _bytes(text: str, what: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", text.strip().lower())
    if match is None or match[2] == "i":
        raise UserError(f"{what} {text}: expected a number of bytes, e.g. 8GB or 8GiB")
    return int(float(match[1]) * UNITS[match[2]])
