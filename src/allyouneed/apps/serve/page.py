"""GET / (the page that shows a model from inside), its two assets, and POST /look/api/VIEW for a document.

The page and its assets contain no secret and are open, also where the server wants keys; the page asks its reader for
one when a request is answered with 401. A view runs in a thread of its own; the answers it decodes share the steps of
all requests, and its forward passes run in the thread of the model's engine loop, one at a time, between steps.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from allyouneed.apps.inspect.assets import SERVED_POLICY, script, served_page, style
from allyouneed.apps.serve.bodies import BodyRoute
from allyouneed.apps.serve.errors import ApiError, over_limit
from allyouneed.apps.serve.responses import to_json
from allyouneed.apps.serve.settings import Limits
from allyouneed.errors import UserError

if TYPE_CHECKING:  # torch is imported when the first model is loaded
    from allyouneed.apps.inspect.views.model import ViewModel

router = APIRouter(tags=["page"], route_class=BodyRoute)
MODELS = 4  # of one view at most
HEADERS = {
    "Content-Security-Policy": SERVED_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
ASSETS: dict[str, tuple[Callable[[], str], str]] = {
    "page.css": (style, "text/css; charset=utf-8"),
    "page.js": (script, "text/javascript; charset=utf-8"),
}
# whose GET needs no key
OPEN = ("/", *(f"/assets/{name}" for name in ASSETS))


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    from allyouneed.apps.inspect.views import views

    state, known = request.app.state, await asyncio.to_thread(views)
    compares, replays = len(state.registry.entries) > 1, state.runs is not None
    names = [one.name for one in known.values() if (compares or not one.many) and (replays or not one.runs)]
    return _content(request, served_page(names), "text/html; charset=utf-8")


@router.get("/assets/{name}", include_in_schema=False)
async def asset(name: str, request: Request) -> Response:
    if name not in ASSETS:
        raise ApiError(f"no asset {name[:100]!r}", 404)
    read, kind = ASSETS[name]
    return _content(request, read(), kind)


def _content(request: Request, text: str, kind: str) -> Response:
    content = text.encode()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = HEADERS | {"ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=kind)


@router.post("/look/api/{name}")
async def look(name: str, body: dict[str, Any], request: Request) -> Response:
    """The document of a view; its request is described in docs/seeing.md."""
    from allyouneed.apps.inspect.views import find_view

    state = request.app.state
    try:
        view = await asyncio.to_thread(find_view, name)
    except UserError as error:
        raise ApiError(str(error), 404) from None
    asked = await asyncio.to_thread(view.request.parse, body)  # it lists the fields that it does not know
    _check_texts(body, state.settings.limits)
    if view.runs:
        found = await asyncio.to_thread(view.build, state.runs, asked)
    elif not view.models:
        found = await asyncio.to_thread(view.build, None, asked)
    elif view.many:
        found = await _of_many(request, view, asked)
    else:
        async with state.registry.use(asked.model) as served:
            found = await served.call(lambda: _build(view, served.look, asked), request.state.client, False)
    content = await asyncio.to_thread(to_json, found)
    return Response(content, media_type="application/json", headers={"Cache-Control": "no-store"})


def _build(view: Any, model: ViewModel, asked: Any) -> Any:
    from allyouneed.apps.inspect.inside.execute import executing  # imports torch

    with executing(model.compute):
        return view.build(model, asked)


async def _of_many(request: Request, view: Any, asked: Any) -> Any:
    """Each model computes in its own thread (`ViewModel.compute`); the view itself runs in one of the first's."""
    names = list(asked.models)
    if not 1 <= len(names) <= MODELS:
        raise over_limit("models", len(names), MODELS)
    registry = request.app.state.registry

    async def nested(left: list[str], served: list[Any]) -> Any:
        if not left:
            models = [one.look for one in served]
            return await served[0].call(lambda: view.build(models, asked), request.state.client, False)
        async with registry.use(left[0]) as one:
            return await nested(left[1:], [*served, one])

    return await nested(names, [])


def _check_texts(body: dict[str, Any], limits: Limits) -> None:
    """Before anything is tokenized. Views refuse texts of more tokens than a model reads."""
    for name, value in body.items():
        if isinstance(value, str) and name not in ("image", "sound") and len(value) > limits.prompt_characters:
            raise over_limit("characters", len(value), limits.prompt_characters, name)
