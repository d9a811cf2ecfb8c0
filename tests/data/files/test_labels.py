"""Readers of labelled, scored and tagged examples; broken lines are reported."""

from pathlib import Path
from typing import Any

import pytest

from allyouneed.config import ConfigError, parse
from allyouneed.data.batches.encoding import add_spaces
from allyouneed.data.files.filters import Filters
from allyouneed.data.files.labels import Labelled, LabelledFiles, Scored, ScoredFiles, Tagged, TaggedFiles
from allyouneed.data.files.readers import Files, Report


def read(kind: type[Files], path: Path, **keys: Any) -> tuple[list[Any], str]:
    report = Report()
    return list(parse(kind, {"path": str(path), **keys}).read(report)), report.text()


def test_labels_may_be_in_any_column(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("good film\tpos\nbad film\tneg\nno label\n\t\nempty\t \n", encoding="utf-8")
    found, said = read(LabelledFiles, path)
    assert found[:2] == [Labelled(("good film",), "pos", str(path), 1), Labelled(("bad film",), "neg", str(path), 2)]
    assert "a.tsv:3: 1 column(s), expected 2 separated by a tab" in said
    assert "a.tsv:5: the label is empty" in said
    path.write_text("ENTY\tENTY:animal\tWhat bird sings ?\n")
    assert read(LabelledFiles, path, columns=[2, 0])[0][0][:2] == (("What bird sings ?",), "ENTY")
    assert read(LabelledFiles, path, columns=[2, 1, 0])[0][0][:2] == (("What bird sings ?", "ENTY:animal"), "ENTY")
    assert "choose two with 'columns'" in read(LabelledFiles, path)[1]
    with pytest.raises(ConfigError, match="columns"):
        read(LabelledFiles, path, columns=[0])


def test_json_labels_may_be_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x", "label": 1}\n{"text": 2, "label": 1}\n{"text": "x", "label": true}\n')
    found, said = read(LabelledFiles, path)
    assert [example.label for example in found] == ["1"]
    assert "a.jsonl:2: 'text' is not a string" in said and "a.jsonl:3: 'label' is not a string but bool" in said
    path.write_text('{"a": "x", "b": "y", "entails": "yes"}\n')
    assert read(LabelledFiles, path, keys=["a", "b", "entails"])[0][0].texts == ("x", "y")


def test_scores_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("4.5\tone\tother\nhigh\tone\tother\nnan\ta\tb\n")
    found, said = read(ScoredFiles, path, columns=[1, 2, 0])
    assert found == [Scored("one", "other", 4.5, str(path), 1)]
    assert "a.tsv:2: the score 'high' is not a number" in said and "a.tsv:3: the score 'nan' is not a number" in said
    (tmp_path / "a.jsonl").write_text('{"first": "a", "second": "b", "score": 3}\n')
    assert read(ScoredFiles, tmp_path / "a.jsonl")[0][0].score == 3.0


def test_conll_sentences_end_at_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("-DOCSTART- O\n\nAnna B-PER\nsings\tO\n\n\nbroken\n\nUlm B-LOC", encoding="utf-8")
    found, said = read(TaggedFiles, path)
    assert found == [
        Tagged(("Anna", "sings"), ("B-PER", "O"), str(path), 3),
        Tagged(("Ulm",), ("B-LOC",), str(path), 9),
    ]
    assert "a.conll:7: 1 column(s), expected 2 separated by a space or a tab" in said
    path.write_text("Anna NNP I-NP B-PER\nsings VBZ\n\nUlm NNP I-NP B-LOC\n")
    found, said = read(TaggedFiles, path, columns=[0, 3])
    assert [example.tags for example in found] == [("B-LOC",)] and "no column 3 (counted from 0)" in said


def test_tags_and_words_of_unequal_number_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"tokens": ["大", "众"], "tags": ["B-X", "I-X"]}\n'
        '{"tokens": ["a"], "tags": []}\n{"tokens": "ab", "tags": ["O"]}\n'
        '{"tokens": [], "tags": []}\n{"tokens": [" "], "tags": ["O"]}\n{"words": ["a"], "tags": ["O"]}\n',
        encoding="utf-8",
    )
    found, said = read(TaggedFiles, path)
    assert [example.words for example in found] == [("大", "众")]
    for line, reason in {
        2: "1 in 'tokens', but 0 in 'tags'",
        3: "'tokens' is not a list of strings",
        4: "'tokens' is empty",
        5: "a word in 'tokens' is empty",
        6: "no key 'tokens' (keys: 'words', 'tags')",
    }.items():
        assert f"a.jsonl:{line}: {reason}" in said


def test_filters_recognise_duplicates_of_each_kind_of_example() -> None:
    one = [Labelled(("a",), "x", "f", 1), Labelled(("a",), "y", "f", 2), Labelled(("a",), "x", "f", 3)]
    report = Report(read=3)
    assert [example.line for example in Filters(duplicates=True).apply(one, report)] == [1, 2]
    report = Report(read=1)
    assert (
        not list(Filters().apply([Labelled((" ",), "x", "f", 4)], report)) and "f:4: the text is empty" in report.text()
    )


def test_words_are_spaced_as_in_a_text() -> None:
    assert add_spaces(["Anna", "in", "上", "海", "and", "12"]) == ["Anna", " in", " 上", "海", " and", " 12"]
