"""Images in chats: the server gives the answers of the library, from data: URLs only."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import allyouneed as ayn
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies, train
from allyouneed.folder import Folder
from infer_fixtures import TEXT
from served import served_client, write_folder
from waiting import PATIENCE

pillow = pytest.importorskip("PIL.Image")
LAYER: dict[str, Any] = {"mixer": {"kind": "attention", "heads": 2}, "channel": {"kind": "ffn", "hidden": 16}}
EMBED = {"kind": "patches", "image": 8, "patch": 4}
RESAMPLER = {"kind": "attentive-pooling", "slots": 3, "heads": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("images")
    tokenizer = train(TokenizerConfig(vocab=330, specials=("<image>", "</image>")), TEXT * 2)
    tower = {"encoder": {"width": 12, "embed": EMBED, "encoder": [LAYER]}, "resampler": RESAMPLER}
    torch.manual_seed(0)
    layer = LAYER | {"repeat": 2, "wiring": "pre-norm"}
    layer["mixer"] = {"kind": "attention", "heads": 2, "pattern": "causal", "positions": "rotary"}
    tree = {"kind": "interleaved", "vocab": tokenizer.size, "width": 16, "embed": {"tied": False}}
    model = ayn.build(tree | {"decoder": [layer], "image": tower})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_()
    task = {"kind": "interleaved", "image": {"size": [8, 8], "slots": 3}}
    Folder(model.eval(), Vocabularies(tokenizer, tokenizer), task, {}).save(place / "images")
    return {"images": place / "images", "chat": write_folder(place / "chat", "chat")}


@pytest.fixture(scope="module", params=[False, True], ids=["one_process", "api_process"])
def client(folders: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    with served_client(folders, split=request.param) as (_, found):
        yield found


def picture(seed: int) -> Any:
    return pillow.fromarray(np.random.default_rng(seed).integers(0, 255, (10, 12, 3), dtype=np.uint8))


def part(seed: int) -> dict[str, Any]:
    file = io.BytesIO()
    picture(seed).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def ask(client: httpx.Client, content: Any, model: str = "images") -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}
    return client.post("/v1/chat/completions", json=body, timeout=PATIENCE)


def test_images_in_a_chat(client: httpx.Client, folders: dict[str, Path]) -> None:
    model = ayn.load(folders["images"])
    words = [{"type": "text", "text": text} for text in ("The quick", " fox")]
    asked = [[part(n), words[0], part(n + 1), words[1]] for n in range(3)]
    prompts = [[{"image": picture(n)}, "The quick", {"image": picture(n + 1)}, " fox"] for n in range(3)]
    expected = model.generate(prompts, method="greedy", max_length=8, loops=0)
    assert len(set(expected)) > 1
    answers = [ask(client, content).json() for content in asked]
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == expected
    assert answers[0]["usage"]["prompt_tokens"] == len(model.read_prompt(prompts[0]).tokens)


@pytest.mark.parametrize(
    ("content", "model", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}], "images", "URLs and paths are not"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], "images", "not an image"),
        ([part(0)], "chat", "the model chat reads texts only; remove the images"),
    ],
)
def test_images_that_are_refused(client: httpx.Client, content: Any, model: str, message: str) -> None:
    answer = ask(client, content, model)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]
