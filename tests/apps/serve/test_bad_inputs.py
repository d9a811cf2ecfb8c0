"""What has broken other servers, over HTTP: refused with one message or answered, in bounded time, and never a 5xx.
Other classes: numbers, templates and special tokens in test_fuzz.py, HTTP in test_gate.py, paths in
test_completions.py, files in tests/interop/test_hostile_folders.py."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from served import Running, raw

LM = {"model": "lm", "prompt": "a", "max_tokens": 1, "temperature": 0}


@pytest.mark.parametrize(
    "field",
    [
        {"prompt_embeds": "gAJjb3MKc3lzdGVtCg=="},
        {"guided_regex": "foo**"},
        {"guided_json": {"enum": ["x"] * 1000}},
        {"structured_outputs": {"regex": "(a+)+$"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "(a+)+$"}}}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x", "pattern": "(a+)+$"}}}]},
        {"chat_template": "{{ ''.__class__ }}"},
        {"n_discard": -1},
    ],
    ids=lambda field: next(iter(field)),
)
def test_fields_that_run_something_elsewhere_have_no_effect(client: httpx.Client, field: dict[str, Any]) -> None:
    (name,) = field
    for path, body in (
        ("/v1/completions", LM),
        ("/v1/chat/completions", {"model": "chat", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ):
        answer, plain = client.post(path, json=body | field), client.post(path, json=body)
        if answer.status_code == 400:
            assert name in answer.json()["error"]["message"], answer.text
        else:
            assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == name
            assert answer.json()["usage"] == plain.json()["usage"]


@pytest.mark.parametrize(
    "text", ["a" * 100_000, " " * 100_000, "\n" * 100_000, "é" * 50_000, "0" * 100_000, "‍" * 50_000]
)
def test_long_texts_of_one_character(client: httpx.Client, text: str) -> None:
    """Pre-tokenized in linear time: otherwise the client gives up."""
    answer = client.post("/v1/completions", json=LM | {"prompt": text})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert client.post("/tokenize", json={"model": "lm", "prompt": text}).status_code == 200
    assert client.post("/v1/embeddings", json={"model": "embedder", "input": text}).status_code == 400


def test_names_of_models_in_paths(client: httpx.Client) -> None:
    for name in ("..%2f..%2fetc%2fpasswd", "%2fetc%2fpasswd", "C:%5Cwindows", "lm%00", "....//", "%c0%af"):
        assert client.get(f"/v1/models/{name}").status_code in (404, 400), name


def test_the_wire(server: Running) -> None:
    def post(body: bytes, *headers: bytes) -> bytes:
        lines = [b"POST /v1/completions HTTP/1.1", b"Host: localhost", b"Content-Type: application/json", *headers]
        return raw(server.port, b"\r\n".join([*lines, b"Connection: close", b"", body]))

    valid = b'{"model": "lm", "prompt": "a", "max_tokens": 1}'
    twice = b'{"model": "no", "model": "lm", "prompt": "b", "prompt": "a", "max_tokens": 1}'
    length = b"Content-Length: %d"
    assert b" 200 " in post(valid, length % len(valid))
    assert b" 200 " in post(twice, length % len(twice))  # the last one counts, as in most parsers
    assert b" 400 " in post(valid, b"Content-Length: 5")  # the body is cut off
    assert b" 400 " in post(valid, length % len(valid), b"Content-Length: 3")
    assert b" 400 " in post(valid, b"Content-Length: -1") and b" 400 " in post(valid, b"Content-Length: x")
    wide = valid.decode().encode("utf-16")
    assert post(wide, length % len(wide)).split()[1] in (b"200", b"400")
