"""An API process: HTTP, limits and keys, and the routes that generate text with language models. Engine processes
(engine_process.py) compute, and answer the requests of all other routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.types import Receive, Scope, Send

from allyouneed.apps.serve import health
from allyouneed.apps.serve.app import add_error_handlers
from allyouneed.apps.serve.dialects import ollama
from allyouneed.apps.serve.dialects.openai import chat, completions
from allyouneed.apps.serve.engine.watchdog import watched
from allyouneed.apps.serve.errors import ApiError
from allyouneed.apps.serve.gate import Gate
from allyouneed.apps.serve.metrics import Metrics
from allyouneed.apps.serve.settings import Settings
from allyouneed.apps.serve.unknown_fields import forget_ignored
from allyouneed.apps.serve.workers.channel import Kind, with_body
from allyouneed.apps.serve.workers.engine_client import ForwardedRequest
from allyouneed.apps.serve.workers.phases import Phases
from allyouneed.apps.serve.workers.remote_model import AnsweredByEngine, Engines, RemoteRegistry
from allyouneed.runtime.process import rare_gc

ROUTERS = (health, completions, chat, ollama)
OWN_ROUTES = (
    "/healthz",
    "/readyz",
    "/metrics",
    "/v1/completions",
    "/v1/chat/completions",
    "/api/chat",
    "/api/generate",
)


def create_api(
    folders: Mapping[str, Path],
    settings: Settings,
    sockets: Sequence[Path],
    default: str | None = None,
    aliases: Mapping[str, str] | None = None,
    phases: Phases | None = None,
) -> Gate:
    """An ASGI application. `sockets`: of the engine processes; otherwise as `create_app`."""
    metrics, engines = Metrics(), Engines(sockets)
    registry = RemoteRegistry(folders, settings, metrics, default, aliases or {}, engines)
    if phases is not None:
        registry.on_phase = phases.publish

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engines.connect()
        registry.phase = "ready"  # engine processes have phases of their own
        with watched(registry, phases), rare_gc():
            yield
        engines.close()
        await registry.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.settings, app.state.metrics, app.state.registry, app.state.phases = settings, metrics, registry, phases
    for module in ROUTERS:
        app.include_router(module.router)
    add_error_handlers(app)
    app.add_exception_handler(AnsweredByEngine, _forward_all)
    app.state.engines = engines
    gate = Gate(Front(app, engines), settings, metrics)
    app.state.gate = gate
    return gate


class Front:
    """Requests of the routes above go to `app`, all others to an engine process."""

    def __init__(self, app: FastAPI, engines: Engines) -> None:
        self.app, self.engines, self.state = app, engines, app.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OWN_ROUTES:
            await self.app(scope, receive, send)
        else:
            message = await receive()  # the gate has read all of it
            await forward(self.engines, scope, message["body"], send)


async def forward(engines: Engines, scope: Scope, body: bytes, send: Send) -> None:
    engine = engines.choose()
    request = ForwardedRequest(engine)
    content = {
        "method": scope["method"],
        "path": scope["path"],
        "raw_path": scope.get("raw_path", b"").decode("latin-1"),
        "query_string": scope["query_string"].decode("latin-1"),
        "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]],
        "client": scope["state"]["client"],
    }
    try:
        await engine.ask(request, Kind.HTTP, *with_body(content, body))
        more = True
        while more:
            message = await request.messages.get()
            if isinstance(message, ApiError):
                raise message  # before the answer it has a status, after that the connection is closed
            more = message["type"] == "http.response.start" or message["more_body"]
            await send(message)
    finally:
        request.cancel()


class ForwardedResponse:
    """An answer of FastAPI's application: the engine process's."""

    def __init__(self, engines: Engines, body: bytes) -> None:
        self.engines, self.body = engines, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await forward(self.engines, scope, self.body, send)


async def _forward_all(request: Request, error: Exception) -> Any:
    forget_ignored()  # the engine process reads the body again, and names them
    return ForwardedResponse(request.app.state.engines, await request.body())
