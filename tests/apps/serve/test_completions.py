"""/v1/completions: answers are those of the library, alone or in a batch; streams are OpenAI's, byte by byte."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

import allyouneed as ayn
from allyouneed.infer.decoding.notes import drop_invalid
from served import BOTH_SERVERS, Running, golden
from waiting import PATIENCE

PROMPTS = ["The quick", "I am", "How are you today?", "你好", "", " 1 2 3", "Tous les", "lazy dog"]


@pytest.fixture(scope="module")
def lm(folders: dict[str, Path]) -> Any:
    return ayn.load(folders["lm"])


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"model": "lm"} | body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


@BOTH_SERVERS
def test_concurrent_requests_share_steps_and_get_the_answers_of_the_library(server: Running, lm: Any) -> None:
    expected = lm.generate(PROMPTS, method="greedy", max_length=24, loops=0)
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client, ThreadPoolExecutor(16) as pool:
        client.post("/v1/completions", json={"model": "lm", "prompt": "x", "max_tokens": 1})
        before = server.model("lm").loop.schedulers[False].steps
        asked = PROMPTS * 3
        found = list(
            pool.map(lambda text: texts(complete(client, prompt=text, temperature=0, max_tokens=24))[0], asked)
        )
        steps = server.model("lm").loop.schedulers[False].steps - before
    assert found == expected * 3
    assert steps < len(asked) * 24 / 2, "requests were decoded one after the other"


def test_one_request_with_many_prompts_and_choices(client: httpx.Client, lm: Any) -> None:
    answer = complete(client, prompt=PROMPTS[:3], n=2, seed=5, max_tokens=6)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    again = complete(client, prompt=PROMPTS[:3], n=2, seed=5, max_tokens=6)
    assert texts(again) == texts(answer) != texts(complete(client, prompt=PROMPTS[:3], n=2, seed=6, max_tokens=6))
    assert answer["usage"]["completion_tokens"] == 36
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


@BOTH_SERVERS
@pytest.mark.parametrize("kind", ["translator", "seq2seq"])
def test_an_encoder_decoder_reads_the_prompt_as_its_source(
    client: httpx.Client, folders: dict[str, Path], kind: str
) -> None:
    model = ayn.load(folders[kind])
    sources = ["How are you today?", "thank you very much! " * 12 + "\n\nYes."][: 2 if kind == "translator" else 1]
    predict = model.translate if kind == "translator" else model.seq2seq
    answer = complete(client, model=kind, prompt=sources, max_tokens=12)
    assert texts(answer) == predict(sources, max_length=12)
    if kind == "seq2seq":
        streamed = client.post(
            "/v1/completions",
            json={"model": kind, "prompt": sources[0], "max_tokens": 12, "temperature": 0, "stream": True},
        )
        pieces = [json.loads(line[6:]) for line in streamed.text.split("\n\n")[:-2]]
        streamed_text = "".join(piece["choices"][0]["text"] for piece in pieces)
        assert drop_invalid(streamed_text) == predict(sources[0], max_length=12, method="greedy", loops=0)


@BOTH_SERVERS
def test_token_ids_stop_strings_and_beams(client: httpx.Client, lm: Any) -> None:
    ids = [*lm.tokenizer.opening, *lm.tokenizer.encode("I am")]
    whole = texts(complete(client, prompt="I am", temperature=0, max_tokens=20))[0]
    assert texts(complete(client, prompt=ids, temperature=0, max_tokens=20)) == [whole]
    word = whole[4:6]
    answer = complete(client, prompt="I am", temperature=0, max_tokens=20, stop=[word, "never"])
    assert texts(answer) == [whole[: whole.index(word)]]
    assert answer["choices"][0]["finish_reason"] == "stop"
    beams = complete(client, prompt="I am", use_beam_search=True, best_of=4, n=3, max_tokens=6, length_penalty=0)
    full = lm.generate_full(["I am"], method="beam", beam=4, best=3, max_length=6, length_penalty=0, loops=0)[0]
    assert texts(beams) == [one.text for one in full.candidates]


@BOTH_SERVERS
def test_logprobs_and_echo_are_those_of_a_forward_pass(client: httpx.Client, lm: Any) -> None:
    answer = complete(client, prompt="The quick", temperature=0, max_tokens=4, logprobs=3, echo=True)
    found = answer["choices"][0]["logprobs"]
    prompt = [*lm.tokenizer.opening, *lm.tokenizer.encode("The quick")]
    (generated,) = lm.engine.complete([prompt], lm.decoding_options({"method": "greedy", "max_length": 4}))
    ids = [*prompt, *generated[0].tokens]
    log_probs = lm.logits(tokens=[ids])[0].log_softmax(-1)
    expected = [None, *(float(log_probs[n, ids[n + 1]]) for n in range(len(ids) - 1))]
    assert found["token_logprobs"] == [None, *(pytest.approx(one, abs=1e-4) for one in expected[1:])]
    assert all(len(top) == 3 for top in found["top_logprobs"][1:])
    assert answer["choices"][0]["text"].startswith("The quick")
    scored = complete(client, prompt="The quick", max_tokens=0, logprobs=1, echo=True)["choices"][0]
    assert scored["text"] == "The quick"
    assert scored["logprobs"]["token_logprobs"] == found["token_logprobs"][: len(prompt)]
    assert scored["logprobs"]["text_offset"][:2] == [0, 0]


@BOTH_SERVERS
def test_bias_and_penalties_change_the_choice(client: httpx.Client, lm: Any) -> None:
    plain = complete(client, prompt="I am", temperature=0, max_tokens=12, logprobs=0)["choices"][0]
    (generated,) = lm.engine.complete(
        [lm._prompt("I am", False)], lm.decoding_options({"method": "greedy", "max_length": 12})
    )
    banned = {str(token): -100 for token in generated[0].tokens}
    biased = complete(client, prompt="I am", temperature=0, max_tokens=12, logprobs=0, logit_bias=banned)["choices"][0]
    assert not set(biased["logprobs"]["tokens"]) & set(plain["logprobs"]["tokens"])
    spread = complete(client, prompt="I am", temperature=0, max_tokens=12, logprobs=0, frequency_penalty=2)
    assert len(set(spread["choices"][0]["logprobs"]["tokens"])) > len(set(plain["logprobs"]["tokens"]))


@BOTH_SERVERS
def test_exact_requests_get_the_answers_they_get_alone(client: httpx.Client, lm: Any) -> None:
    lm.exact = True
    try:
        expected = lm.generate("The quick", method="greedy", max_length=16, loops=0)
    finally:
        lm.exact = False
    answer = client.post(
        "/v1/completions",
        json={"model": "lm", "prompt": "The quick", "temperature": 0, "max_tokens": 16, "exact": True},
    )
    assert answer.headers["x-exact"] == "true" and texts(answer.json()) == [expected]


@BOTH_SERVERS
def test_the_stream_is_openais_byte_by_byte(client: httpx.Client, lm: Any) -> None:
    body = {"model": "gpt", "prompt": "I am", "temperature": 0, "max_tokens": 5, "stream": True}
    answer = client.post("/v1/completions", json=body | {"stream_options": {"include_usage": True}})
    pieces = list(lm.stream("I am", method="greedy", max_length=5, loops=0))
    head = 'data: {"id":"ID","object":"text_completion","created":0,"model":"lm","choices":['
    expected = [
        head + f'{{"index":0,"text":{json.dumps(piece, ensure_ascii=False)},"logprobs":null,"finish_reason":null}}],'
        '"usage":null}\n\n'
        for piece in pieces
    ]
    last = '{"index":0,"text":"","logprobs":null,"finish_reason":"length"}],"usage":null}\n\n'
    read = len(lm._prompt("I am", specials=False))
    usage = f'],"usage":{{"prompt_tokens":{read},"total_tokens":{read + 5},"completion_tokens":5}}}}\n\n'
    stream = "".join(expected) + head + last + head + usage + "data: [DONE]\n\n"
    assert golden(answer.content) == stream.encode()
    assert answer.headers["content-type"].startswith("text/event-stream")


@BOTH_SERVERS
def test_the_openai_client(server: Running, lm: Any) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert {"lm", "gpt"} <= {model.id for model in client.models.list()}
    assert client.models.retrieve("gpt").model_extra["max_model_len"] == 256  # type: ignore[index]
    whole = client.completions.create(model="lm", prompt="I am", temperature=0, max_tokens=9)
    stream = client.completions.create(model="lm", prompt="I am", temperature=0, max_tokens=9, stream=True)
    parts = [part.choices[0] for part in stream]
    assert "".join(part.text for part in parts) == whole.choices[0].text
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    with pytest.raises(openai.NotFoundError, match="unknown model"):
        client.completions.create(model="no", prompt="x")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="lm", prompt="x" * 2000, max_tokens=9)
    assert refused.value.code == "context_length_exceeded" and "256" in str(refused.value)


NUMBERS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "n", "best_of", "seed", "logprobs")
NUMBERS += ("presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty")


@pytest.mark.parametrize("name", NUMBERS)
def test_values_that_are_not_numbers_are_refused_by_name(client: httpx.Client, name: str) -> None:
    for value in ("true", '"5"', "NaN", "Infinity", str(2**63), "1e308", "[]", "-1e9"):
        body = f'{{"model": "lm", "prompt": "x", "{name}": {value}}}'
        answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, (value, answer.text)
        assert name in answer.json()["error"]["message"] and answer.json()["error"]["param"], (value, answer.text)


@BOTH_SERVERS
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [[]]}, "no tokens"),
        ({"prompt": [999999]}, "outside the vocabulary"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "n": 65}, "the limit is 64"),
        ({"prompt": ["x"] * 200, "n": 2}, "the limit is 256"),
        ({"prompt": "x", "stop": ["a"] * 17}, "the limit is 16"),
        ({"prompt": "x", "stop": ""}, "empty"),
        ({"prompt": "x", "logit_bias": {"x": 1}}, "not a token id"),
        ({"prompt": "x", "logit_bias": {"99999": 1}}, "outside the vocabulary"),
        ({"prompt": "x", "best_of": 2, "n": 3}, "less than"),
        ({"prompt": "x", "min_tokens": 9, "max_tokens": 3}, "more than"),
        ({"prompt": "x", "temprature": 1}, "temprature: unknown field"),
        ({"prompt": "x", "max_tokens": 256}, "allows 256"),
        ({"prompt": "\ud800"}, "unpaired surrogate"),
        ({"prompt": "x", "model": "/etc/passwd"}, "unknown model"),
        ({"prompt": "x", "model": "masked"}, "cannot generate text"),
    ],
)
def test_one_clear_message(client: httpx.Client, body: dict[str, Any], message: str) -> None:
    answer = client.post(
        "/v1/completions", content=json.dumps({"model": "lm"} | body), headers={"content-type": "application/json"}
    )
    assert answer.status_code in (400, 404), answer.text
    assert message in answer.json()["error"]["message"]


def test_odd_numbers_that_are_allowed(client: httpx.Client) -> None:
    for body in (
        {"top_k": 10**6},
        {"top_k": -1},
        {"temperature": 1e-40},
        {"min_p": 0},
        {"seed": -1},
        {"temperature": 100},
    ):
        complete(client, prompt="x", max_tokens=2, **body)
    assert torch.is_inference_mode_enabled() is False
