"""The view "lessons": a guided path through the other views, in the order of "Attention Is All You Need".

Each lesson of page/lessons.json has a few sentences in every language, a view with its state (`params`, as in the hash
of the page), and something to try. `requests` are the documents that this view asks for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from allyouneed.apps.inspect.views import view
from allyouneed.apps.inspect.views.document import Document, document
from allyouneed.apps.inspect.views.input import InputRequest


@cache
def lessons() -> list[dict[str, Any]]:
    from allyouneed.apps.inspect.assets import FOLDER

    found: list[dict[str, Any]] = json.loads((FOLDER / "lessons.json").read_text(encoding="utf-8"))
    return found


def follow(sent: Document) -> Iterator[tuple[str, Document]]:
    """What the lessons show."""
    for lesson in lessons():
        yield from ((name, asked) for name, asked in lesson["requests"])


@view("lessons", InputRequest, models=False, follow=follow)
def show_lessons(model: Any, request: InputRequest) -> Document:
    """The lessons; the input is that of the views in them."""
    shown = [{key: value for key, value in lesson.items() if key != "requests"} for lesson in lessons()]
    return document("lessons", None, request, "allyouneed look lessons -o lessons.html", {"lessons": shown})
