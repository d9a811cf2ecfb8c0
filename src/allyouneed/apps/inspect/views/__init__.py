"""The views of the page (docs/seeing.md): each builds a document, a dict ready for JSON, from a model and a request.

A view is one file here with a request class and a function, registered by a decorator; the route of the server, the
commands `allyouneed look …`, the offline file and the notebook find it by its name.

    class WalkRequest(InputRequest):            # input.py: text, image or sound, target, model
        position: Index = 0

    @view("walk", WalkRequest)
    def walk(model: ViewModel, request: WalkRequest) -> Document:
        run = model.record(request)             # recorded once per input, then found again (LRU)
        return document("walk", model, request, run.python, {"tokens": …, "boxes": …})

A view runs in a thread of its own. Recorded runs execute their forward passes where those of the model run
(apps/inspect/inside/execute.py); other computing goes through `model.compute(function)`. A view of several models
(`many=True`) gets a list of them, a view of configs (`models=False`) gets None, a view of training runs (`runs=True`) a
`Runs` (replay.py), or None where there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from allyouneed.apps.inspect.views.document import Document
from allyouneed.apps.inspect.views.model import ViewRequest
from allyouneed.errors import UserError, near

# the modules that register views; a view whose module is not there yet is not listed
MODULES: tuple[str, ...] = (
    "use",
    "walk",
    "value",
    "truth",
    "mixing",
    "why",
    "what_if",
    "anatomy",
    "compare",
    "replay",
    "lessons",
)

Build = Callable[..., Document]
F = TypeVar("F", bound=Build)


class View(NamedTuple):
    """`build(model, request)`: of one model; `build(models, request)` if `many`; `build(None, request)` if it needs no
    loaded `models`. `start(model, request)`: what to ask for first where the request itself asks for nothing.
    `follow(document)`: what clicks lead to, the most useful first, as (view, fields). The offline file contains the
    documents of both."""

    name: str
    request: type[ViewRequest]
    build: Build
    many: bool = False
    models: bool = True
    runs: bool = False
    follow: Callable[[Document], Iterable[tuple[str, Document]]] | None = None
    start: Callable[..., Iterable[Document]] | None = None


_VIEWS: dict[str, View] = {}


def view(
    name: str,
    request: type[ViewRequest],
    *,
    many: bool = False,
    models: bool = True,
    runs: bool = False,
    follow: Callable[[Document], Iterable[tuple[str, Document]]] | None = None,
    start: Callable[..., Iterable[Document]] | None = None,
) -> Callable[[F], F]:
    def register(build: F) -> F:
        _VIEWS[name] = View(name, request, build, many, models, runs, follow, start)
        return build

    return register


def views() -> dict[str, View]:
    for name in MODULES:
        import_module(f"{__name__}.{name}")
    return _VIEWS


def find_view(name: str) -> View:
    found = views()
    if name not in found:
        raise UserError(f"unknown view {name[:40]!r}{near(name[:40], found)} (known: {', '.join(found)})")
    return found[name]


def build_document(name: str, model: Any, /, **request: Any) -> Document:
    """The document of a view: `build_document("walk", model, text="机器学习很有趣")`. `model`: a `ViewModel`; a list of
    them or None where the view needs that."""
    found = find_view(name)
    return found.build(model, found.request.parse(request))
