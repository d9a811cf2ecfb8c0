"""The view "lessons": a guided path through the other views, in the order of "Attention Is All You Need".

Each lesson of page/lessons.json has a few sentences in every language, a view with its state (`params`, as in the hash
of the page), an exercise (`try`) and its solution. `requests` are the documents that its view asks for. What is said of
the model is read from it (lesson_facts.py): values stand in braces, {t:key} is a string of the page, {n:name} the
number of a lesson. A sentence (`if`) or a lesson (`needs`) that does not hold for the model is left out; the first
`try` and the first `solution` that hold are taken.

data: {
  "lessons": [{"name", "paper", "view", "params": {…}, "title": {language: …}, "text": {language: […]}, "try": {…}}],
  "solution": null, or {"name", "values", "text": {language: …}, "params": {…}, "requests": […]}   # of `solve`
}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from allyouneed.apps.inspect.views import view
from allyouneed.apps.inspect.views.document import Document, document
from allyouneed.apps.inspect.views.exercises import SOLVERS, Exercise
from allyouneed.apps.inspect.views.input import InputRequest
from allyouneed.apps.inspect.views.lesson_facts import Facts, facts_of
from allyouneed.apps.inspect.views.model import Text, ViewModel
from allyouneed.errors import UserError, near

VALUE = re.compile(r"\{(?:(\w):)?([\w.]+)\}")


class LessonsRequest(InputRequest):
    """`solve`: the name of a lesson, for the solution of its exercise."""

    solve: Text | None = None


@cache
def all_lessons() -> list[dict[str, Any]]:
    from allyouneed.apps.inspect.assets import FOLDER

    return json.loads((FOLDER / "lessons.json").read_text(encoding="utf-8"))


def lessons_of(facts: Facts) -> list[dict[str, Any]]:
    """The lessons that hold for a model, filled in."""
    found = [lesson for lesson in all_lessons() if facts.hold(lesson.get("needs", []))]
    return [_filled(lesson, facts, [one["name"] for one in found]) for lesson in found]


def follow(sent: Document) -> Iterator[tuple[str, Document]]:
    """What the lessons show; then their solutions, and what readers ask for on the way to them."""
    lessons, solution = sent["data"]["lessons"], sent["data"]["solution"]
    if solution is not None:
        yield from ((name, asked) for name, asked in solution["requests"])
        return
    for lesson in lessons:
        yield from ((name, asked) for name, asked in lesson["requests"])
    for lesson in lessons:
        yield "lessons", {"solve": lesson["name"]}


@view("lessons", LessonsRequest, follow=follow)
def show_lessons(model: ViewModel, request: LessonsRequest) -> Document:
    facts = facts_of(model, request)
    found = lessons_of(facts)
    solution = None if request.solve is None else _solve(model, request, facts, found)
    data = {"lessons": found, "solution": solution}
    return document("lessons", model, request, "allyouneed look lessons -o lessons.html", data)


def _solve(model: ViewModel, request: LessonsRequest, facts: Facts, found: list[dict[str, Any]]) -> Document:
    names = [one["name"] for one in found]
    if request.solve not in names:
        given = str(request.solve)[:40]
        raise UserError(f"solve: no lesson {given!r} of this model{near(given, names)} (allowed: {', '.join(names)})")
    lesson = next(one for one in all_lessons() if one["name"] == request.solve)
    values, params, requests = SOLVERS[lesson["name"]](Exercise(model, request, model.record(request), facts))
    text = _chosen(lesson["solution"], facts)
    known = facts.values | values
    return {
        "name": lesson["name"],
        "values": values,
        "text": {language: _fill(text[language], known, language, names) for language in text if language != "if"},
        "params": params,
        "requests": requests,
    }


# --- filling in -----------------------------------------------------------------------------------------------------


def _filled(lesson: Mapping[str, Any], facts: Facts, names: list[str]) -> dict[str, Any]:
    languages = list(lesson["title"])
    text = [one for one in lesson["text"] if facts.hold(one.get("if", []))]
    exercise = _chosen(lesson["try"], facts)

    def fill(said: str, language: str) -> str:
        return _fill(said, facts.values, language, names)

    return {
        "name": lesson["name"],
        "paper": lesson["paper"],
        "view": lesson["view"],
        "params": {name: str(value) for name, value in _native(lesson["params"], facts).items()},
        "requests": _native(lesson["requests"], facts),
        "title": lesson["title"],
        "text": {language: [fill(one[language], language) for one in text] for language in languages},
        "try": {language: fill(exercise[language], language) for language in languages},
    }


def _chosen(variants: list[dict[str, Any]], facts: Facts) -> dict[str, Any]:
    return next(one for one in variants if facts.hold(one.get("if", [])))


def _fill(text: str, values: Mapping[str, Any], language: str, names: list[str]) -> str:
    from allyouneed.apps.inspect.assets import strings

    def value(match: re.Match[str]) -> str:
        kind, name = match.groups()
        if kind == "t":
            return strings()[language][name]
        if kind == "n":
            return str(names.index(name) + 1)
        found = values[name]
        return str(found[language] if isinstance(found, dict) else found)

    return VALUE.sub(value, text)


def _native(tree: Any, facts: Facts) -> Any:
    """Requests and states: a value keeps its type; None is left out."""
    if isinstance(tree, dict):
        found = {name: _native(value, facts) for name, value in tree.items()}
        return {name: value for name, value in found.items() if value is not None}
    if isinstance(tree, list):
        return [_native(value, facts) for value in tree]
    whole = VALUE.fullmatch(tree) if isinstance(tree, str) else None
    return facts.values[whole[2]] if whole else tree
