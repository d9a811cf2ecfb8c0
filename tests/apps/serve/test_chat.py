"""/v1/chat/completions, and chat templates that are hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import allyouneed as ayn
from allyouneed.data.chat.template import ChatTemplate, TemplateError
from served import BOTH_SERVERS, Running, golden

MESSAGES = [{"role": "system", "content": "The quick"}, {"role": "user", "content": "How are you today?"}]
PROMPT = "<s>system: The quick\nuser: How are you today?\nassistant:"


@pytest.fixture(scope="module")
def chat(folders: dict[str, Path]) -> Any:
    return ayn.load(folders["chat"])


@BOTH_SERVERS
def test_the_openai_client(server: Running, chat: Any) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    ids = chat.tokenizer.encode(PROMPT, specials=True)
    assert ids[0] == chat.tokenizer.bos
    (expected,) = chat.engine.complete([ids], chat.decoding_options({"method": "greedy", "max_length": 9, "loops": 0}))
    text = chat.tokenizer.decode([*ids, *expected[0].tokens])[len(chat.tokenizer.decode(ids)) :]
    options: Any = {"model": "chat", "messages": MESSAGES, "temperature": 0, "max_tokens": 9}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == text and whole.usage and whole.usage.prompt_tokens == len(ids)
    entries = whole.choices[0].logprobs.content  # type: ignore[union-attr]
    assert entries and len(entries) == 9 and all(len(entry.top_logprobs) == 2 for entry in entries)
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode(errors="replace") == text
    parts = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text
    assert parts[-1].usage == whole.usage
    several = client.chat.completions.create(model="chat", messages=MESSAGES, n=3, seed=1, max_tokens=4)  # type: ignore[arg-type]
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    with pytest.raises(openai.BadRequestError, match="no chat template") as refused:
        client.chat.completions.create(model="lm", messages=MESSAGES)  # type: ignore[arg-type]
    assert refused.value.code == "no_chat_template"


@BOTH_SERVERS
def test_the_stream_is_openais_byte_by_byte(client: httpx.Client, chat: Any) -> None:
    body = {"model": "chat", "messages": MESSAGES, "temperature": 0, "max_tokens": 4, "stream": True}
    answer = client.post("/v1/chat/completions", json=body)
    lines = golden(answer.content).decode().split("\n\n")
    head = 'data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"chat","choices":[{"index":0,"delta":'
    assert lines[0] == head + '{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}]}'
    assert lines[-3:] == [head + '{},"logprobs":null,"finish_reason":"length"}]}', "data: [DONE]", ""]
    for line in lines[1:-3]:
        piece = json.loads(line[6:])["choices"][0]["delta"]["content"]
        expected = f'{{"content":{json.dumps(piece, ensure_ascii=False)}}},"logprobs":null,"finish_reason":null}}]}}'
        assert piece and line == head + expected


def test_special_tokens_in_a_message_are_plain_text(chat: Any) -> None:
    template = ChatTemplate.find(chat.folder.path, chat.tokenizer)
    assert template is not None
    tokenizer = chat.tokenizer
    try:
        ids = template.encode([{"role": "user", "content": "a</s>b<s>\ue0000\ue001"}], {"add_generation_prompt": True})
        specials = {tokenizer.bos, tokenizer.eos}
        assert [token for token in ids if token in specials] == [tokenizer.bos]  # the template's own
        assert tokenizer.decode(ids) == "user: a</s>b<s>\ufffd0\ue001\nassistant:"
    finally:
        template.close()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|refuses"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than"),
        ("{{ 'x' * 10**10 }}", "memory|MemoryError"),
        ("{{ '%999999999d' | format(1) }}{{ '%999999999d' | format(1) }}", "memory|MemoryError|more than"),
        ("{% for a in range(2000) %}{{ 'x' * 1000 }}{% endfor %}", "more than"),
        ("{% include '/etc/passwd' %}", "no loader|refuses"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% if %}", "TemplateSyntaxError"),
    ],
)
def test_hostile_templates_end_in_time_with_one_message(chat: Any, source: str, message: str) -> None:
    template = ChatTemplate(source, {}, chat.tokenizer, seconds=0.5, characters=1_000_000)
    try:
        with pytest.raises(TemplateError, match=message):
            template.render({"messages": []})
        template.source = "{{ bos }}fine"
        assert template.render({"bos": "<s>"}) == "<s>fine"
    finally:
        template.close()


@BOTH_SERVERS
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "messages"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}
                ]
            },
            "messages",
        ),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
        ({"messages": MESSAGES, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "256"),
        ({"messages": MESSAGES * 600}, "1024"),
    ],
)
def test_one_clear_message(client: httpx.Client, body: dict[str, Any], message: str) -> None:
    answer = client.post("/v1/chat/completions", json={"model": "chat"} | body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
