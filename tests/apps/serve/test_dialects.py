"""Markup, glossaries and extra fields in the dialects of translation services."""

from __future__ import annotations

import io
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import deepl
import httpx
import pytest

import allyouneed as ayn
from waiting import until

KEY = "secret-key"
PAGE = '<p title="The car">The <a href="/c?x=1&amp;y">red car</a> is fast.</p><!-- x --><pre>The car</pre>&copy; 2024'
CONTENT = '<a xmlns:text="urn:oasis:names:tc:opendocument:xmlns:text:1.0"><text:p>{}</text:p></a>'
PLACEHOLDERS = 'The car <x id="7"></x> of AT&amp;T is fast.\nThe house is big.'


@pytest.fixture(scope="module")
def model() -> ayn.Translator:
    return ayn.load()  # type: ignore[return-value]


@pytest.fixture(scope="module")
def page(model: ayn.Translator) -> str:
    return model.translate_document(PAGE, "de", from_="en", format="html").text


def ask(translating: Any, path: str, **body: Any) -> Any:
    answer = translating[1].post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_html_of_libretranslate(translating: Any, page: str) -> None:
    assert '<a href="/c?x=1&amp;y">rote Auto</a>' in page and "<pre>The car</pre>" in page and "&copy;" in page
    body = {"q": [PAGE, "<b>The car is red.</b>"], "source": "auto", "target": "de", "format": "html"}
    found = ask(translating, "/translate", **body)
    assert found["translatedText"][0] == page
    assert [one["language"] for one in found["detectedLanguage"]] == ["en", "en"]
    several = ask(translating, "/translate", q=PAGE, source="en", target="de", format="html", alternatives=1)
    assert several["translatedText"].count("</a>") == several["alternatives"][0].count("</a>") == 1


def test_the_deepl_client_with_tags(translating: Any, page: str) -> None:
    client = deepl.Translator(KEY, server_url=translating[0].url)

    def translate(text: str, **options: Any) -> str:
        return client.translate_text(text, source_lang="EN", target_lang="DE", **options).text  # type: ignore[union-attr]

    assert translate(PAGE, tag_handling="html") == page
    found = translate(PLACEHOLDERS, tag_handling="xml", ignore_tags=["x"])
    first, second = found.split("\n")
    assert first.count('<x id="7"></x>') == 1 and "AT&amp;T" in first and second.startswith("Das Haus")
    assert "\n" not in translate(PLACEHOLDERS, tag_handling="xml", ignore_tags="x,y", split_sentences="nonewlines")
    assert translate("<d><k>The car</k>The car is red.</d>", tag_handling="xml", ignore_tags="k").count("The car") == 1
    assert translate("<d><k>The car</k>The car</d>", tag_handling="html", splitting_tags="k") == (
        translate("<p>The car</p>", tag_handling="html").replace("<p>", "<d><k>").replace("</p>", "</k>")
        + translate("<p>The car</p></d>", tag_handling="html").removeprefix("<p>").replace("</p>", "")
    )
    assert translate("The car\nis fast.", split_sentences="nonewlines") == "Das Auto ist schnell."
    assert translate("The car is fast. It is red.", split_sentences="0").count(".") >= 1
    assert translate("the car is red", preserve_formatting=True)[-1].isalnum()


def test_tags_in_the_other_dialects(translating: Any, page: str) -> None:
    languages = {"source_lang": "EN", "target_lang": "DE"}
    assert ask(translating, "/translate", text=PAGE, tag_handling="html", **languages)["data"] == page
    immersive = ask(translating, "/translate", text_list=[PAGE], tag_handling="html", **languages)
    assert immersive["translations"] == [{"detected_source_lang": "en", "text": page}]
    query = {"q": PAGE, "langpair": "en|de", "format": "html", "key": KEY}
    answer = httpx.get(f"{translating[0].url}/translate", params=query)
    assert answer.json()["responseData"]["translatedText"] == page
    task = ask(translating, "/v1/tasks/translation", inputs=[PAGE], source_lang="en", target_lang="de", format="html")
    assert task["results"][0]["text"] == page and task["results"][0]["source_lang"] == "en"
    assert ask(translating, "/v1/tasks/translation", inputs=["Hi"], target_lang="de", top=2)["results"][0][
        "alternatives"
    ]


def test_documents_and_other_requests_share_steps(translating: Any, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    running, client = translating
    ask(translating, "/translate", q="The car", source="en", target="de")
    loop = running.model("translator").loop
    report, most, threads = loop._report, [0], set[str]()
    attention = running.model("translator").predictor.model.attention

    def watch(exact: bool, scheduler: Any) -> None:
        most[0] = max(most[0], len(scheduler.active))
        report(exact, scheduler)

    def attend(*args: Any, **options: Any) -> Any:
        threads.add(threading.current_thread().name)
        return attention(*args, **options)

    monkeypatch.setattr(loop, "_report", watch)
    monkeypatch.setattr(running.model("translator").predictor.model, "attention", attend)
    body = {"q": PAGE, "source": "en", "target": "de", "format": "html"}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.post("/translate", json=body).json(), range(16)))
    assert answers == [{"translatedText": page}] * 16
    assert most[0] > 4 and threads == {loop.thread.name}
    until(lambda: loop.sequences == 0)


def test_a_long_document_is_longer_than_the_queue_of_a_call(translating: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from allyouneed.apps.serve.engine import loop

    monkeypatch.setattr(loop, "CALL_SEQUENCES", 3)
    text = "<p>The <b>car</b> is red.</p>" * 8
    found = ask(translating, "/translate", q=text, source="en", target="de", format="html")["translatedText"]
    assert found == found[: len(found) // 8] * 8 and found.count("</b>") == 8


def test_terms_in_a_request(translating: Any) -> None:
    terms = {"car": "Kraftwagen", "Apple": "Apple"}
    plain = {"source": "en", "target": "de", "glossary": terms}
    assert "Kraftwagen" in ask(translating, "/translate", q="The car is fast.", **plain)["translatedText"]
    lines = ask(translating, "/translate", q="<b>Car</b>", format="html", **plain | {"glossary": "car\tKraftwagen\n"})
    assert lines["translatedText"] == "<b>Kraftwagen</b>"
    languages = {"source_lang": "en", "target_lang": "de", "glossary": terms}
    assert (
        "Kraftwagen" in ask(translating, "/v1/tasks/translation", inputs=["My car"], **languages)["results"][0]["text"]
    )
    for found in (
        ask(translating, "/translate", text="My car", **languages)["data"],
        ask(translating, "/v2/translate", text=["My car"], **languages)["translations"][0]["text"],
        ask(translating, "/translate", text_list=["My car"], **languages)["translations"][0]["text"],
    ):
        assert "Kraftwagen" in found


def test_fields_that_are_ignored_are_named(translating: Any, client: httpx.Client) -> None:
    def ignored(client: httpx.Client, path: str, **body: Any) -> str | None:
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        found: str | None = answer.headers.get("x-ignored-fields")
        return found

    mine = translating[1]
    deepl_body = {"text": ["Hallo"], "target_lang": "EN"}
    assert ignored(mine, "/v2/translate", **deepl_body) is None
    assert ignored(mine, "/v2/translate", **deepl_body, formality="less", context="x", new=1, nothing=None) == (
        "formality, new, context"
    )
    assert ignored(mine, "/translate", q="Hallo", source="de", target="en", secret="x", **{"a\r\nb": 1}) == (
        "secret, 1 more"
    )
    lm = {"model": "lm", "prompt": "a", "max_tokens": 1}
    assert ignored(client, "/v1/completions", **lm, user="me", top_a=1) == "user, top_a"
    assert ignored(client, "/api/generate", model="lm", prompt="a", stream=False, options={"num_ctx": 9}) == "num_ctx"
    assert ignored(client, "/v1/completions", **lm, models=["a"], stream=True) == "models"
    refused = client.post("/v1/completions", json=lm | {"guided_json": {}})
    assert refused.status_code == 400 and "guided_json: not supported" in refused.text
    many = client.post("/v1/completions", json=lm | {f"field-{n}": n for n in range(101)})
    assert many.status_code == 400 and "the limit is 100" in many.text


def test_a_file_is_translated_and_comes_back_as_a_file(translating: Any, page: str) -> None:
    def send(content: bytes, name: str, **fields: str) -> httpx.Response:
        found: httpx.Response = translating[1].post(
            "/v1/documents/translations", files={"file": (name, content)}, data={"target_lang": "de"} | fields
        )
        return found

    assert send(PAGE.encode(), "a.html", source_lang="en").text == page
    assert send(b'{"a": "The car is red."}', "a.txt", format="json").json() == {"a": "Das Auto ist rot."}
    plain = send("The car is red.\r\n".encode("utf-16"), "a.txt", colour="unknown")
    assert plain.content.decode("utf-16") == "Das Auto ist rot.\r\n" and plain.headers["x-ignored-fields"] == "colour"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("content.xml", CONTENT.format("The car is red."))
    answer = send(file.getvalue(), "a.odt")
    with zipfile.ZipFile(io.BytesIO(answer.content)) as packed:
        assert packed.read("content.xml").decode() == CONTENT.format("Das Auto ist rot.")
    for name, content, fields, message in (
        ("a.doc", b"x", {}, "format: 'a.doc' is none (allowed: html, md"),
        ("a.docx", b"x", {}, "not .docx: File is not a zip file"),
        ("a.csv", b"a,b\n", {}, "name the column that is translated"),
        ("a.txt", b"word " * 300_000, {}, "1500000 characters"),
    ):
        refused = send(content, name, **fields)
        assert refused.status_code in (400, 413) and message in refused.text.replace("\\", ""), refused.text
    assert translating[1].post("/v1/documents/translations", json={}).status_code == 400
