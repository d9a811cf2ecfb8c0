"""Every common layout of questions gives the same examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allyouneed.config import parse
from allyouneed.data.files.questions import AskedText, QuestionFiles
from allyouneed.data.files.readers import Report
from allyouneed.errors import UserError

TEXT = "Anna lives in Ulm. Otto lives in Ulm, too."
ROWS: list[tuple[str, list[tuple[str, int]]]] = [("Where does Otto live?", [("Ulm", 33)]), ("Who is Li?", [])]


def read(path: Path, report: Report | None = None, **keys: Any) -> list[AskedText]:
    return list(parse(QuestionFiles, {"path": str(path)} | keys, "x").read(report or Report()))


def squad() -> dict[str, Any]:
    asked = [
        {"id": "1", "question": question, "answers": [{"text": text, "answer_start": at} for text, at in answers]}
        | ({} if answers else {"is_impossible": True, "plausible_answers": [{"text": "Otto", "answer_start": 19}]})
        for question, answers in ROWS
    ]
    return {"version": "v2.0", "data": [{"title": "x", "paragraphs": [{"context": TEXT, "qas": asked}]}]}


def rows(form: str) -> list[dict[str, Any]]:
    found = []
    for question, answers in ROWS:
        texts, places = [text for text, _ in answers], [at for _, at in answers]
        given: Any = {"text": texts, "answer_start": places}
        if form == "list":
            given = [{"text": text, "start": at} for text, at in answers]
        found.append({"question": question, "context": TEXT, "answers": given})
    return found


def test_every_layout_gives_the_same_questions(tmp_path: Path) -> None:
    (tmp_path / "squad.json").write_text(json.dumps(squad(), indent=2), encoding="utf-8")
    (tmp_path / "hub.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows("hub")), encoding="utf-8")
    (tmp_path / "list.json").write_text(json.dumps(rows("list")), encoding="utf-8")
    for name in ("squad.json", "hub.jsonl", "list.json"):
        found = read(tmp_path / name)
        assert [(one.question, one.context, one.answers, one.begins) for one in found] == [
            (question, TEXT, tuple(text for text, _ in answers), tuple(at for _, at in answers))
            for question, answers in ROWS
        ], name
    (tmp_path / "table.tsv").write_text(f"Where?\t{TEXT}\tUlm\nWho?\t{TEXT}\t\n", encoding="utf-8")
    assert [one.begins for one in read(tmp_path / "table.tsv")] == [(14,), ()]  # a table has no places: the first
    (tmp_path / "named.csv").write_text(f'q,text,a\nWhere?,"{TEXT}",Otto\n', encoding="utf-8")
    assert read(tmp_path / "named.csv", columns=["q", "text", "a"])[0].begins == (19,)


def test_bad_rows_are_reported(tmp_path: Path) -> None:
    report = Report()
    bad: list[Any] = [
        {"answers": "Paris"},
        {"answers": 3},
        {"answers": [{"start": 3}]},
        {"context": 1},
        {"answers": "Ulm"},
    ]
    lines = [json.dumps({"question": "Where?", "context": TEXT} | row) for row in bad]
    (tmp_path / "x.jsonl").write_text("\n".join([*lines, "{"]), encoding="utf-8")
    assert [one.answers for one in read(tmp_path / "x.jsonl", report)] == [("Ulm",)]
    text = report.text()
    assert report.broken == 5 and "'Paris' is not a part of the text" in text and "must be a text" in text
    assert "'question' and 'context' must be texts" in text and "not JSON" in text


def test_a_wrong_place_is_corrected_and_a_file_that_is_not_squads_is_refused(tmp_path: Path) -> None:
    tree = squad()
    tree["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] = 2
    (tmp_path / "x.json").write_text(json.dumps(tree), encoding="utf-8")
    assert read(tmp_path / "x.json")[0].begins == (14,)
    del tree["data"][0]["paragraphs"][0]["qas"][1]["question"]
    (tmp_path / "x.json").write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(UserError, match="not SQuAD's format at question 2: no key 'question'"):
        read(tmp_path / "x.json")
