"""Tables as people have them: CSV, headers, quotes, JSON arrays, the label first."""

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allyouneed.config import ConfigError, parse
from allyouneed.data.batches.store import InputHashes, _read_as
from allyouneed.data.files.labels import LabelledFiles, ScoredFiles, TaggedFiles, classes
from allyouneed.data.files.lines import CHUNK
from allyouneed.data.files.objects import array_elements
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.files.readers import Files, Report
from allyouneed.data.files.texts import TextFiles
from allyouneed.errors import UserError

ROWS = [('Who, "really", sings?\nAnd why?', "HUM"), ("何？", "ENTY"), ("a;b\tc", "ENTY")]


def read(kind: type[Files], path: Path, **keys: Any) -> tuple[list[Any], Report]:
    report = Report()
    return list(parse(kind, {"path": str(path), **keys}).read(report)), report


def labelled(path: Path, **keys: Any) -> list[tuple[str, str]]:
    return [(example.texts[0], example.label) for example in read(LabelledFiles, path, **keys)[0]]


def as_csv(header: list[str], rows: list[tuple[str, ...]], separator: str = ",") -> str:
    text = io.StringIO()
    csv.writer(text, delimiter=separator).writerows([header, *rows])
    return text.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "keys"),
    [
        ("a.csv", as_csv(["text", "label"], ROWS), {}),
        ("a.csv", "\ufeff" + as_csv(["text", "label"], ROWS, ";"), {}),
        ("a.csv", as_csv(["Label", "id", "Text"], [(label, "7", text) for text, label in ROWS]), {}),
        ("a.csv", as_csv(["coarse", "question"], [r[::-1] for r in ROWS]), {"columns": ["question", "coarse"]}),
        ("a.csv", as_csv(["coarse", "question"], [r[::-1] for r in ROWS]), {"columns": [1, "coarse"], "header": True}),
        ("a.csv", as_csv(["a", "b"], ROWS).split("\n", 1)[1], {"header": False}),
        ("a.tsv", as_csv(["label", "text"], [r[::-1] for r in ROWS], "\t"), {"quotes": True}),
        ("a.json", json.dumps([{"text": t, "label": c} for t, c in ROWS]), {}),
        ("a.json", json.dumps([{"label": c, "q": t} for t, c in ROWS], indent=2), {"keys": ["q", "label"]}),
        ("a.json", "".join(json.dumps({"q": t, "c": c}) + "\n" for t, c in ROWS), {"columns": ["q", "c"]}),
        ("a.jsonl", "\n [" + ",\n".join(json.dumps({"text": t, "label": c}) for t, c in ROWS) + "\n]\n", {}),
    ],
    ids=range(11),
)
@pytest.mark.parametrize("packed", [False, True])
def test_every_layout_gives_the_same_rows(
    tmp_path: Path, name: str, content: str, keys: dict[str, Any], packed: bool
) -> None:
    data, path = content.encode(), tmp_path / (name + (".gz" if packed else ""))
    path.write_bytes(gzip.compress(data) if packed else data)
    assert labelled(path, **keys) == ROWS


def test_a_plain_tsv_keeps_its_quotes(tmp_path: Path) -> None:
    """Sentences contain quotes; only `quotes: true` gives them a meaning."""
    path = tmp_path / "a.tsv"
    path.write_text('"Hi," he said.\t"Salut"\n"a" b\tc "d\n"\t""\n')
    pairs = [(pair.source, pair.target) for pair in read(PairFiles, path)[0]]
    assert pairs == [('"Hi," he said.', '"Salut"'), ('"a" b', 'c "d'), ('"', '""')]
    path.write_text('"one\ttwo"\tthree\n')
    assert "3 column(s), expected 2; choose two with 'columns'; quoted cells? set quotes: true" in (
        read(PairFiles, path)[1].text()
    )
    assert [pair.source for pair in read(PairFiles, path, quotes=True)[0]] == ["one\ttwo"]


def test_a_header_is_found_by_its_names_or_by_request(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("target\tid\tsource\nt\t1\ts\n")
    (pair,), report = read(PairFiles, path)
    assert (pair.source, pair.target, pair.line, report.read) == ("s", "t", 2, 1)
    path.write_text("en\tde\nHello\tHallo\n")
    assert [pair.source for pair in read(PairFiles, path)[0]] == ["en", "Hello"], "it could be a pair"
    assert [pair.source for pair in read(PairFiles, path, columns=["de", "en"])[0]] == ["Hallo"]
    assert [pair.source for pair in read(PairFiles, path, header=True)[0]] == ["Hello"]
    path = tmp_path / "a.csv"
    path.write_text("id,en,de\n1,Hello,Hallo\n")
    (pair,), report = read(PairFiles, path, columns=[1, 2])
    assert pair.source == "Hello" and "a.csv:1: column names; set header: false if it is an example" in report.text()
    assert len(read(PairFiles, path, columns=[1, 2], header=False)[0]) == 2
    path.write_text("tabs\tas before\n")
    assert [pair.target for pair in read(PairFiles, path)[0]] == ["as before"]


@pytest.mark.parametrize(
    ("name", "content", "keys", "said"),
    [
        ("a.csv", "sentence,sign\na,b\n", {}, r"no column 'text' \(columns: sentence, sign\); name yours, e\.g\. "
            r"columns: \[sentence, sign\]; if the first line is an example, set header: false"),
        ("a.tsv", "a\tb\nc\td\n", {"columns": ["text", "b"]}, r"no column 'text' \(columns: a, b\)"),
        ("a.tsv", "text\ttext\tlabel\n", {"columns": ["text", "label"]}, "two columns are named 'text'"),
        ("a.tsv", "a\tb\n", {"columns": ["a", "b"], "header": False}, "'a' is a name, but header: false"),
        ("a.json", '{\n "data": []\n}', {}, r"a\.json: expected an array of objects, \[\{…\}, …\], or one object"),
        ("a.json", '[{"text": "a", "label": "b"},\n{"text": ', {}, r"a\.json:2: not JSON"),
        ("a.json", '[{"text": "a", "label": "b"}\n', {}, "the array does not end; is it truncated"),
        ("a.json", "[" * 100_000, {}, "not JSON"),
    ],
    ids=range(8),
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused(
    tmp_path: Path, name: str, content: str, keys: dict[str, Any], said: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=said):
        read(LabelledFiles, tmp_path / name, **keys)


def test_a_cell_may_be_as_long_as_a_document_and_other_readers_keep_their_limit(tmp_path: Path) -> None:
    before, text = csv.field_size_limit(), "word " * 100_000
    path = tmp_path / "long.csv"
    path.write_text(f'text,label\n"{text}",1\n')
    (found,), report = read(LabelledFiles, path)
    assert found.label == "1" and report.broken == 0 and csv.field_size_limit() == before


def test_broken_rows_are_reported_and_the_others_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,label\nok,1\n"a" b,2\nfew\n\n\xff,3\nok,4\n"never closed,5\n')
    found, report = read(LabelledFiles, path)
    assert [example.label for example in found] == ["1", "4"] and (report.read, report.broken) == (6, 4)
    for said in (
        "a.csv:3: ',' expected after '\"'",
        "a.csv:4: 1 column(s)",
        "a.csv:6: not UTF-8",
        "a.csv:8: unexpected",
    ):
        assert said in report.text()
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a", "label": "b"}, 3, {"body": "x", "stars": 3}, {"text": "c", "label": "d"}]')
    found, report = read(LabelledFiles, path)
    assert len(found) == 2 and "no key 'text' (keys: 'body', 'stars'); name yours with 'keys'" in report.text()
    assert "a JSON int, expected an object" in report.text()


@given(st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=9) | st.integers(), max_size=3), max_size=20))
@settings(deadline=None, max_examples=30)
def test_arrays_are_read_in_a_stream(tmp_path_factory: pytest.TempPathFactory, values: list[Any]) -> None:
    path = tmp_path_factory.mktemp("array") / "a.json"
    values.insert(len(values) // 2, {"long": "x" * CHUNK + ']\\"'})  # reaches into the next chunk
    for text in (json.dumps(values), json.dumps(values, indent=1, ensure_ascii=False)):
        path.write_text(text, "utf-8")
        found = list(array_elements(path))
        assert [value for _, value in found] == values
        assert all(text.split("\n")[line - 1].lstrip(" [").startswith("{") for line, _ in found)


def test_texts_scores_and_tags_are_read_from_tables_too(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,body\n1,"two\nlines"\n')
    assert [one.text for one in read(TextFiles, tmp_path / "a.csv", key="body")[0]] == ["two\nlines"]
    with pytest.raises(UserError, match=r"no column 'text' \(columns: id, body\); name yours, e\.g\. key: id"):
        read(TextFiles, tmp_path / "a.csv")
    (tmp_path / "a.tsv").write_text("id\ttext\n1\tx\n")
    assert [one.text for one in read(TextFiles, tmp_path / "a.tsv")[0]] == ["x"]
    assert [one.text for one in read(TextFiles, tmp_path / "a.tsv", key="body")[0]] == ["id\ttext\n1\tx"]
    (tmp_path / "a.json").write_text('[{"tokens": ["a"], "tags": ["O"]}]')
    assert read(TaggedFiles, tmp_path / "a.json")[0][0].words == ("a",)
    (tmp_path / "b.tsv").write_text("sentence1\tsentence2\tsim\na\tb\t1\n")
    assert "b.tsv:1: the score 'sim' is not a number (a header? set header: true)" in (
        read(ScoredFiles, tmp_path / "b.tsv")[1].text()
    )
    assert read(ScoredFiles, tmp_path / "b.tsv", columns=["sentence2", "sentence1", "sim"])[0][0].first == "b"


def test_texts_in_the_place_of_labels_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("".join(f"{n}\t{'pos' if n % 3 else 'neg'}\tthis is text {n}\n" for n in range(90)))
    with pytest.raises(UserError) as refused:
        classes([parse(LabelledFiles, {"path": str(path), "columns": [1, 2]})])
    assert str(refused.value) == (
        "data.train: 90 different labels for 90 texts; is it the right column? "
        f"Column 1 of {path} looks like the label, with 2 values in the first 90 lines: set columns: [2, 1]"
    )
    assert classes([parse(LabelledFiles, {"path": str(path), "columns": [2, 1]})]) == ["neg", "pos"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": n % 2, "label": f"a text {n}"}) + "\n" for n in range(50)))
    with pytest.raises(UserError, match=r"Column text of .* set keys: \[label, text\]"):
        classes([parse(LabelledFiles, {"path": str(path), "keys": ["label", "label"]})])
    path = tmp_path / "few.tsv"
    path.write_text("".join(f"text {n}\tclass {n}\n" for n in range(20)))
    assert len(classes([parse(LabelledFiles, str(path))])) == 20


def test_a_header_in_the_place_of_an_example_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("sentence\tlabel\na\tpos\nb\tneg\n")
    with pytest.raises(UserError, match=r"first line has the label 'label', .* a header\? Set header: true, or"):
        classes([parse(LabelledFiles, str(path))])
    assert classes([parse(LabelledFiles, {"path": str(path), "header": True})]) == ["neg", "pos"]
    assert len(classes([parse(LabelledFiles, {"path": str(path), "header": False})])) == 3


def test_the_fingerprint_of_older_stores_stays_valid(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("a\tb\n")
    plain = _read_as(parse(PairFiles, str(path)), InputHashes())
    assert sorted(plain) == ["as", "columns", "from", "keys", "kind", "sha256", "to", "weight"]
    assert _read_as(parse(PairFiles, {"path": str(path), "header": False}), InputHashes())["header"] is False


def test_aligned_files_have_no_columns() -> None:
    for name, value in (("header", True), ("quotes", False), ("columns", ["a", "b"])):
        with pytest.raises(ConfigError, match=f"'{name}' is for a table given by 'path'"):
            parse(PairFiles, {"source": "a", "target": "b", name: value})
