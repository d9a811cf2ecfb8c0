"""The application: routes, errors, and the gate in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from allyouneed import __version__
from allyouneed.apps.serve import health, page, tokens
from allyouneed.apps.serve.dialects import ollama, tasks, tei
from allyouneed.apps.serve.dialects.openai import audio, chat, completions, embeddings, models
from allyouneed.apps.serve.dialects.translation import deepl, deepl_glossaries, files, libretranslate
from allyouneed.apps.serve.dialects.translation.glossaries import GlossaryStore
from allyouneed.apps.serve.engine.registry import ModelRegistry
from allyouneed.apps.serve.engine.watchdog import watched
from allyouneed.apps.serve.errors import ApiError, internal_error, log_failure, validation_error
from allyouneed.apps.serve.gate import Gate
from allyouneed.apps.serve.metrics import Metrics
from allyouneed.apps.serve.responses import to_json
from allyouneed.apps.serve.settings import Settings
from allyouneed.apps.serve.workers.phases import Phases
from allyouneed.errors import UserError
from allyouneed.runtime.process import rare_gc, short_switch_interval

if TYPE_CHECKING:
    from allyouneed.apps.inspect.views.replay import Runs

ROUTERS = (
    health,
    models,
    completions,
    chat,
    embeddings,
    audio,
    tasks,
    tei,
    ollama,
    tokens,
    libretranslate,
    files,
    deepl,
    deepl_glossaries,
    page,
)


def create_app(
    folders: Mapping[str, Path],
    settings: Settings | None = None,
    default: str | None = None,
    aliases: Mapping[str, str] | None = None,
    preload: bool = True,
    phases: Phases | None = None,
) -> Gate:
    """An ASGI application. `preload`: load the default model in the background, as soon as the server listens.
    `phases`: of all workers, where there are several."""
    settings, metrics = settings or Settings(), Metrics()
    registry = ModelRegistry(folders, settings, metrics, default, aliases, None if phases is None else phases.publish)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(_preload(registry, preload))
        # an engine loop that launches a step need not wait for anything else
        with watched(registry, phases), short_switch_interval(), rare_gc():
            yield
        task.cancel()
        await registry.close()

    app = FastAPI(title="allyouneed", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.settings, app.state.metrics, app.state.registry, app.state.phases = settings, metrics, registry, phases
    app.state.glossaries = GlossaryStore(settings.glossaries, settings.limits)
    app.state.runs = None if settings.runs is None else _runs(settings.runs)
    for module in ROUTERS:
        app.include_router(module.router)
    add_error_handlers(app)
    gate = Gate(app, settings, metrics)
    app.state.gate = gate
    return gate


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(UserError, _user_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)  # the gate logs it


def _runs(folder: Path) -> Runs:
    from allyouneed.apps.inspect.views.replay import Runs  # imports torch

    return Runs(folder)


async def _preload(registry: ModelRegistry, wanted: bool) -> None:
    try:
        if wanted:
            registry.phase = f"loading {registry.default}"
            await registry.load(registry.entries[registry.default])
        registry.phase = "ready"
    except Exception as error:
        registry.phase = f"failed to load {registry.default}: {error}"
        log_failure(error, registry.phase)


def _answer(request: Request, error: ApiError) -> Response:
    path = request.url.path
    return Response(to_json(error.body(path)), error.status_for(path), error.headers, "application/json")


async def _user_error(request: Request, error: Any) -> Response:
    return _answer(request, error if isinstance(error, ApiError) else ApiError(str(error)))


async def _invalid(request: Request, error: Any) -> Response:
    return _answer(request, validation_error(error.errors()))


async def _internal_error(request: Request, error: Any) -> Response:
    return _answer(request, internal_error())


async def _http_error(request: Request, error: Any) -> Response:
    what = {404: f"no route {request.url.path[:100]}", 405: f"{request.method} is not allowed here"}
    found = ApiError(what.get(error.status_code, str(error.detail)), error.status_code)
    response = _answer(request, found)
    response.headers.update(error.headers or {})
    return response
