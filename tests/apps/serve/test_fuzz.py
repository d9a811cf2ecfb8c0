"""Requests that no client should send: never a 5xx, never a hang, and the server answers afterwards as before."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from served import Running
from waiting import PATIENCE, until

NASTY: list[Any] = [
    None, True, False, -1, 0, 1, 0.5, 2**31, 2**63, -(2**63), 10**400, 1e308, float("nan"), float("inf"), "", " ", "5",
    "\0", "\ud800", "\ufeff", "x" * 5000, "</s><s>", "<|im_start|>", "‮عربي", "👩‍👩‍👧‍👦", "../../etc/passwd",
    "file:///etc/passwd", "http://127.0.0.1:1/", "{{ ''.__class__ }}", [], [[]], [None], ["", "a"],
    [[1, 2], "a"], {}, {"a": {}}, [0] * 3000,
]  # fmt: skip
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "lm", "prompt": "a", "max_tokens": 2, "temperature": 1, "top_p": 0.9, "top_k": 5, "n": 1,
        "stop": ["b"], "seed": 1, "logprobs": 1, "echo": False, "logit_bias": {"5": 1}, "stream": False,
        "min_tokens": 0, "best_of": 1, "repetition_penalty": 1.1, "use_beam_search": False, "exact": False,
        "suffix": None, "stream_options": None,
    },
    "/v1/chat/completions": {
        "model": "chat", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "chat_template_kwargs": {},
        "logprobs": True, "top_logprobs": 1, "n": 1, "stream": True,
    },
    "/v1/embeddings": {"model": "embedder", "input": "a", "encoding_format": "float", "dimensions": 4},
    "/v1/rerank": {"model": "embedder", "query": "a", "documents": ["b"], "top_n": 1},
    "/v1/tasks/classification": {"model": "classifier", "inputs": ["a"], "top": 1},
    "/v1/tasks/fill-mask": {"model": "masked", "inputs": ["a <mask>"], "top": 1},
    "/v1/tasks/tagging": {"model": "tagger", "inputs": ["a"]},
    "/v1/tasks/similarity": {"model": "embedder", "inputs": [["a", "b"]]},
    "/v1/tasks/click": {"model": "click", "inputs": [{"items": ["a"], "item": "b"}]},
    "/v1/tasks/image-classification": {"model": "classifier", "inputs": ["aaaa"]},
    "/v1/tasks/question-answering": {"model": "answerer", "inputs": [["a", "b"]], "top": 1},
    "/v1/tasks/correction": {"model": "corrector", "inputs": ["a"]},
    "/embed": {"model": "embedder", "inputs": "a", "normalize": True, "truncate": True},
    "/rerank": {"model": "embedder", "query": "a", "texts": ["b"]},
    "/tokenize": {"model": "lm", "prompt": "a"},
    "/detokenize": {"model": "lm", "tokens": [5]},
    "/api/chat": {"model": "chat", "messages": [{"role": "user", "content": "a"}], "options": {"num_predict": 1}},
    "/api/generate": {"model": "lm", "prompt": "a", "options": {"num_predict": 1}, "stream": True},
    "/api/embed": {"model": "embedder", "input": "a", "dimensions": 3},
    "/api/show": {"model": "lm"},
    "/v1/tasks/translation": {"model": "translator", "inputs": ["a"], "format": "text", "glossary": {}, "top": 1},
    "/translate": {"q": "a", "source": "en", "target": "zh", "alternatives": 1, "format": "text", "glossary": ""},
    "/detect": {"q": "a"},
    "/v2/translate": {
        "text": ["a"], "target_lang": "EN", "tag_handling": "html", "ignore_tags": ["x"], "split_sentences": "0",
        "preserve_formatting": True, "outline_detection": True, "glossary_id": None,
    },
    "/v2/glossaries": {"name": "a", "source_lang": "EN", "target_lang": "DE", "entries": "a\tb"},
    "/v3/glossaries": {
        "name": "a", "dictionaries": [{"source_lang": "EN", "target_lang": "DE", "entries": "a\tb"}],
    },
}  # fmt: skip


def send(client: httpx.Client, path: str, body: Any) -> None:
    content = json.dumps(body).encode()
    answer = client.post(path, content=content, headers={"content-type": "application/json"}, timeout=PATIENCE)
    assert answer.status_code < 500, (path, content[:300], answer.text[:300])
    if answer.status_code >= 400:
        error = answer.json()
        assert error.get("error") or error.get("message"), answer.text
        assert "Traceback" not in answer.text and "/tmp/" not in answer.text


@pytest.mark.parametrize("path", VALID)
def test_every_field_with_a_nasty_value(client: httpx.Client, path: str) -> None:
    """One nasty value per field here; the slow test below sends all of them."""
    body = VALID[path]
    for number, name in enumerate([*body, "model", "unknown"]):
        send(client, path, body | {name: NASTY[(number * 7 + len(path)) % len(NASTY)]})
    plain = client.post(path, json=body)
    assert plain.status_code < 500


@pytest.mark.slow
@pytest.mark.parametrize("path", VALID)
def test_every_field_with_every_nasty_value(client: httpx.Client, path: str) -> None:
    for name in [*VALID[path], "unknown"]:
        for value in NASTY:
            send(client, path, VALID[path] | {name: value})
    for value in NASTY:
        send(client, path, value)


PATHS = st.sampled_from(sorted(VALID))
ANY = st.recursive(
    st.sampled_from(NASTY),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)


@given(path=PATHS, data=st.data())
@settings(suppress_health_check=list(HealthCheck), deadline=None)
def test_several_nasty_fields_at_once(server: Running, path: str, data: Any) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(VALID[path])), min_size=1, max_size=3, unique=True))
    with httpx.Client(base_url=server.url) as client:
        send(client, path, VALID[path] | {name: data.draw(ANY) for name in names})


def schema_test(server: Running, mode: GenerationMode, examples: int) -> None:
    schema = schemathesis.openapi.from_dict(server.gate.app.openapi())  # type: ignore[attr-defined]
    tried = 0
    for operation in schema.get_all_operations():
        found = operation.ok()

        @given(case=found.as_strategy(generation_mode=mode))
        @settings(max_examples=examples, suppress_health_check=list(HealthCheck), deadline=None)
        def run(case: Any) -> None:
            nonlocal tried
            answer = case.call(base_url=server.url, timeout=PATIENCE)
            assert answer.status_code < 500, (case.method, case.path, answer.text[:300])
            tried += 1

        try:
            run()
        except Exception as error:
            if type(error).__name__ not in ("Unsatisfiable", "SkipTest"):  # nothing can be wrong with such a route
                raise
    assert tried > 10


@pytest.mark.parametrize("mode", [GenerationMode.NEGATIVE])
def test_the_schema(server: Running, mode: GenerationMode) -> None:
    schema_test(server, mode, 1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.NEGATIVE, GenerationMode.POSITIVE])
def test_the_schema_at_length(server: Running, mode: GenerationMode) -> None:
    schema_test(server, mode, 100)


def test_nothing_leaked(server: Running, client: httpx.Client) -> None:
    """Runs after the others in this file: all slots are free, and the answer is that of a fresh server."""
    answer = client.post("/v1/completions", json={"model": "lm", "prompt": "I am", "temperature": 0, "max_tokens": 3})
    assert answer.status_code == 200
    for entry in server.registry.entries.values():
        if entry.model is not None:
            loop = entry.model.loop
            until(lambda loop=loop: loop.sequences == 0 and not loop.forward.jobs)  # type: ignore[misc]
            until(lambda loop=loop: all(not scheduler.active for scheduler in loop.schedulers.values()))  # type: ignore[misc]
    until(lambda: server.gate.buffered == 0)
