"""The fields of translation requests: a query, a form or a JSON object, by name and type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request

from allyouneed.apps.serve.bodies import off_loop, parse_fields
from allyouneed.apps.serve.errors import ApiError
from allyouneed.apps.serve.unknown_fields import check_fields

MOST_TAGS = 200
TRUE, FALSE = ("1", "true"), ("0", "false")


async def read_fields(request: Request, known: Sequence[str], unused: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of a request. A field that a form repeats is a list. `unused`: known fields that are ignored."""
    content, kind = await request.body(), request.headers.get("content-type", "")
    limits, query = request.app.state.settings.limits, request.scope["query_string"]
    found = await off_loop(len(content), parse_fields, content, kind, query, limits)
    check_fields(found, known, unused)
    return found


def text_list(value: Any, name: str) -> list[str]:
    many = value if isinstance(value, list) else [value]
    if value is None or not many:
        raise ApiError(f"{name}: missing", param=name)
    return [one_text(text, name) for text in many]


def one_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ApiError(f"{name}: expected text, found {type(value).__name__}", param=name)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ApiError(f"{name}: contains an unpaired surrogate; fix the text", param=name) from None
    return value


def word(value: Any, name: str, needed: bool = True) -> str | None:
    """A short text such as a language."""
    if value is None or value == "":
        if needed:
            raise ApiError(f"{name}: missing", param=name)
        return None
    if not isinstance(value, str) or len(value) > 100:
        raise ApiError(f"{name}: expected a short text", param=name)
    return one_text(value, name)


def choice(value: Any, name: str, allowed: Sequence[str], default: str) -> str:
    if value is None or value == "":
        return default
    given = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(given, str) or given.lower() not in allowed:
        raise ApiError(f"{name}: {str(value)[:40]!r} (allowed: {', '.join(allowed)})", param=name)
    return given.lower()


def flag(value: Any, name: str, default: bool) -> bool:
    """True and false, also as forms write them: 1 and 0."""
    if value is None or value == "":
        return default
    if isinstance(value, bool):
        return value
    given = str(value).lower() if isinstance(value, str | int) else ""
    if given not in (*TRUE, *FALSE):
        raise ApiError(f"{name}: expected true or false", param=name)
    return given in TRUE


def name_list(value: Any, name: str) -> list[str]:
    """Names of tags: a list, or one text separated by commas."""
    if value is None:
        return []
    many = value if isinstance(value, list) else [value]
    if any(not isinstance(one, str) for one in many):
        raise ApiError(f"{name}: expected a list of names", param=name)
    found = [tag for one in many for part in one.split(",") if (tag := part.strip())]
    if len(found) > MOST_TAGS:
        raise ApiError(f"{name}: {len(found)} names, the limit is {MOST_TAGS}", param=name, code="limit_exceeded")
    return found


def whole_number(value: Any, name: str, most: int) -> int:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ApiError(f"{name}: expected a whole number from 0 to {most}", param=name)
    if int(text) > most:
        raise ApiError(f"{name}={int(text)}, the limit is {most}", param=name, code="limit_exceeded")
    return int(text)
