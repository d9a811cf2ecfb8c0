"""What real clients send, and what is refused because the answer would be another one than they expect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from allyouneed.models import shipped
from served import BOTH_SERVERS, Running, raw, served_client

LM = {"model": "lm", "prompt": "a", "max_tokens": 1, "temperature": 0}
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "temperature": 0}


@BOTH_SERVERS
@pytest.mark.parametrize(
    "kind", [None, "application/x-www-form-urlencoded", "text/plain", "application/json; charset=utf-8"]
)
def test_json_under_any_content_type(client: httpx.Client, kind: str | None) -> None:
    """curl says it is a form, others say nothing."""
    headers = {} if kind is None else {"content-type": kind}
    for path, body in (
        ("/v1/completions", LM),
        ("/v1/chat/completions", CHAT),
        ("/api/generate", {"model": "lm", "prompt": "a", "options": {"num_predict": 1}}),
        ("/api/embed", {"model": "embedder", "input": "a"}),
        ("/v1/embeddings", {"model": "embedder", "input": "a"}),
        ("/tokenize", {"model": "lm", "prompt": "a"}),
    ):
        answer = client.post(path, content=json.dumps(body).encode(), headers=headers)
        assert answer.status_code == 200, (path, answer.text)
    wrong = client.post("/v1/completions", content=b"model=lm&prompt=a", headers=headers)
    assert wrong.status_code == 400 and "JSON" in wrong.json()["error"]["message"]


def test_json_that_curl_calls_a_form_is_translated(translating: tuple[Running, httpx.Client]) -> None:
    _, client = translating
    body = json.dumps({"q": "Hello", "source": "en", "target": "de"}).encode()
    for headers in ({}, {"content-type": "application/x-www-form-urlencoded"}):
        assert client.post("/translate", content=body, headers=headers).status_code == 200


def test_libretranslates_javascript_client_spells_its_key_otherwise(translating: tuple[Running, httpx.Client]) -> None:
    _, client = translating
    body = {"q": "Hello", "source": "en", "target": "de", "apiKey": "secret-key"}
    answer = client.post("/translate", json=body, headers={"authorization": ""})
    assert answer.status_code == 200 and "apiKey" not in answer.headers.get("x-ignored-fields", "")


def test_deepl_by_get(translating: tuple[Running, httpx.Client]) -> None:
    """As deep-translator sends it."""
    _, client = translating
    query = {"auth_key": "secret-key", "text": "Hello", "source_lang": "EN", "target_lang": "DE"}
    got = client.get("/v2/translate", params=query, headers={"authorization": ""})
    sent = client.post("/v2/translate", json={"text": ["Hello"], "source_lang": "EN", "target_lang": "DE"})
    assert got.status_code == 200 and got.json() == sent.json()


@BOTH_SERVERS
def test_fields_that_ask_for_nothing_more(client: httpx.Client) -> None:
    plain = client.post("/v1/chat/completions", json=CHAT).json()["choices"]
    for more in (
        {"modalities": ["text"]},
        {"functions": []},
        {"function_call": "none"},
        {"response_format": {"type": "text"}},
    ):
        answer = client.post("/v1/chat/completions", json=CHAT | more)
        assert answer.status_code == 200 and answer.json()["choices"] == plain, more
    assert client.post("/v1/completions", json=LM | {"response_format": {"type": "text"}}).status_code == 200


@BOTH_SERVERS
@pytest.mark.parametrize(
    ("path", "body", "more"),
    [
        ("/v1/completions", LM, {"response_format": {"type": "json_object"}}),
        ("/v1/completions", LM, {"tools": [{"type": "function"}]}),
        ("/v1/chat/completions", CHAT, {"response_format": {"type": "json_object"}}),
        ("/v1/chat/completions", CHAT, {"modalities": ["text", "image"]}),
        ("/v1/chat/completions", CHAT, {"modalities": ["image"]}),
        ("/v1/chat/completions", CHAT, {"functions": [{"name": "f"}]}),
        ("/api/generate", {"model": "lm", "prompt": "a"}, {"width": 512}),
        ("/api/generate", {"model": "lm", "prompt": "a"}, {"height": 512, "steps": 4}),
        ("/api/generate", {"model": "lm", "prompt": "a"}, {"format": "json"}),
        ("/api/generate", {"model": "chat", "prompt": "a"}, {"raw": True, "system": "b"}),
    ],
)
def test_what_would_be_answered_otherwise_is_refused(
    client: httpx.Client, path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    answer = client.post(path, json=body | more)
    assert answer.status_code == 400 and next(iter(more)) in answer.text


def test_raw_and_system_of_ollama(client: httpx.Client) -> None:
    body = {"model": "chat", "prompt": "a", "stream": False, "options": {"num_predict": 1}}
    raw = client.post("/api/generate", json=body | {"raw": True})
    system = client.post("/api/generate", json=body | {"system": "b"})
    assert raw.status_code == system.status_code == 200
    assert raw.json()["prompt_eval_count"] < system.json()["prompt_eval_count"]
    both = client.post("/api/generate", json=body | {"raw": True, "system": "b"})
    assert "raw" in both.json()["error"] and "template" not in both.json()["error"]


def test_a_server_of_one_model_needs_no_name(folders: dict[str, Path], client: httpx.Client) -> None:
    """Clients of endpoints with one model send `dummy`, or nothing."""
    with served_client({"chat": folders["chat"]}) as (_, one):
        for name in ("dummy", "", "tgi"):
            answer = one.post("/v1/chat/completions", json=CHAT | {"model": name})
            assert answer.status_code == 200 and answer.json()["model"] == "chat"
        assert one.post("/v1/chat/completions", json=CHAT | {"model": "other"}).status_code == 404
    assert client.post("/v1/chat/completions", json=CHAT | {"model": "dummy"}).status_code == 404


def test_embedding_routes_choose_an_embedding_model(folders: dict[str, Path]) -> None:
    with served_client({"lm": folders["lm"], "embedder": folders["embedder"]}) as (_, client):
        for path, body in (
            ("/embed", {"inputs": "a cat"}),
            ("/rerank", {"query": "a", "texts": ["a cat", "b"]}),
            ("/v1/embeddings", {"input": "a cat"}),
            ("/v1/rerank", {"query": "a", "documents": ["a cat", "b"]}),
        ):
            chosen, named = client.post(path, json=body), client.post(path, json=body | {"model": "embedder"})
            other = client.post(path, json=body | {"model": "lm"})
            id = "rerank-"
            same = [
                answer.text.partition(id)[0] + answer.text.partition(id)[2][32:] for answer in (chosen, named, other)
            ]
            assert same[0] == same[1] != same[2], path


def test_vectors_that_are_not_normalised(tmp_path: Path) -> None:
    """Also those of a model that normalises its own."""
    import torch

    from allyouneed import build, load
    from allyouneed.data.tokenizers.base import Vocabularies
    from allyouneed.folder import Folder
    from served import tiny_tokenizer
    from toy_texts import ENCODER

    tokenizer, head = tiny_tokenizer(), {"kind": "pooled", "normalise": True}
    torch.manual_seed(0)
    model = build(ENCODER | {"head": head, "vocab": tokenizer.size}).eval()
    Folder(model, Vocabularies(tokenizer, tokenizer), {"kind": "similarity", "range": [0, 1]}, {}, max_tokens=64).save(
        tmp_path
    )
    unit, free = load(tmp_path, "cpu").embed("a cat"), load(tmp_path, "cpu").embed("a cat", raw=True)
    assert unit.norm() == pytest.approx(1) and free.norm() != pytest.approx(1, abs=0.01)
    torch.testing.assert_close(free / free.norm(), unit)
    with served_client({"unit": tmp_path}) as (_, client):
        found = client.post("/embed", json={"inputs": "a cat", "normalize": False}).json()
        assert found == [pytest.approx(free.tolist(), abs=1e-5)]


def test_head_is_answered_as_get_without_a_body(server: Running, client: httpx.Client) -> None:
    for path in ("/", "/healthz", "/v1/models", "/languages"):
        head, got = client.head(path), client.get(path)
        assert head.status_code == got.status_code == 200 and head.content == b"", path
        assert head.headers["content-type"] == got.headers["content-type"]
    assert b" 200 " in raw(server.port, b"HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")


def test_two_lengths_of_a_body_end_the_connection(server: Running) -> None:
    """A proxy in front may have read another body: what follows on the connection is nobody's."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    hidden = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    found = raw(server.port, head + b"0\r\n\r\n" + hidden)
    assert found.count(b"HTTP/1.1 ") == 1 and b" 400 " in found and b"connection: close" in found.lower()


def test_long_texts_are_refused_on_every_way_in(client: httpx.Client) -> None:
    long = "a" * 1_000_001
    for path, body in (
        ("/detect", {"q": long}),
        ("/translate", {"q": long, "source": "en", "target": "de"}),
        ("/api/chat", {"model": "chat", "messages": [{"role": "user", "content": long}]}),
        ("/v1/chat/completions", {"model": "chat", "messages": [{"role": "user", "content": long}]}),
        ("/api/generate", {"model": "lm", "prompt": long}),
        ("/tokenize", {"model": "lm", "prompt": long}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 400 and "the limit is 1000000" in answer.text, path


def counted(client: httpx.Client, name: str, model: str) -> float:
    line = f'vllm:{name}_total{{model_name="{model}"}} '
    return sum(
        float(one.removeprefix(line)) for one in client.get("/metrics").text.splitlines() if one.startswith(line)
    )


def test_prompt_tokens_of_forward_passes_are_counted(client: httpx.Client) -> None:
    before = counted(client, "prompt_tokens", "embedder")
    usage = client.post("/v1/embeddings", json={"model": "embedder", "input": ["a cat", "b"]}).json()["usage"]
    assert counted(client, "prompt_tokens", "embedder") == before + usage["prompt_tokens"]


def test_unknown_fields_of_all_messages_are_counted_together(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "a", f"unknown{number}": 1} for number in range(200)]
    answer = client.post("/v1/chat/completions", json=CHAT | {"messages": messages})
    assert answer.status_code == 400 and "100" in answer.json()["error"]["message"]
    same = [{"role": "user", "content": "a", "timestamp": 1}] * 200
    answer = client.post("/v1/chat/completions", json=CHAT | {"messages": same})
    assert "unknown" not in answer.text and answer.headers.get("x-ignored-fields", "timestamp") == "timestamp"


def test_the_bundled_translator_is_found_beside_a_language_model(folders: dict[str, Path]) -> None:
    with served_client({"lm": folders["lm"], "translator": shipped()}) as (_, client):
        answer = client.post("/translate", json={"q": "Hello", "source": "en", "target": "de"})
        assert answer.status_code == 200 and answer.json()["translatedText"]
