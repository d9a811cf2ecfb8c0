"""Translation services' APIs over the bundled translator, with their clients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import deepl
import httpx
import pytest
from libretranslatepy import LibreTranslateAPI

import allyouneed as ayn

KEY = "secret-key"
GERMAN = ["Guten Tag.", "Wo ist der nächste Bahnhof? Ich suche ihn seit einer Stunde.\n\nDanke!"]


@pytest.fixture
def served(translating: Any) -> Any:
    return translating


@pytest.fixture(scope="module")
def english() -> list[str]:
    found: list[str] = ayn.load().translate(GERMAN, "en", from_="de")
    return found


def test_libretranslatepy(served: Any, english: list[str]) -> None:
    client = LibreTranslateAPI(served[0].url + "/", KEY)
    assert client.translate(GERMAN[0], "de", "en") == english[0]
    assert client.detect(GERMAN[1])[0]["language"] == "de"
    german = next(one for one in client.languages() if one["code"] == "de")
    assert german == {"code": "de", "name": "German", "targets": ["en", "fr", "zh", "zh-Hant"]}
    assert "頭髮" in client.translate("Her hair is long.", "en", "zt")
    assert client.translate("她的頭髮很長。", "zt", "en") == client.translate("她的头发很长。", "zh", "en")
    with pytest.raises(Exception, match="401"):
        LibreTranslateAPI(served[0].url + "/", "wrong-key").translate("a", "de", "en")


def test_libretranslate_lists_detection_and_alternatives(served: Any, english: list[str]) -> None:
    ask = served[1].post
    body = {"q": GERMAN, "source": "AUTO", "target": "en-US", "api_key": KEY, "format": "text"}
    found = ask("/translate", json=body).json()
    assert found["translatedText"] == english
    assert [one["language"] for one in found["detectedLanguage"]] == ["de", "de"]
    assert all(50 < one["confidence"] <= 100 for one in found["detectedLanguage"])
    several = ask("/translate", json=body | {"q": GERMAN[0], "alternatives": 2, "source": "de"}).json()
    assert len(several["alternatives"]) == 2 and "detectedLanguage" not in several
    assert ask("/translate", data={"q": GERMAN[0], "source": "de", "target": "en"}).json() == {
        "translatedText": english[0]
    }


def test_deepl_context_is_ignored_by_a_model_that_was_not_trained_with_it(served: Any, english: list[str]) -> None:
    body = {"text": GERMAN[:1], "source_lang": "DE", "target_lang": "EN", "context": "Ein Gruß."}
    answer = served[1].post("/v2/translate", json=body)
    assert answer.json()["translations"][0]["text"] == english[0]
    assert answer.headers["x-ignored-fields"] == "context"


def test_many_clients_share_steps(served: Any, english: list[str]) -> None:
    running, client = served
    body = {"q": GERMAN[0], "source": "de", "target": "en"}
    client.post("/translate", json=body)
    loop, most = running.model("translator").loop, [0]
    report = loop._report

    def watch(exact: bool, scheduler: Any) -> None:
        most[0] = max(most[0], len(scheduler.active))
        report(exact, scheduler)

    loop._report = watch
    try:
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(lambda _: client.post("/translate", json=body).json(), range(48)))
    finally:
        loop._report = report
    assert answers == [{"translatedText": english[0]}] * 48
    assert most[0] > 6, "the calls wait for each other"


def test_the_deepl_client(served: Any, english: list[str]) -> None:
    client = deepl.Translator(KEY, server_url=served[0].url)
    found = client.translate_text(GERMAN, target_lang="EN-US")
    assert [one.text for one in found] == english  # type: ignore[union-attr]
    assert {one.detected_source_lang for one in found} == {"DE"}  # type: ignore[union-attr]
    assert {"DE", "ZH", "ZH-HANT"} <= {language.code for language in client.get_target_languages()}
    assert "頭髮" in str(client.translate_text("Her hair is long.", target_lang="ZH-HANT"))
    assert not client.get_usage().any_limit_reached
    assert ("DE", "EN") in {
        (one.source_lang.upper(), one.target_lang.upper()) for one in client.get_glossary_languages()
    }
    with pytest.raises(deepl.DeepLException, match="unknown target language"):
        client.translate_text("a", target_lang="KO")
    with pytest.raises(deepl.AuthorizationException):
        deepl.Translator("wrong-key", server_url=served[0].url).get_usage()


def test_deeplx_immersive_and_apertium_on_one_path(served: Any, english: list[str]) -> None:
    client = served[1]
    found = client.post("/translate", json={"text": GERMAN[0], "source_lang": "DE", "target_lang": "EN"}).json()
    assert (found["code"], found["data"], found["source_lang"], found["target_lang"]) == (200, english[0], "DE", "EN")
    immersive = {"text_list": GERMAN, "source_lang": "auto", "target_lang": "en"}
    assert client.post("/translate", json=immersive).json() == {
        "translations": [{"detected_source_lang": "de", "text": text} for text in english]
    }
    query = {"q": GERMAN[0], "langpair": "de|en", "markUnknown": "no", "key": KEY}
    with httpx.Client() as other:
        answer = other.get(f"{served[0].url}/translate", params=query).json()
    assert answer["responseStatus"] == 200 and answer["responseData"]["translatedText"] == english[0]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/translate", {"q": "a", "source": "de", "target": "xx"}, "target language"),
        ("/translate", {"q": "a", "source": "klingon", "target": "en"}, "source language"),
        ("/translate", {"source": "de", "target": "en"}, "q: missing"),
        ("/translate", {"q": [1], "source": "de", "target": "en"}, "expected text"),
        ("/translate", {"q": "\ud800", "source": "de", "target": "en"}, "surrogate"),
        ("/translate", {"q": "a", "source": "de", "target": "en", "alternatives": 10000}, "the limit is 63"),
        ("/translate", {"q": "a", "source": "de", "target": "en", "alternatives": True}, "alternatives"),
        ("/translate", {"q": "a", "source": "de", "target": "en", "format": "xml"}, "(allowed: text, html)"),
        ("/translate", {"q": "a", "source": "de", "target": "en", "glossary": [1]}, "expected an object of terms"),
        ("/translate", {"q": "a", "source": "de", "target": "en", "glossary": {"a": ""}}, "one line that is not blank"),
        ("/translate", {"q": "a", "source": "auto", "target": "en", "glossary_id": "x"}, "set source as well"),
        ("/translate", {"q": "a", "source": "de", "traget": "en"}, "did you mean 'target'?"),
        ("/translate", {"q": "a", "text": "b", "target_lang": "en"}, "not together"),
        ("/translate", {"q": ["a"] * 2049, "source": "de", "target": "en"}, "the limit is 2048"),
        ("/v2/translate", {"text": ["a"], "target_lang": "EN", "glossary_id": "x"}, "set source_lang as well"),
        (
            "/v2/translate",
            {"text": ["a"], "source_lang": "DE", "target_lang": "EN", "glossary_id": "../x"},
            "unknown gl",
        ),
        ("/v2/translate", {"text": ["a"], "target_lang": "EN", "tag_handling": "md"}, "(allowed: html, xml)"),
        ("/v2/translate", {"text": ["a"], "target_lang": "EN", "ignore_tags": "x"}, "set tag_handling"),
        ("/v2/translate", {"text": ["<x>a"], "target_lang": "EN", "tag_handling": "xml", "ignore_tags": "x"}, "closed"),
        ("/v2/translate", {"text": ["a"], "target_lang": "EN", "split_sentences": "2"}, "(allowed: 0, 1, nonewlines)"),
        ("/v2/translate", {"text": ["a"], "target_lang": "EN", "style_id": "x"}, "style_id: not supported"),
        ("/v2/translate", {"text": ["a"]}, "target_lang"),
    ],
)
def test_one_clear_message(served: Any, path: str, body: dict[str, Any], message: str) -> None:
    import json

    answer = served[1].post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    found = answer.json()
    assert message in (found["message"] if path.startswith("/v2") else found["error"]), answer.text


def test_without_a_translator(client: httpx.Client) -> None:
    with_one = client.get("/languages")
    assert with_one.status_code == 200  # the tiny translator has no names of languages
    assert client.get("/health").json() == {"status": "ok"}
