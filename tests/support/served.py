"""A server on a free port with tiny random models, and the folders of such models."""

from __future__ import annotations

import asyncio
import re
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from allyouneed import build
from allyouneed.apps.serve.app import create_app
from allyouneed.apps.serve.gate import Gate
from allyouneed.apps.serve.listener import listen_unix
from allyouneed.apps.serve.server import Server, listen
from allyouneed.apps.serve.settings import Settings
from allyouneed.apps.serve.workers.api_process import create_api
from allyouneed.apps.serve.workers.engine_process import EngineServer
from allyouneed.data.tokenizers.base import Tokenizer, TokenizerConfig, Vocabularies, train
from allyouneed.data.tokenizers.values import train_values
from allyouneed.folder import Folder
from infer_fixtures import TEXT
from toy_texts import BEHAVIOR, BOTH, DECODER, ENCODER, PREFIX
from waiting import PATIENCE, until

BOTH_SERVERS = pytest.mark.parametrize("server", ["one_process", "api_process"], indirect=True)
BOTH_WAYS = pytest.mark.parametrize("split", [False, True], ids=["one_process", "api_process"])
TEMPLATE = """\
{{ bos_token or '<s>' }}{% for message in messages %}
{{ message.role }}: {{ message.content }}
{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}"""
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # model, task, other fields of the folder
    "lm": (DECODER, {"kind": "causal-lm"}, {}),
    "chat": (DECODER, {"kind": "causal-lm"}, {"originals": {"chat_template.jinja": TEMPLATE.encode()}}),
    "translator": (BOTH, {"kind": "translation"}, {}),
    "seq2seq": (BOTH, {"kind": "seq2seq"}, {}),
    "prompted": (PREFIX, {"kind": "seq2seq", "prompts": True}, {}),
    "summariser": (BOTH, {"kind": "summarisation"}, {}),
    "corrector": (BOTH, {"kind": "correction", "margin": 0.0}, {}),
    "embedder": (ENCODER | {"head": {"kind": "pooled"}}, {"kind": "similarity", "range": [0, 1]}, {}),
    "classifier": (
        ENCODER | {"head": {"kind": "classes", "labels": 2}},
        {"kind": "classification"},
        {"labels": ["neg", "pos"]},
    ),
    "answerer": (ENCODER | {"head": {"kind": "span"}}, {"kind": "question-answering", "share": 0.5}, {}),
    "reranker": (
        ENCODER | {"head": {"kind": "classes", "labels": 1}},
        {"kind": "reranking", "candidates": 4},
        {"labels": ["relevant"]},
    ),
    "masked": (ENCODER, {"kind": "masked-lm"}, {}),
    "click": (BEHAVIOR, {"kind": "click"}, {}),
    "tagger": (ENCODER | {"head": {"kind": "tags", "labels": 3}}, {"kind": "tagging"}, {"labels": ["O", "B-X", "I-X"]}),
}


def tiny_tokenizer(masked: bool = False) -> Tokenizer:
    specials = ("<mask>",) if masked else ()
    return train(TokenizerConfig(vocab=330, specials=specials), TEXT * 2)


def write_folder(path: Path, kind: str, seed: int = 0, max_tokens: int = 256) -> Path:
    """A model of this kind with random weights, decisive ones."""
    model, task, more = KINDS[kind]
    if kind == "click":
        tokenizer = train_values(TokenizerConfig(), [f"item={letter}" for letter in "abcdef" * 2])
    else:
        tokenizer = tiny_tokenizer(kind == "masked")
    torch.manual_seed(seed)
    module = build(model | {"vocab": tokenizer.size})
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)
    folder = Folder(module.eval(), Vocabularies(tokenizer, tokenizer), task, {}, max_tokens=max_tokens, **more)
    folder.save(path)
    return path


class Running:
    """A server in a thread of this process."""

    def __init__(self, gate: Gate, settings: Settings) -> None:
        self.gate, self.socket = gate, listen(settings)
        self.port: int = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = Server(gate, settings)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        until(lambda: self.server.started)

    def _run(self) -> None:
        asyncio.run(self.server.serve(sockets=[self.socket]))

    @property
    def registry(self) -> Any:
        return self.gate.app.state.registry  # type: ignore[attr-defined]

    def model(self, name: str) -> Any:
        return self.registry.entries[name].model

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(PATIENCE)
        self.socket.close()


class SplitRunning(Running):
    """The same with HTTP and the engine apart, as in an API process and an engine process: two event loops, connected
    by a Unix socket."""

    def __init__(self, folders: dict[str, Path], settings: Settings, default: str | None, aliases: Any) -> None:
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "engine"
        self.make_engine = lambda: EngineServer(create_app(folders, settings, default, aliases, preload=False))
        self.engine_socket = listen_unix(path)
        self.start_engine()
        super().__init__(create_api(folders, settings, [path], default, aliases), settings)

    def start_engine(self) -> None:
        begun = threading.Event()

        async def serve() -> None:
            self.engine, self.engine_loop = self.make_engine(), asyncio.get_running_loop()
            begun.set()
            await self.engine.serve(self.engine_socket.dup())

        self.engine_thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        self.engine_thread.start()
        begun.wait()

    @property
    def registry(self) -> Any:
        return self.engine.registry

    def stop_engine(self) -> None:
        self.engine_loop.call_soon_threadsafe(self.engine.stopping.set)
        self.engine_thread.join(PATIENCE)

    def stop(self) -> None:
        super().stop()
        self.stop_engine()
        self.engine_socket.close()
        self.folder.cleanup()


@contextmanager
def serving(
    folders: dict[str, Path], default: str | None = None, aliases: Any = None, split: bool = False, **settings: Any
) -> Iterator[Any]:
    chosen = Settings(port=0, **settings)
    if split:
        running: Running = SplitRunning(folders, chosen, default, aliases)
    else:
        running = Running(create_app(folders, chosen, default, aliases, preload=False), chosen)
    try:
        yield running
    finally:
        running.stop()


@contextmanager
def served_client(folders: dict[str, Path], **settings: Any) -> Iterator[tuple[Any, httpx.Client]]:
    with serving(folders, **settings) as running, httpx.Client(base_url=running.url, timeout=PATIENCE) as client:
        yield running, client


def golden(content: bytes) -> bytes:
    """With the two fields that differ in every answer replaced."""
    return re.sub(rb'"created":\d+', b'"created":0', re.sub(rb'"id":"\w+-[0-9a-f]{32}"', b'"id":"ID"', content))


def raw(port: int, content: bytes, wait: float = 5) -> bytes:
    """What comes back for these bytes until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as connection:
        try:
            connection.sendall(content)
            found = b""
            while part := connection.recv(65536):
                found += part
        except (ConnectionError, TimeoutError):
            pass
    return found
