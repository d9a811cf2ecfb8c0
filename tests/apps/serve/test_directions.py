"""Several translators behind one server: each request is answered by the one of its direction."""

from collections.abc import Iterator

import httpx
import pytest

from allyouneed.interop.load import load
from served import served_client, write_folder

PAIRS = {"en-pt": ("en", "pt"), "pt-en": ("pt", "en")}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    root = tmp_path_factory.mktemp("pairs")
    for seed, (name, pair) in enumerate(PAIRS.items()):
        folder = load(write_folder(root / "plain" / name, "translator", seed=seed))
        folder.directions = [pair]
        folder.save(root / name)
    with served_client({name: root / name for name in PAIRS}) as (_, found):
        yield found


def translated(client: httpx.Client, model: str) -> str:
    body = {"model": model, "inputs": ["Paris"]}
    found: str = client.post("/v1/tasks/translation", json=body).json()["results"][0]["text"]
    return found


def test_each_direction_has_its_model(client: httpx.Client) -> None:
    texts = {name: translated(client, name) for name in PAIRS}
    assert texts["en-pt"] != texts["pt-en"]
    for name, (source, target) in PAIRS.items():
        body = {"q": "Paris", "source": source, "target": target}
        assert client.post("/translate", json=body).json() == {"translatedText": texts[name]}
        deepl = {"text": ["Paris"], "target_lang": target.upper()}
        found = client.post("/v2/translate", json=deepl).json()["translations"][0]
        assert (found["text"], found["detected_source_language"]) == (texts[name], source.upper())
        task = {"inputs": ["Paris"], "source_lang": source, "target_lang": target}
        assert client.post("/v1/tasks/translation", json=task).json()["model"] == name


def test_a_direction_that_none_has_is_refused(client: httpx.Client) -> None:
    answer = client.post("/translate", json={"q": "Paris", "source": "en", "target": "de"})
    assert answer.status_code == 400
    assert "no model here translates en → de (they translate en → pt; pt → en)" in answer.text
    wrong = client.post("/v1/tasks/translation", json={"model": "en-pt", "inputs": ["a"], "target_lang": "en"})
    assert wrong.status_code == 400 and "unknown target language 'en'" in wrong.text


def test_the_languages_of_all_are_listed(client: httpx.Client) -> None:
    found = {one["code"]: one["targets"] for one in client.get("/languages").json()}
    assert found == {"en": ["pt"], "pt": ["en"]}
    codes = [one["language"] for one in client.get("/v2/languages?type=target").json()]
    assert codes == ["EN", "PT"]
    pairs = client.get("/v2/glossary-language-pairs").json()["supported_languages"]
    assert {(one["source_lang"], one["target_lang"]) for one in pairs} == set(PAIRS.values())
