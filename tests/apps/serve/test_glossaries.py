"""Stored glossaries: with DeepL's client, across restarts, within limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepl
import httpx
import pytest
from deepl.api_data import MultilingualGlossaryDictionaryEntries as Entries

from allyouneed.apps.serve.dialects.translation.glossaries import Dictionary, GlossaryStore
from allyouneed.apps.serve.errors import ApiError
from allyouneed.apps.serve.settings import Limits
from allyouneed.errors import UserError

KEY = "secret-key"
TERMS = {"car": "Kraftwagen", "house": "Gebäude"}


def dictionary(terms: dict[str, str], source: str = "en", target: str = "de") -> Dictionary:
    return Dictionary(source_lang=source, target_lang=target, entries=terms)


def test_glossaries_of_version_2(translating: Any) -> None:
    client = deepl.Translator(KEY, server_url=translating[0].url)
    made = client.create_glossary("../../etc/passwd", "EN-US", "DE", TERMS)
    assert (made.name, made.source_lang, made.target_lang, made.entry_count) == ("../../etc/passwd", "EN", "DE", 2)
    assert made.ready and client.get_glossary(made.glossary_id).creation_time == made.creation_time
    assert made.glossary_id in {one.glossary_id for one in client.list_glossaries()}
    assert client.get_glossary_entries(made) == TERMS
    found = client.translate_text_with_glossary("The car is fast.", made)
    assert "Kraftwagen" in found.text  # type: ignore[union-attr]
    page = client.translate_text("<b>Car</b>", source_lang="EN", target_lang="DE", glossary=made, tag_handling="html")
    assert page.text == "<b>Kraftwagen</b>"  # type: ignore[union-attr]
    with pytest.raises(deepl.DeepLException, match=r"no dictionary for FR → DE \(it has: en → de\)"):
        client.translate_text("a", source_lang="FR", target_lang="DE", glossary=made.glossary_id)
    libre = {"q": "My car", "source": "en", "target": "de", "glossary_id": made.glossary_id}
    assert "Kraftwagen" in translating[1].post("/translate", json=libre).json()["translatedText"]
    rows = client.create_glossary_from_csv("csv", "EN", "DE", '"car, old",Oldtimer,en,de\nhouse,Haus\n')
    assert client.get_glossary_entries(rows) == {"car, old": "Oldtimer", "house": "Haus"}
    for one in (made, rows):
        client.delete_glossary(one)
    with pytest.raises(deepl.GlossaryNotFoundException):
        client.get_glossary(made.glossary_id)
    with pytest.raises(deepl.GlossaryNotFoundException):
        client.delete_glossary("..%2f..%2fetc")


def test_glossaries_of_version_3(translating: Any) -> None:
    client = deepl.DeepLClient(KEY, server_url=translating[0].url)
    made = client.create_multilingual_glossary(
        "all", [Entries("EN", "DE", TERMS), Entries("DE", "EN", {"Rad": "bike"})]
    )
    assert [(one.source_lang, one.target_lang, one.entry_count) for one in made.dictionaries] == [
        ("EN", "DE", 2),
        ("DE", "EN", 1),
    ]
    assert made.glossary_id in {one.glossary_id for one in client.list_multilingual_glossaries()}
    assert made.glossary_id not in {one.glossary_id for one in client.list_glossaries()}, "it has two pairs"
    assert client.update_multilingual_glossary_name(made, "renamed").name == "renamed"
    client.update_multilingual_glossary_dictionary(made, Entries("EN", "DE", {"dog": "Köter", "car": "Wagen"}))
    (found,) = client.get_multilingual_glossary_entries(made, "EN", "DE").dictionaries
    assert str(found.entries).split("\n") == ["car\tWagen", "house\tGebäude", "dog\tKöter"]
    assert client.replace_multilingual_glossary_dictionary(made, Entries("EN", "DE", {"dog": "Köter"})).entry_count == 1
    german = client.translate_text("Mein Rad", source_lang="DE", target_lang="EN-US", glossary=made.glossary_id)
    assert "bike" in german.text  # type: ignore[union-attr]
    two = client.create_multilingual_glossary("more", [Entries("EN", "DE", {"car": "Karre"})])
    both = [made.glossary_id, two.glossary_id]
    text = client.translate_text("My dog, my car.", source_lang="EN", target_lang="DE", glossary_ids=both).text  # type: ignore
    assert "Köter" in text and "Karre" in text
    client.delete_multilingual_glossary_dictionary(made, source_lang="EN", target_lang="DE")
    assert [one.source_lang for one in client.get_multilingual_glossary(made.glossary_id).dictionaries] == ["DE"]
    client.delete_multilingual_glossary(made)
    client.delete_multilingual_glossary(two)
    with pytest.raises(deepl.GlossaryNotFoundException):
        client.get_multilingual_glossary(made.glossary_id)


BODY = {"name": "x", "source_lang": "EN", "target_lang": "DE", "entries": "a\tb", "entries_format": "tsv"}


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("/v2/glossaries", {"name": ""}, "name: expected"),
        ("/v2/glossaries", {"name": "a\nb"}, "name: expected"),
        ("/v2/glossaries", {"entries": ""}, "entries: missing"),
        ("/v2/glossaries", {"entries": "a\tb\tc\n"}, "entries: line 1: expected a term"),
        ("/v2/glossaries", {"entries": "a\tb\na\tc"}, "has two translations"),
        ("/v2/glossaries", {"entries": 'a,"b', "entries_format": "csv"}, "not CSV"),
        ("/v2/glossaries", {"entries_format": "xml"}, "(allowed: tsv, csv)"),
        ("/v2/glossaries", {"target_lang": "KO"}, "unknown language of a glossary 'ko'"),
        ("/v2/glossaries", {"target_lang": "EN-GB"}, "the same language"),
        ("/v2/glossaries", {"target_lang": " "}, "' ' is not a language"),
        ("/v2/glossaries", {"entries": "\n".join(f"a{n}\tb" for n in range(10_001))}, "the limit is 10000"),
        ("/v2/glossaries", {"entries": "a\t" + "b" * 1025}, "the limit is 1024"),
        ("/v2/glossaries", {"entris": "a\tb", "entries": None}, "did you mean 'entries'?"),
        ("/v3/glossaries", {}, "dictionaries: missing"),
        ("/v3/glossaries", {"dictionaries": [1]}, "expected a list of objects"),
        ("/v3/glossaries", {"dictionaries": [{"source_lang": "en"}] * 101}, "the limit is 100"),
    ],
)
def test_one_clear_message(translating: Any, path: str, change: dict[str, Any], message: str) -> None:
    body = {"name": "x"} if path.startswith("/v3") else BODY
    answer = translating[1].post(path, json=body | change)
    assert answer.status_code == 400 and message in answer.json()["message"], answer.text


def test_glossaries_need_a_key(translating: Any) -> None:
    for method, path in (("GET", "/v3/glossaries"), ("POST", "/v2/glossaries"), ("DELETE", "/v3/glossaries/x")):
        answer = httpx.request(method, translating[0].url + path)
        assert answer.status_code == 403 and "no API key" in answer.json()["message"]


def test_a_folder_keeps_glossaries_and_servers_share_it(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    one, other = GlossaryStore(folder, Limits()), GlossaryStore(folder, Limits())
    made = one.create("../x", [dictionary(TERMS)])
    assert [path.name for path in folder.iterdir()] == [f"{made.glossary_id}.json"]
    assert other.get(made.glossary_id) == made
    other.update(made.glossary_id, "y", [dictionary({"Rad": "bike"}, "de", "en")])
    assert one.get(made.glossary_id).name == "y" and len(one.every()[0].dictionaries) == 2
    assert GlossaryStore(folder, Limits()).get(made.glossary_id).dictionary("EN-US", "DE").entries == TERMS
    one.remove(made.glossary_id)
    assert other.every() == [] and list(folder.iterdir()) == []
    for name in ("../x", str(folder / made.glossary_id), made.glossary_id + ".json", "\0"):
        with pytest.raises(ApiError, match="unknown glossary"):
            one.get(name)


def test_stored_glossaries_have_limits(tmp_path: Path) -> None:
    store = GlossaryStore(tmp_path, Limits(glossaries=1, glossary_entries=3, glossary_bytes=40))
    made = store.create("x", [dictionary(TERMS)])
    for act, message in [
        (lambda: store.create("y", [dictionary(TERMS)]), "2 glossaries, the limit is 1"),
        (
            lambda: store.update(made.glossary_id, None, [dictionary({"a": "b", "c": "d"})]),
            "4 entries .* the limit is 3",
        ),
        (lambda: store.update(made.glossary_id, None, [dictionary({"a": "b" * 40})]), "bytes .* the limit is 40"),
    ]:
        with pytest.raises(ApiError, match=message):
            act()
    assert GlossaryStore(tmp_path, Limits()).get(made.glossary_id) == made, "what was refused changed nothing"


@pytest.mark.parametrize("content", ["{", "[]", '{"glossary_id": "x"}', None])
def test_a_broken_file_is_named_at_the_start_and_skipped_later(tmp_path: Path, content: str | None) -> None:
    store = GlossaryStore(tmp_path, Limits())
    made = store.create("x", [dictionary(TERMS)])
    path = tmp_path / f"{made.glossary_id}.json"
    bad = {
        **json.loads(path.read_text()),
        "dictionaries": [{"source_lang": "en", "target_lang": "de", "entries": {"": "x"}}],
    }
    path.write_text(json.dumps(bad) if content is None else content)
    with pytest.raises(UserError, match=f"{made.glossary_id}.json: not a glossary: .*; fix the file or move it away"):
        GlossaryStore(tmp_path, Limits())
    assert store.every() == []
