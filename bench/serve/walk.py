"""The way of a chat completion of three tokens through the package: calls, functions, files and records.

    python bench/serve/walk.py                         # a tiny random model
    python bench/serve/walk.py --list                  # every function, with its calls
    PYTHONPATH=OTHER/src python bench/serve/walk.py    # another version of the package

The server's ASGI application answers in this process, after warm-up requests. Counted, in all threads, from the first
function that gets the HTTP request until the answer is complete and all threads wait again:

calls      how often a frame of a file of the package is entered: by a call, by a comprehension or generator
           expression (before Python 3.12), and when a coroutine or generator goes on.
functions  different ones among them.
files      that these are in.
records    dataclasses, NamedTuples and pydantic models of the package of which the request made an instance. Those of
           batches that requests share are not counted: of `nn` and `runtime`, or with `states` (PrefillBatch).

The smallest of several requests, for turns of threads differ.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

QUIET = 0.05  # seconds after the answer, in which threads come to rest
ROUNDS = 5
OF_BATCHES = ("allyouneed.nn.", "allyouneed.runtime.")  # where records of batches are defined
TEMPLATE = "{{ bos_token }}{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant:"
BODY = {"model": "chat", "messages": [{"role": "user", "content": "Where is it?"}], "temperature": 0, "max_tokens": 3}


@dataclass
class Walk:
    """What a request went through: calls of each function (file, name, line), and instances of each record."""

    calls: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    records: Counter[str] = field(default_factory=Counter)

    @property
    def files(self) -> set[str]:
        return {file for file, _, _ in self.calls}


class Probe:
    """Watches the threads that begin inside `watch_threads`. `walk`: what is being counted. `made`: records so far, by
    identity; they are kept, so that no two have the same."""

    def __init__(self) -> None:
        import allyouneed

        self.package = str(Path(allyouneed.__file__).parent) + "/"
        self.walk: Walk | None = None
        self.made: dict[int, Any] | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self.walk is None or event not in ("call", "return") or not code.co_filename.startswith(self.package):
            return
        if self.made is not None:
            self.made |= {id(one): one for one in gc.get_objects() if _is_record(type(one))}
        elif event == "call":
            self.walk.calls[code.co_filename.removeprefix(self.package), code.co_qualname, code.co_firstlineno] += 1

    @contextmanager
    def watch_threads(self) -> Iterator[None]:
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def _is_record(kind: type) -> bool:
    module = getattr(kind, "__module__", "")
    if not isinstance(module, str) or not module.startswith("allyouneed.") or module.startswith(OF_BATCHES):
        return False
    if "states" in getattr(kind, "__annotations__", ()):
        return False
    return is_dataclass(kind) or hasattr(kind, "_fields") or hasattr(kind, "__pydantic_fields__")


def walk(folder: Path) -> Walk:
    """The walk of a request to the model in this folder, which has a chat template."""
    from allyouneed.apps.serve.app import create_app
    from allyouneed.apps.serve.settings import Settings

    probe = Probe()

    async def requests() -> Walk:
        gate: Any = create_app({"chat": folder}, Settings(), preload=False)
        async with gate.app.router.lifespan_context(gate.app):
            for _ in range(3):
                await _ask(gate)
            walks = [await _count(probe, gate) for _ in range(ROUNDS)]
            found = min(walks, key=lambda one: one.calls.total())
            found.records = (await _count(probe, gate, records=True)).records
            return found

    with probe.watch_threads():
        return asyncio.run(requests())


async def _count(probe: Probe, gate: Any, records: bool = False) -> Walk:
    found = Walk()
    if records:
        gc.collect()
        gc.freeze()  # `get_objects` lists what is made from now on
        gc.disable()
        probe.made = {}
    probe.walk = found
    try:
        await _ask(gate)
        await asyncio.sleep(QUIET)
    finally:
        probe.walk = None
        if probe.made is not None:
            found.records.update(type(one).__qualname__ for one in probe.made.values())
            probe.made = None
            gc.enable()
            gc.unfreeze()
    return found


async def _ask(gate: Any) -> None:
    body = json.dumps(BODY).encode()
    asked = iter([{"type": "http.request", "body": body, "more_body": False}])
    answer: list[Any] = []

    async def receive() -> Any:
        if (message := next(asked, None)) is None:
            await asyncio.Event().wait()  # the client stays connected
        return message

    async def send(message: Any) -> None:
        answer.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
        "state": {},
    }
    await gate(scope, receive, send)
    found = json.loads(b"".join(message.get("body", b"") for message in answer))
    if found.get("usage", {}).get("completion_tokens") != BODY["max_tokens"]:
        raise SystemExit(f"not an answer of {BODY['max_tokens']} tokens: {found}")


def tiny_model(path: Path) -> Path:
    """A folder with a random model of one layer."""
    import torch

    from allyouneed import build
    from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies, train
    from allyouneed.folder import Folder

    torch.manual_seed(0)
    tokenizer = train(TokenizerConfig(vocab=300), ["where is it", "it is here"] * 20)
    mixer = {"kind": "attention", "heads": 2, "pattern": "causal"}
    layer = {"wiring": "pre-norm", "mixer": mixer, "channel": {"kind": "ffn", "hidden": 64}}
    model = build({"kind": "decoder", "vocab": tokenizer.size, "width": 32, "decoder": [layer]})
    vocabularies, originals = Vocabularies(tokenizer, tokenizer), {"chat_template.jinja": TEMPLATE.encode()}
    folder = Folder(model.eval(), vocabularies, {"kind": "causal-lm"}, {}, max_tokens=256, originals=originals)
    folder.save(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="every function, with its calls")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = walk(tiny_model(Path(temporary) / "chat"))
    if arguments.list:
        for (file, name, line), count in sorted(found.calls.items()):
            print(f"{count:5} {file}:{line} {name}")
    records = dict(sorted(found.records.items()))
    figures = {"calls": found.calls.total(), "functions": len(found.calls), "files": len(found.files)}
    if arguments.json:
        print(json.dumps(figures | {"records": records}))
        return
    print("records:", ", ".join(f"{name} {count}" for name, count in records.items()))
    print(", ".join(f"{name} {count}" for name, count in (figures | {"records": len(records)}).items()))


if __name__ == "__main__":
    main()
