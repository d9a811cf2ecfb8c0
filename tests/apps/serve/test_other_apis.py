"""Embeddings, reranking, tasks, tokens, and the APIs of text-embeddings-inference and Ollama, with their clients."""

from __future__ import annotations

import base64
import io
import json
import struct
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest
from PIL import Image

import allyouneed as ayn
from allyouneed.apps.serve.dialects.tasks import read_image
from allyouneed.apps.serve.errors import ApiError
from allyouneed.apps.serve.settings import Limits
from served import BOTH_SERVERS, Running

TEXTS = ["How are you today?", "你好，世界。", "lazy dog", "The quick brown fox"]


@pytest.fixture(scope="module")
def vectors(folders: dict[str, Path]) -> Any:
    return ayn.load(folders["embedder"]).embed(TEXTS)


def test_embeddings_with_the_openai_client(server: Running, vectors: Any) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    found = client.embeddings.create(model="embedder", input=TEXTS)  # asks for base64 by itself
    plain = client.embeddings.create(model="embedder", input=TEXTS, encoding_format="float")
    for answer in (found, plain):
        assert [one.embedding for one in answer.data] == [pytest.approx(row, abs=1e-5) for row in vectors.tolist()]
    short = client.embeddings.create(model="embedder", input=TEXTS[0], dimensions=8).data[0].embedding
    norm = sum(value * value for value in vectors[0][:8].tolist()) ** 0.5
    assert short == pytest.approx([value / norm for value in vectors[0][:8].tolist()], abs=1e-5)
    assert client.embeddings.create(model="masked", input="a").data[0].embedding  # the body of a pretrained model
    with pytest.raises(openai.BadRequestError, match="cannot embed"):
        client.embeddings.create(model="classifier", input="a")


def test_embeddings_with_langchain(server: Running, vectors: Any) -> None:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    options: Any = {"model": "embedder", "base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
    found = OpenAIEmbeddings(**options, check_embedding_ctx_length=False).embed_documents(TEXTS)
    assert found == [pytest.approx(row, abs=1e-5) for row in vectors.tolist()]
    refused = httpx.post(f"{server.url}/v1/embeddings", json={"model": "embedder", "input": [[1, 2], [3]]})
    assert refused.status_code == 400 and "check_embedding_ctx_length=False" in refused.json()["error"]["message"]
    chat = ChatOpenAI(**options | {"model": "chat", "temperature": 0, "max_tokens": 5})
    assert "".join(str(part.content) for part in chat.stream("hi")) == chat.invoke("hi").content


@pytest.mark.parametrize("model", ["embedder", "classifier", "reranker"])
def test_reranking_returns_the_best_documents_with_their_scores(
    client: httpx.Client, folders: dict[str, Path], model: str
) -> None:
    predictor = ayn.load(folders[model])
    query, *texts = TEXTS
    if model == "embedder":
        expected = predictor.similarity([(query, text) for text in texts])
    elif model == "reranker":
        expected = predictor.relevance([(query, text) for text in texts])
    else:
        expected = [one.scores["pos"] for one in predictor.classify_full([(query, text) for text in texts])]
    body = {"model": model, "query": query, "documents": texts, "top_n": 2, "return_documents": True}
    results = client.post("/v1/rerank", json=body).json()["results"]
    order = sorted(range(3), key=lambda index: -expected[index])
    assert [one["index"] for one in results] == order[:2]
    assert [one["relevance_score"] for one in results] == pytest.approx([expected[n] for n in order[:2]], abs=1e-5)
    assert results[0]["document"] == {"text": texts[order[0]]}
    theirs = client.post("/rerank", json={"model": model, "query": query, "texts": texts, "return_text": True}).json()
    assert [(one["index"], one["text"]) for one in theirs] == [(n, texts[n]) for n in order]


@BOTH_SERVERS
def test_text_embeddings_inference(client: httpx.Client, vectors: Any) -> None:
    body = {"model": "embedder", "inputs": TEXTS, "normalize": False}
    assert client.post("/embed", json=body).json() == [pytest.approx(row, abs=1e-5) for row in vectors.tolist()]
    one = client.post("/embed", json={"model": "embedder", "inputs": TEXTS[0]}).json()
    assert sum(value * value for value in one[0]) == pytest.approx(1, abs=1e-5)
    long = {"model": "embedder", "inputs": "dog " * 400}
    refused = client.post("/embed", json=long)
    assert refused.status_code == 400 and refused.json()["error_type"] == "Validation" and "256" in refused.text
    assert client.post("/embed", json=long | {"truncate": True}).status_code == 200
    assert client.get("/info").json()["model_id"] == "lm"


def test_tasks(client: httpx.Client, folders: dict[str, Path]) -> None:
    def run(task: str, **body: Any) -> Any:
        answer = client.post(f"/v1/tasks/{task}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["results"]

    expected = ayn.load(folders["classifier"]).classify_full(TEXTS)
    found = run("classification", model="classifier", inputs=TEXTS)
    assert [one["label"] for one in found] == [one.label for one in expected]
    assert [one["scores"] for one in found] == [pytest.approx(one.scores, abs=1e-5) for one in expected]
    masked = ["How <mask> you?", "<mask> <mask>"]
    fillings = ayn.load(folders["masked"]).fill_mask(masked, top=3)
    answers = run("fill-mask", model="masked", inputs=masked, top=3)
    assert [[[one["token"] for one in mask] for mask in text] for text in answers] == [
        [[one.token for one in mask] for mask in text] for text in fillings
    ]
    tags = ayn.load(folders["tagger"]).tag_full(TEXTS)
    assert [(one["words"], one["tags"]) for one in run("tagging", model="tagger", inputs=TEXTS)] == [
        (one.words, one.tags) for one in tags
    ]
    pairs = [TEXTS[:2], TEXTS[2:]]
    cosines = ayn.load(folders["embedder"]).similarity([tuple(pair) for pair in pairs])
    assert run("similarity", model="embedder", inputs=pairs) == pytest.approx(cosines, abs=1e-5)
    asked = [(TEXTS[0], TEXTS[3]), (TEXTS[2], "The quick brown fox. " * 90)]
    expected = ayn.load(folders["answerer"]).answer_full(asked, top=2)
    answers = run("question-answering", model="answerer", inputs=[list(one) for one in asked], top=2)
    assert [(one["text"], one["begin"]) for one in answers] == [(one.text, one.answers[0].begin) for one in expected]
    assert [one["alternatives"][0]["text"] for one in answers] == [one.answers[1].text for one in expected]
    rows = [{"items": ["a", "b"], "item": "c"}, {"items": [], "item": "?"}]
    clicks = [one["probability"] for one in run("click", model="click", inputs=rows)]
    assert clicks == pytest.approx(ayn.load(folders["click"]).predict_click(rows), abs=1e-5)


@BOTH_SERVERS
def test_tasks_that_write_texts(client: httpx.Client, folders: dict[str, Path]) -> None:
    def run(task: str, model: str, **body: Any) -> Any:
        answer = client.post(f"/v1/tasks/{task}", json={"model": model, "inputs": TEXTS[:2]} | body)
        assert answer.status_code == 200, answer.text
        return answer.json()["results"]

    for task, model, method in (
        ("seq2seq", "seq2seq", "seq2seq"),
        ("seq2seq", "prompted", "seq2seq"),
        ("summarisation", "summariser", "summarise"),
        ("correction", "corrector", "correct"),
    ):
        predictor = ayn.load(folders[model])
        assert [one["text"] for one in run(task, model)] == getattr(predictor, method)(TEXTS[:2]), model
    best = ayn.load(folders["summariser"]).summarise_full(TEXTS[:2], beam=4, best=2)
    found = run("summarisation", "summariser", top=2)
    assert [one["alternatives"] for one in found] == [[full.candidates[1].text] for full in best]
    edits = ayn.load(folders["corrector"]).correct_full(TEXTS[:2])
    assert [one["edits"] for one in run("correction", "corrector")] == [
        [e._asdict() for e in one.edits] for one in edits
    ]


@pytest.mark.parametrize(
    ("task", "body", "message"),
    [
        ("fill-mask", {"model": "masked", "inputs": ["no mask"]}, "contains no <mask>"),
        ("fill-mask", {"model": "lm", "inputs": ["<mask>"]}, "cannot fill masks"),
        ("similarity", {"model": "embedder", "inputs": ["one"]}, "pairs"),
        ("classification", {"model": "classifier", "inputs": ["dog " * 400]}, "256"),
        ("classification", {"model": "classifier", "inputs": ["a"] * 2049}, "the limit is 2048"),
        ("classification", {"model": "classifier", "inputs": ["a"], "labels": ["b"]}, "labels"),
        ("classification", {"model": "classifier", "inputs": [{"a": 1}]}, "found an object"),
        ("question-answering", {"model": "answerer", "inputs": ["a"]}, "pairs"),
        ("question-answering", {"model": "answerer", "inputs": [["dog " * 400, "a dog"]]}, "256"),
        ("click", {"model": "click", "inputs": ["a"]}, "expected objects"),
        ("click", {"model": "click", "inputs": [{"items": []}]}, "row 0: no 'item' (columns: items, item)"),
        ("click", {"model": "click", "inputs": [{"items": ["a"] * 10_001, "item": "b"}]}, "the limit is 10000"),
        ("click", {"model": "lm", "inputs": [{"items": [], "item": "a"}]}, "cannot predict clicks"),
        ("correction", {"model": "corrector", "inputs": ["a"], "top": 2}, "one correction"),
        ("summarisation", {"model": "lm", "inputs": ["a"]}, "cannot summarise texts"),
        ("nothing", {"inputs": ["a"]}, "task"),
    ],
)
def test_task_routes_refuse_bad_requests(client: httpx.Client, task: str, body: Any, message: str) -> None:
    answer = client.post(f"/v1/tasks/{task}", json=body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


def test_images_are_read_from_base64_and_nothing_is_opened() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(buffer, "PNG")
    text = base64.b64encode(buffer.getvalue()).decode()
    assert read_image(text, Limits()).size == read_image(f"data:image/png;base64,{text}", Limits()).size == (3, 2)
    for wrong in ("file:///etc/passwd", "http://127.0.0.1/x", "/etc/passwd", "QUJD", ""):
        with pytest.raises(ApiError, match="image"):
            read_image(wrong, Limits())
    with pytest.raises(ApiError, match="the limit is 5"):
        read_image(text, Limits(image_pixels=5))


def test_tokens(client: httpx.Client, folders: dict[str, Path]) -> None:
    tokenizer = ayn.load(folders["lm"]).tokenizer
    found = client.post("/tokenize", json={"model": "lm", "prompt": "I am", "return_token_strs": True}).json()
    assert found["tokens"] == [tokenizer.bos, *tokenizer.encode("I am")] and found["max_model_len"] == 256
    plain = client.post("/tokenize", json={"model": "lm", "prompt": "I am </s>", "add_special_tokens": False}).json()
    assert plain["tokens"] == tokenizer.encode("I am </s>") and tokenizer.eos not in plain["tokens"]
    assert client.post("/detokenize", json={"model": "lm", "tokens": plain["tokens"]}).json() == {"prompt": "I am </s>"}
    assert client.post("/detokenize", json={"model": "lm", "tokens": [99999]}).status_code == 400


@BOTH_SERVERS
def test_the_ollama_client(server: Running, folders: dict[str, Path], vectors: Any) -> None:
    client = ollama.Client(host=server.url)
    assert "lm" in {model.model for model in client.list().models}
    assert client.show("chat:latest").template
    options = {"temperature": 0, "num_predict": 6, "num_ctx": 2048}
    expected = ayn.load(folders["lm"]).generate("I am", method="greedy", max_length=6, loops=0)
    assert client.generate("lm", "I am", options=options).response == expected
    parts = list(client.generate("lm", "I am", options=options, stream=True))
    assert "".join(part.response for part in parts) == expected
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 6 and parts[-1].done_reason == "length"
    messages = [{"role": "user", "content": "I am"}]
    whole = client.chat("chat", messages, options=options)
    assert "".join(p.message.content or "" for p in client.chat("chat", messages, options=options, stream=True)) == (
        whole.message.content
    )
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    assert client.embed("embedder", TEXTS).embeddings == [pytest.approx(row, abs=1e-5) for row in unit.tolist()]
    assert {"lm", "chat", "embedder"} <= {model.model for model in client.ps().models}
    with pytest.raises(ollama.ResponseError, match="unknown model") as refused:
        client.generate("no", "x")
    assert refused.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"options\.temprature: unknown field \(did you mean 'temperature'"):
        client.generate("lm", "x", options={"temprature": 1})


def test_an_error_in_a_stream_is_an_event(
    server: Running, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.post("/v1/completions", json={"model": "lm", "prompt": "x", "max_tokens": 1})
    loop = server.model("lm").loop
    submit = loop.submit

    def failing(wanted: Any, *options: Any) -> Any:
        ((request, spec),) = wanted
        count = [0]

        def listen(token: int) -> None:
            count[0] += 1
            if count[0] > 2:
                raise RuntimeError("secret text")
            request.listener(token)

        return submit([(request._replace(listener=listen), spec)], *options)

    monkeypatch.setattr(loop, "submit", failing)
    body = {"model": "lm", "prompt": "x", "max_tokens": 9, "temperature": 0, "stream": True}
    lines = client.post("/v1/completions", json=body).text.split("\n\n")
    assert json.loads(lines[-3][6:])["error"]["code"] == "internal_error" and lines[-2] == "data: [DONE]"
    theirs = client.post("/api/generate", json={"model": "lm", "prompt": "x", "options": {"num_predict": 9}})
    assert "internal error" in json.loads(theirs.text.splitlines()[-1])["error"] and "secret" not in theirs.text


def test_base64_is_little_endian_floats(client: httpx.Client, vectors: Any) -> None:
    body = {"model": "embedder", "input": TEXTS[0], "encoding_format": "base64"}
    raw = base64.b64decode(client.post("/v1/embeddings", json=body).json()["data"][0]["embedding"])
    assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(vectors[0].tolist(), abs=1e-5)
