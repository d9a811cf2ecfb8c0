"""Bodies of requests: parsed within bounds, and in a thread if they are large, so that other requests go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, ParamSpec, TypeVar
from urllib.parse import parse_qsl

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.responses import Response

from allyouneed.apps.serve.errors import ApiError, over_limit, validation_error
from allyouneed.apps.serve.settings import Limits

INLINE = 20_000  # bytes or characters that are parsed or tokenized on the event loop itself
JSON = (b"content-type", b"application/json")
FORM = "application/x-www-form-urlencoded"
MOST_FIELDS = 4096  # of a form
FIELD_LIMIT = 1 << 20  # bytes of a field of a form in several parts
FIELD_BYTES = 3  # of a field, a list or an object in JSON, at least: `[],`
P = ParamSpec("P")
T = TypeVar("T")


async def off_loop(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a function returns. It is called in a thread if the `size` of what it reads is large."""
    return function(*args, **kwargs) if size < INLINE else await asyncio.to_thread(function, *args, **kwargs)


def parse_json(content: bytes, limits: Limits) -> Any:
    try:
        tree = json.loads(content)
    except json.JSONDecodeError as error:
        raise ApiError(f"the body is not JSON: {error.msg} at character {error.pos}", code="invalid_json") from None
    except (ValueError, RecursionError):  # not UTF-8, a number of many digits, or too deep
        raise ApiError("the body cannot be read as JSON", code="invalid_json") from None
    if len(content) > FIELD_BYTES * limits.body_fields:
        _check_fields(tree, limits.body_fields)
    return tree


def _check_fields(tree: Any, most: int) -> None:
    """Refuse JSON of many small parts: objects take far more time and memory than the text that describes them."""
    left, count = [tree], 0
    while left:
        one = left.pop()
        values: Iterable[Any] = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        kinds = set(map(type, values))
        inner = [value for value in values if isinstance(value, (dict, list))] if kinds & {dict, list} else []
        count += len(one) if isinstance(one, dict) else len(inner)
        if count > most:
            raise over_limit("fields, lists and objects in the body, or more", count, most, "body")
        left += inner


def parse_form(content: bytes) -> list[tuple[str, str]]:
    """The fields of a form, or of a query."""
    try:
        return parse_qsl(content.decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS)
    except ValueError:
        raise _bad_form(f"send UTF-8 and at most {MOST_FIELDS} fields") from None


def parse_fields(content: bytes, kind: str, query: bytes, limits: Limits) -> dict[str, Any]:
    """The fields of a query and of a body, which is JSON or, as its Content-Type (`kind`) says, a form. A field that is
    repeated is a list."""
    found: dict[str, Any] = {}
    pairs = parse_form(query)
    if kind.lower().startswith(FORM) and not content.lstrip().startswith(b"{"):  # curl calls JSON a form
        pairs += parse_form(content)
    elif content:
        found = parse_json(content, limits)
        if not isinstance(found, dict):
            raise ApiError("the body must be a JSON object")
    given: dict[str, list[Any]] = {}
    for name, value in pairs:
        given.setdefault(name, []).append(value)
    for name, values in given.items():
        if name in found:
            values[:0] = found[name] if isinstance(found[name], list) else [found[name]]
        found[name] = values if len(values) > 1 else values[0]
    return found


class Upload(bytes):
    """The content of a file of a form; `name`: of the file, as the client gives it."""

    name: str = ""


def parse_multipart(
    kind: str, content: bytes, files: int, fields: int
) -> tuple[list[tuple[str, str]], dict[str, Upload]]:
    """The fields and the files of a form whose Content-Type is `kind`, and at most how many. The body is in memory, so
    it is split at once; a parser of streams takes seconds for one of line breaks."""
    boundary = parse_options_header(kind)[1].get(b"boundary")
    if not boundary:
        raise _bad_form("its Content-Type has no boundary")
    if not content.startswith(b"--" + boundary):
        raise _bad_form("it does not begin with the boundary of its Content-Type")
    parts = content[len(boundary) + 2 :].split(b"\r\n--" + boundary, files + fields + 1)
    if len(parts) == files + fields + 2:
        raise _bad_form(f"it has more than {fields} fields and {files} files")
    if not parts.pop().startswith(b"--"):
        raise _bad_form("its end is missing")
    found: list[tuple[str, str]] = []
    uploads: dict[str, Upload] = {}
    while parts:
        head, _, data = parts.pop(0).partition(b"\r\n\r\n")
        lines = (line.partition(b":") for line in head.split(b"\r\n"))
        given = next((value for name, _, value in lines if name.lower() == b"content-disposition"), b"")
        options = parse_options_header(given)[1]
        if not (name := options.get(b"name", b"").decode(errors="replace")):
            raise _bad_form("a part has no name")
        if b"filename" in options:
            uploads[name] = Upload(data)
            uploads[name].name = options[b"filename"].decode(errors="replace")
        elif len(data) > FIELD_LIMIT:
            raise over_limit("bytes", len(data), FIELD_LIMIT, name)
        else:
            found.append((name, data.decode(errors="replace")))
    if len(found) > fields or len(uploads) > files:
        raise _bad_form(f"it has more than {fields} fields or {files} files")
    return found, uploads


def _bad_form(why: str) -> ApiError:
    return ApiError(f"the form cannot be read: {why}")


class BodyRoute(APIRoute):
    """A route with a JSON body: whatever Content-Type the client sends, for many send none, or a form's."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        annotation: Any = self.body_field.field_info.annotation
        adapter = TypeAdapter[Any](annotation)

        async def read(request: Request) -> Response:
            content, limits = await request.body(), request.app.state.settings.limits
            if len(content) < INLINE:
                body = _validate(adapter, content, limits)
            else:
                body = await asyncio.to_thread(_validate, adapter, content, limits)
            return await handle(ParsedRequest(request, content, body))

        return read


class ParsedRequest(Request):
    """A request whose body was validated: FastAPI finds it as the JSON of the body."""

    def __init__(self, request: Request, content: bytes, parsed: Any) -> None:
        scope = request.scope
        if JSON not in scope["headers"]:
            others = [(name, value) for name, value in scope["headers"] if name != JSON[0]]
            scope = {**scope, "headers": [*others, JSON]}
        super().__init__(scope)
        self._body, self._json = content, parsed  # where Starlette keeps what was read


def _validate(adapter: TypeAdapter[Any], content: bytes, limits: Limits) -> Any:
    tree = parse_json(content, limits)
    try:
        return adapter.validate_python(tree)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False, include_context=False, include_input=False)) from None
