"""The formats people have: spreadsheets, Parquet, Arrow, databases, archives, other encodings. All give the same rows.
Damaged files: test_data_fuzz.py."""

from __future__ import annotations

import json
import sqlite3
import struct
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from allyouneed import train_tokenizer
from allyouneed.config import ConfigError, parse
from allyouneed.data.batches.encoding import LabelledTextEncoding
from allyouneed.data.batches.store import InputHashes, Store
from allyouneed.data.files.chats import ComparisonFiles
from allyouneed.data.files.filters import Filters
from allyouneed.data.files.formats.encodings import fitting
from allyouneed.data.files.labels import LabelledFiles, TaggedFiles
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.files.prompts import PromptFiles
from allyouneed.data.files.readers import Files, Report
from allyouneed.data.files.tables import MOST_COLUMNS
from allyouneed.data.files.texts import TextFiles
from allyouneed.errors import UserError
from allyouneed.errors.extras import is_installed

ROWS = [("Wer, „wirklich“?\nUnd", "HUM"), ("何？很好", "ENTY"), ("a;b|c", "ENTY"), ("  ", "HUM"), ("été", "ENTY")]
PLAIN = [(text.split("\n")[0], label) for text, label in ROWS]


def read(kind: type[Files], path: Path | str, **keys: Any) -> tuple[list[Any], Report]:
    report = Report()
    return list(parse(kind, {"path": str(path), **keys}).read(report)), report


def labelled(path: Path, **keys: Any) -> list[tuple[str, str]]:
    return [(example.texts[0], example.label) for example in read(LabelledFiles, path, **keys)[0]]


def write_jsonl(path: Path, rows: list[tuple[str, str]] = ROWS) -> None:
    path.write_text("".join(json.dumps({"text": t, "label": c}) + "\n" for t, c in rows), encoding="utf-8")


def write_csv(path: Path, rows: list[tuple[str, str]] = ROWS) -> None:
    lines = ["label,text", *(f'"{label}","{text}"' for text, label in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_tsv(path: Path, rows: list[tuple[str, str]] = ROWS) -> None:
    path.write_text("".join(f"{text.splitlines()[0]}\t{label}\n" for text, label in rows), encoding="utf-8")


def write_xlsx(path: Path, rows: list[tuple[str, str]] = ROWS) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in [("id", "text", "label"), *((n, t, c) for n, (t, c) in enumerate(rows))]:
        book.active.append(row)
    book.save(path)


def table(rows: list[tuple[str, str]]) -> Any:
    pyarrow = pytest.importorskip("pyarrow")
    names = sorted({label for _, label in rows})
    info = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    schema = pyarrow.schema(
        [("id", pyarrow.int64()), ("text", pyarrow.string()), ("label", pyarrow.int64())],
        metadata={"huggingface": json.dumps(info)},
    )
    return pyarrow.table([range(len(rows)), [t for t, _ in rows], [names.index(c) for _, c in rows]], schema=schema)


def write_parquet(path: Path, rows: list[tuple[str, str]] = ROWS) -> None:
    found = table(rows)
    from pyarrow import parquet

    parquet.write_table(found, path, row_group_size=2)


def write_arrow(path: Path, rows: list[tuple[str, str]] = ROWS) -> None:
    """A shard of a Hugging Face dataset is a stream."""
    found = table(rows)
    import pyarrow

    with pyarrow.ipc.new_stream(str(path), found.schema) as writer:
        writer.write_table(found, max_chunksize=2)


def write_feather(path: Path, rows: list[tuple[str, str]] = ROWS) -> None:
    found = table(rows)
    from pyarrow import feather

    feather.write_feather(found, str(path))


def write_database(path: Path, rows: list[tuple[str, str]] = ROWS) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("create table reviews (id integer, text text, label text)")
        database.executemany("insert into reviews values (?, ?, ?)", [(n, t, c) for n, (t, c) in enumerate(rows)])
        database.commit()


def write_zip(path: Path) -> None:
    write_jsonl(path.with_suffix(".jsonl"))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.write(path.with_suffix(".jsonl"), "inside/train.jsonl")


def write_tar(path: Path) -> None:
    write_jsonl(path.with_suffix(".jsonl"))
    with tarfile.open(path, "w:gz") as packed:
        packed.add(path.with_suffix(".jsonl"), "./train.jsonl")


WRITERS: dict[str, Callable[[Path], None]] = {
    ".csv": write_csv,
    ".tsv": write_tsv,
    ".jsonl": write_jsonl,
    ".xlsx": write_xlsx,
    ".parquet": write_parquet,
    ".arrow": write_arrow,
    ".feather": write_feather,
    ".db": write_database,
    ".zip": write_zip,
    ".tgz": write_tar,
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    WRITERS[suffix](tmp_path / f"a{suffix}")
    expected = PLAIN if suffix == ".tsv" else ROWS
    assert labelled(tmp_path / f"a{suffix}") == expected
    assert labelled(tmp_path / f"a{suffix}") == expected, "again, in the same order"


def test_every_format_gives_the_same_store(tmp_path: Path) -> None:
    """Training reads the store only, so that a run resumes exactly, whatever its data was."""
    tokenizer = train_tokenizer([text for text, _ in ROWS], vocab=300)
    encoding = LabelledTextEncoding({"text": tokenizer, "second": tokenizer}, 64, 2, 1, labels=["ENTY", "HUM"])
    stores = []
    for suffix in (".jsonl", ".db", ".zip", *([".parquet"] if is_installed("parquet") else [])):
        WRITERS[suffix](tmp_path / f"a{suffix}")
        files = [parse(LabelledFiles, {"path": str(tmp_path / f"a{suffix}"), "portion": [0.0, 0.8]})]
        stores.append(Store.build(tmp_path / suffix, files, Filters(empty=False), encoding))
    first = stores[0]
    assert 0 < len(first) < len(ROWS)
    for store in stores[1:]:
        assert len(store) == len(first)
        for name, column in first.columns.items():
            assert (store[name].values == column.values).all() and (store[name].offsets == column.offsets).all()


@pytest.mark.parametrize("suffix", [".xlsx", ".parquet", ".db"])
def test_formats_are_read_from_archives(tmp_path: Path, suffix: str) -> None:
    WRITERS[suffix](tmp_path / f"a{suffix}")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as packed:
        packed.write(tmp_path / f"a{suffix}", f"data/a{suffix}")
        packed.writestr("__MACOSX/._a", "x")
    assert labelled(tmp_path / "all.zip") == ROWS
    assert labelled(tmp_path / "all.zip" / "data" / f"a{suffix}") == ROWS


def test_every_task_reads_every_format(tmp_path: Path) -> None:
    """Lists and nested columns of Parquet, names of tags, objects from cells, documents from a database."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    sides = [{"en": "cat", "de": "Katze"}, {"en": "dog", "de": "Hund"}]
    parquet.write_table(pyarrow.table({"id": [1, 2], "translation": sides}), tmp_path / "pairs.parquet")
    found, _ = read(PairFiles, tmp_path / "pairs.parquet", keys=["translation.en", "translation.de"])
    assert [pair.texts for pair in found] == [("cat", "Katze"), ("dog", "Hund")]
    tags = {"info": {"features": {"tags": {"feature": {"names": ["O", "B"], "_type": "ClassLabel"}, "_type": "List"}}}}
    words = pyarrow.table({"tokens": [["a", "b"]], "tags": [[0, 1]]})
    parquet.write_table(words.replace_schema_metadata({"huggingface": json.dumps(tags)}), tmp_path / "tags.parquet")
    ((sentence,), _) = read(TaggedFiles, tmp_path / "tags.parquet")
    assert (sentence.words, sentence.tags) == (("a", "b"), ("O", "B"))
    (tmp_path / "a.csv").write_text("prompt,chosen,rejected\nhi,good,bad\n")
    assert read(ComparisonFiles, tmp_path / "a.csv")[0][0].texts == ("hi", "good", "bad")
    write_database(tmp_path / "a.db")
    assert [found.texts[0] for found in read(TextFiles, tmp_path / "a.db")[0]] == [text for text, _ in ROWS]
    write_parquet(tmp_path / "p.parquet", ROWS[:2])
    assert len(read(PromptFiles, tmp_path / "p.parquet", key="text")[0]) == 2


def test_paths_lead_into_objects_and_keys_with_dots_stay(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"translation": {"en": "cat", "de": "Katze"}}\n{"translation": {"en": "dog"}}\n')
    found, report = read(PairFiles, tmp_path / "a.jsonl", keys=["translation.en", "translation.de"])
    assert [pair.texts for pair in found] == [("cat", "Katze")]
    assert "no key 'translation.de' (keys: 'translation.en')" in report.text()
    (tmp_path / "b.jsonl").write_text('{"a.b": "one", "a": {"b": "other"}, "c": "two"}\n')
    assert read(PairFiles, tmp_path / "b.jsonl", keys=["a.b", "c"])[0][0].texts == ("one", "two")


def test_a_dataset_folder_is_read_by_its_shards(tmp_path: Path) -> None:
    folder = tmp_path / "dataset" / "train"
    folder.mkdir(parents=True)
    write_arrow(folder / "data-00000-of-00002.arrow", ROWS[:2])
    write_arrow(folder / "data-00001-of-00002.arrow", ROWS[2:4])
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text("{}")
    assert labelled(folder) == ROWS[:4]
    (tmp_path / "dataset" / "dataset_dict.json").write_text("{}")
    with pytest.raises(UserError, match=r"several splits \(train\); name the folder of one"):
        labelled(tmp_path / "dataset")


def test_a_pattern_names_shards(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train-1.jsonl", ROWS[2:])
    write_jsonl(tmp_path / "train-0.jsonl", ROWS[:2])
    write_jsonl(tmp_path / "test-0.jsonl")
    assert labelled(tmp_path / "train-*.jsonl") == ROWS


@pytest.mark.parametrize(("separator", "quotes"), [("|", None), (";;", None), ("|", "'"), ("~", '"')])
def test_any_separator_and_quoting(tmp_path: Path, separator: str, quotes: str | None) -> None:
    quote = quotes or ""
    lines = [separator.join(f"{quote}{cell}{quote}" for cell in row) for row in [("text", "label"), ("a, b", "x")]]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    keys = {"separator": separator} | ({"quotes": quotes} if quotes else {})
    assert labelled(tmp_path / "a.txt", **keys) == [("a, b", "x")]


def test_a_sheet_and_a_table_are_named(tmp_path: Path) -> None:
    write_database(tmp_path / "a.db")
    with closing(sqlite3.connect(tmp_path / "a.db")) as database:
        database.execute("create table other (x)")
    with pytest.raises(UserError, match=r"2 tables \(other, reviews\); name one with 'table'"):
        labelled(tmp_path / "a.db")
    with pytest.raises(UserError, match=r"no table 'review' .did you mean 'reviews'"):
        labelled(tmp_path / "a.db", table="review")
    assert labelled(tmp_path / "a.db", table="reviews") == ROWS
    query = "select text, label from reviews where label = 'HUM' order by id desc"
    assert labelled(tmp_path / "a.db", query=query) == [ROWS[3], ROWS[0]]
    with pytest.raises(UserError, match="query: "):
        labelled(tmp_path / "a.db", query="drop table reviews")
    assert labelled(tmp_path / "a.db", table="reviews") == ROWS
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.create_sheet("Second").append(("text", "label"))
    book["Second"].append(("a", 3.0))
    book.save(tmp_path / "a.xlsx")
    with pytest.raises(UserError, match=r"2 sheets \(Sheet, Second\); name one with 'table'"):
        labelled(tmp_path / "a.xlsx")
    assert labelled(tmp_path / "a.xlsx", table="Second") == [("a", "3")]


# --- encodings ------------------------------------------------------------------------------------------------------

CHINESE = "机器学习\t好\n很有趣的一本书\t好\n不好看，没有意思\t差\n"


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("gb18030", CHINESE),
        ("big5", CHINESE.replace("机器学习", "機器學習").replace("书", "書").replace("没", "沒").replace("没", "沒")),
        ("shift_jis", "とても面白い\t良い\nつまらない\t悪い\n"),
        ("cp1252", "sehr schön, größer\tgut\nça va\tmal\n"),
        ("utf-16", CHINESE),
    ],
)
def test_a_named_encoding_is_read_and_an_unnamed_one_is_reported(tmp_path: Path, encoding: str, text: str) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(text.encode(encoding))
    expected = [tuple(line.split("\t")) for line in text.splitlines()]
    assert labelled(path, encoding=encoding) == expected
    assert encoding in fitting(path.read_bytes())
    if encoding == "utf-16":
        with pytest.raises(UserError, match=r"this is UTF-16; .* set encoding: utf-16"):
            labelled(path)
        return
    found, report = read(LabelledFiles, path)
    assert not found and report.dropped == len(expected)
    assert f"{path}:1: not UTF-8; the file looks like" in report.text() and encoding in report.text()


def test_a_wrong_encoding_is_reported_by_row_with_what_fits(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("plain\tx\nschön été\ty\nweiß größer\ty\n", encoding="utf-8")
    found, report = read(LabelledFiles, path, encoding="ascii")
    assert [example.texts[0] for example in found] == ["plain"]
    assert "a.tsv:2: not ascii; the file looks like utf-8" in report.text()
    with pytest.raises(ConfigError, match="unknown encoding 'gbk2'"):
        labelled(path, encoding="gbk2")
    with pytest.raises(ConfigError, match="unknown encoding 'rot13'"):
        labelled(path, encoding="rot13")


def test_valid_utf_8_is_nothing_else() -> None:
    assert fitting("caf\x96 \ue000 été\n".encode() * 5) == ["utf-8"], "texts that were converted badly are still UTF-8"


def test_a_single_damaged_line_does_not_change_what_fits(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(("你好\tx\n" * 50).encode() + b"\xff\tx\n")
    report = read(LabelledFiles, path)[1]
    assert "a.tsv:51: not UTF-8: " in report.text()


# --- what a member of an archive is -----------------------------------------------------------------------------------


def test_members_of_an_archive_have_hashes_of_their_own(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        packed.write(tmp_path / "a.jsonl", "one.jsonl")
        packed.write(tmp_path / "a.jsonl", "two.jsonl")
    hashes = InputHashes()
    one, two = (hashes.sha256(tmp_path / "a.zip" / name) for name in ("one.jsonl", "two.jsonl"))
    assert one != two
    assert len(labelled(tmp_path / "a.zip")) == 2 * len(ROWS)
    with pytest.raises(UserError, match=r"no such file in the archive \(one.jsonl, two.jsonl\)"):
        labelled(tmp_path / "a.zip" / "three.jsonl")


@pytest.mark.parametrize("name", ["../a.jsonl", "/etc/a.jsonl", "a/../../b.jsonl"])
def test_names_that_lead_out_of_an_archive_are_refused(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        packed.writestr(name, "{}")
    with pytest.raises(UserError, match="not the name of a file in this archive"):
        labelled(tmp_path / "a.zip")


def test_bombs_are_refused_before_they_expand(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as packed, packed.open("a.tsv", "w") as member:
        for _ in range(300):
            member.write(bytes(1 << 20))
    with pytest.raises(UserError, match="that expand to 314,572,800"):
        labelled(tmp_path / "a.zip")
    (tmp_path / "a.zip").rename(tmp_path / "a.xlsx")
    pytest.importorskip("openpyxl")
    with pytest.raises(UserError, match="that expand to 314,572,800"):
        labelled(tmp_path / "a.xlsx")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        info = tarfile.TarInfo("a.tsv")
        info.size = 300 << 20
        tar.addfile(info, BytesIO(bytes(300 << 20)))
    with pytest.raises(UserError, match="that expand to 314,572,800"):
        labelled(tmp_path / "a.tar.gz")


def test_a_million_columns_are_refused(tmp_path: Path) -> None:
    names = [f"c{n}" for n in range(1_000_000)]
    (tmp_path / "a.csv").write_text(",".join(names) + "\n" + "," * 999_999 + "\n")
    with pytest.raises(UserError, match="1,000,000 columns; at most 10,000"):
        labelled(tmp_path / "a.csv")
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    wide = pyarrow.table({f"c{n}": [1] for n in range(MOST_COLUMNS + 1)})
    parquet.write_table(wide, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="10,001 columns; at most 10,000"):
        labelled(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1" + struct.pack("<I", 1 << 31) + b"PAR1")
    with pytest.raises(UserError, match="its columns take more than"):
        labelled(tmp_path / "b.parquet")
