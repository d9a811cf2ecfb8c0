"""No request holds the event loop: what is large is parsed, tokenized and encoded elsewhere, or refused."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter

from allyouneed.apps.serve.app import ROUTERS, create_app
from allyouneed.apps.serve.bodies import BodyRoute, parse_json, parse_multipart
from allyouneed.apps.serve.errors import ApiError
from allyouneed.apps.serve.settings import Limits, Settings
from asgi import ask

LIMIT = 0.1  # seconds of the loop's thread, whatever else the machine does
SIZE = 200_000  # bytes: a twentieth of what is permitted, which held the loop for half a minute
TEXTS = ("q", "text", "entries", "glossary")  # of routes that read their fields themselves
VALID: dict[str, dict[str, Any]] = {  # what a route needs besides, so that a field is used
    "/v1/chat/completions": {"model": "chat", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/completions": {"model": "translator", "max_tokens": 1},
    "/v1/embeddings": {"model": "embedder"},
    "/v1/rerank": {"model": "embedder", "query": "a", "documents": ["a"]},
    "/embed": {"model": "embedder"},
    "/rerank": {"model": "embedder", "query": "a", "texts": ["a"]},
    "/api/chat": {"model": "chat"},
    "/api/generate": {"model": "translator", "options": {"num_predict": 1}},
    "/api/embed": {"model": "embedder"},
    "/translate": {"source": "auto", "target": "de"},
    "/v2/translate": {"target_lang": "DE"},
    "/v2/glossaries": {"name": "a", "source_lang": "en", "target_lang": "de"},
}
PARSED = ("lists", "deep", "braces", "fields")  # large for the parser alone: in one field of a route
PARAMETERS = {"task": "classification", "name": "walk", "name:path": "lm", "glossary_id": "x"}


def shapes() -> Iterator[tuple[str, bytes]]:
    def filled(unit: bytes, size: int = SIZE) -> bytes:
        return b",".join([unit] * (size // (len(unit) + 1)))

    yield "floats", b"[" + filled(b"1.5", 40_000) + b"]"
    yield "numbers", b"[" + filled(b"1") + b"]"
    yield "lists", b"[" + filled(b"[]") + b"]"
    yield "objects", b"[" + filled(b"{}") + b"]"
    yield "messages", b"[" + filled(b'{"role":"a"}') + b"]"
    yield "a long message", b'[{"role":"user","content":"' + b"ab cd, ef. " * (SIZE // 11) + b'"}]'
    yield "deep", b"[" * 900 + b"]" * 900
    yield "braces", b'"' + b"{" * (SIZE // 8) + b'"'
    yield "text", b'"' + b"ab cd, ef. " * (SIZE // 11) + b'"'
    yield "fields", b"{" + b",".join(b'"x%d":1' % number for number in range(SIZE // 10)) + b"}"


def bodies(route: APIRoute) -> Iterator[tuple[str, bytes]]:
    """Bodies with something large in one field, and forms."""
    model = None if route.body_field is None else route.body_field.field_info.annotation
    own = isinstance(model, type) and issubclass(model, BaseModel)
    names = TEXTS
    if own:
        kinds = {name: str(TypeAdapter(field.annotation).json_schema()) for name, field in model.model_fields.items()}
        names = tuple(name for name, kind in kinds.items() if "array" in kind or name in ("prompt", "input", "inputs"))
        names += tuple(name for name, kind in kinds.items() if "additionalProperties" in kind and name not in names)
    valid = VALID.get(route.path, {})
    for number, name in enumerate(names or ("inputs",)):
        for what, shape in shapes():
            if number and what in PARSED:
                continue
            head = json.dumps({key: value for key, value in valid.items() if key != name}).encode()[:-1]
            yield (
                f"{what} in {name}",
                head + (b", " if len(head) > 1 else b"") + b'"%s": ' % name.encode() + shape + b"}",
            )
    unknown = b",".join(b'"temprat%d":1' % number for number in range(SIZE // 15))
    yield "unknown fields", b"{" + unknown + b"}"


FORMS = [
    ("many fields", "application/x-www-form-urlencoded", b"q=a&" * 60_000),
    ("escapes", "application/x-www-form-urlencoded", b"q=" + b"%41" * 100_000),
    ("line breaks", "multipart/form-data; boundary=b", b"--b\r\n\r\n" + b"\r\n-" * 1_000_000 + b"\r\n--b--"),
    ("many parts", "multipart/form-data; boundary=b", b"--b\r\n\r\n\r\n" * 100_000 + b"--b--"),
]


class LoopWatch:
    """The most CPU time of the loop's thread between two ticks of a task."""

    def __init__(self) -> None:
        self.worst = 0.0

    async def tick(self) -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            self.worst = max(self.worst, time.thread_time() - before)


def test_no_route_holds_the_event_loop(folders: dict[str, Path]) -> None:
    """All routes with bodies, and queries; a new route joins by existing."""
    some = {name: folders[name] for name in ("lm", "chat", "embedder", "classifier", "translator")}
    gate = create_app(some, Settings(limits=Limits(request_seconds=0.2)), preload=False)
    app: Any = gate.app
    routes = [route for module in ROUTERS for route in module.router.routes if isinstance(route, APIRoute)]
    with_body = [route for route in routes if route.methods & {"POST", "PUT", "PATCH"}]
    assert len(with_body) > 20
    work = [
        (min(route.methods), route.path, what, "application/json", body)
        for route in with_body
        for what, body in bodies(route)
    ]
    work += [(min(route.methods), route.path, what, kind, body) for route in with_body for what, kind, body in FORMS]
    held: dict[tuple[str, str], float] = {}

    async def run() -> None:
        async with app.router.lifespan_context(app):
            for name in some:
                async with app.state.registry.use(name):
                    pass
            watch = LoopWatch()
            ticking = asyncio.create_task(watch.tick())
            await asyncio.sleep(0.05)
            for method, path, what, kind, body in work:
                for name, value in PARAMETERS.items():
                    path = path.replace(f"{{{name}}}", value)
                watch.worst = 0.0
                got = await ask(gate, method, path, body, {"content-type": kind})
                await asyncio.sleep(0.003)
                assert got.status < 500 or got.status == 504, (path, what, got)
                held[path, what] = watch.worst
            for route in routes:
                watch.worst = 0.0
                await ask(gate, "GET", route.path, query="q=&" * 20_000)
                await asyncio.sleep(0.003)
                held[route.path, "query"] = watch.worst
            ticking.cancel()

    asyncio.run(run())
    assert not {key: seconds for key, seconds in held.items() if seconds > LIMIT}


def test_every_route_with_a_json_body_parses_it_in_bounds() -> None:
    routes = [route for module in ROUTERS for route in module.router.routes if isinstance(route, APIRoute)]
    assert not [route.path for route in routes if route.body_field is not None and not isinstance(route, BodyRoute)]


def test_a_body_of_many_small_parts_is_refused_before_it_is_validated() -> None:
    limits = Limits(body_fields=1000)
    for part in (b"[]", b'{"a":1}', b'[{"a":[1]}]'):
        with pytest.raises(ApiError, match="the limit is 1000"):
            parse_json(b"[" + b",".join([part] * 5000) + b"]", limits)
    assert len(parse_json(b"[" + b"1," * 100_000 + b"1]", limits)) == 100_001  # token ids are not counted
    many = ",".join(f'"{number}":1' for number in range(2000)).encode()
    with pytest.raises(ApiError, match="2000"):
        parse_json(b"{" + many + b"}", limits)


def test_the_first_few_errors_of_a_body_are_reported(server: Any, client: Any) -> None:
    answer = client.post("/v1/completions", json={"model": "lm", "prompt": [1.5] * 2000})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message.count(";") <= 4 and len(message) < 1000
    answer = client.post(
        "/v1/completions", json={"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(2000)), "x")}
    )
    assert answer.status_code == 400 and "more" in answer.json()["error"]["message"]


def test_forms_in_several_parts() -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    content = head % (b"model", b"", b"lm") + head % (b"file", b'; filename="a.wav"', b"\r\n--\r\n\0") + b"--x--\r\n"
    kind = "multipart/form-data; boundary=x"
    assert parse_multipart(kind, content, 1, 1) == ([("model", "lm")], {"file": b"\r\n--\r\n\0"})
    for bad, why in (
        (content[:-8], "end"),
        (content.replace(b"--x--", head % (b"a", b"", b"") + b"--x--"), "more than"),
        (content[1:], "begin"),
        (content.replace(b'name="model"', b""), "name"),
        (b"--x--", None),
    ):
        if why is None:
            assert parse_multipart(kind, bad, 1, 1) == ([], {})
        else:
            with pytest.raises(ApiError, match=why):
                parse_multipart(kind, bad, 1, 1)
    with pytest.raises(ApiError, match="boundary"):
        parse_multipart("multipart/form-data", content, 1, 1)
