"""Readers return every usable pair and report every broken line."""

import gzip
import json
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from allyouneed.config import ConfigError, parse, to_yaml, tree_of
from allyouneed.data.files.lines import raw_lines
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.files.readers import Report
from allyouneed.data.files.texts import TextFiles
from allyouneed.errors import UserError

TEXT = "Hello\tHallo\nGood day\tGuten Tag\n"
PAIRS = [("Hello", "Hallo"), ("Good day", "Guten Tag")]


def lines_of(path: Path) -> list[str]:
    return [document.text for document in TextFiles(path=(path,), document="line").read(Report())]


def pairs_of(**config: object) -> tuple[list[tuple[str, str]], Report]:
    report = Report()
    found = [(pair.source, pair.target) for pair in parse(PairFiles, config).read(report)]
    return found, report


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", TEXT.encode()),
        ("a.tsv", TEXT.encode().rstrip(b"\n")),
        ("a.tsv", b"\xef\xbb\xbf" + TEXT.encode()),
        ("a.tsv", TEXT.replace("\n", "\r\n").encode()),
        ("a.any", TEXT.encode()),
        ("a.tsv.gz", gzip.compress(TEXT.encode(), mtime=0)),
        ("a.tsv.gz", gzip.compress(TEXT[:6].encode(), mtime=0) + gzip.compress(TEXT[6:].encode(), mtime=0)),
        ("a.tsv.zst", zstandard.compress(TEXT.encode())),
        ("a.tsv.zst", zstandard.compress(TEXT[:6].encode()) + zstandard.compress(TEXT[6:].encode())),
        ("a.jsonl", "".join(json.dumps({"source": s, "target": t, "x": 1}) + "\n" for s, t in PAIRS).encode()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # not the bytes: workers must agree on names
)
def test_every_format_gives_the_same_pairs(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    found, report = pairs_of(path=str(tmp_path / name))
    assert found == PAIRS
    assert (report.read, report.kept, report.broken) == (2, 2, 0)


def test_aligned_files_and_a_file_larger_than_one_read(tmp_path: Path) -> None:
    lines = [f"sentence {n} " + "x" * (n % 50) for n in range(30_000)]
    (tmp_path / "a.en").write_text("\n".join(lines) + "\n")
    (tmp_path / "a.de.zst").write_bytes(zstandard.compress("\n".join(reversed(lines)).encode()))
    found, report = pairs_of(source=str(tmp_path / "a.en"), target=str(tmp_path / "a.de.zst"))
    assert found == list(zip(lines, reversed(lines), strict=True))
    assert report.kept == 30_000


def test_columns_choose_and_swap(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("0\ten\tde\n1\ten2\tde2\n2\n")
    found, report = pairs_of(path=str(tmp_path / "a.tsv"), columns=[2, 1])
    assert found == [("de", "en"), ("de2", "en2")]
    assert f"{tmp_path}/a.tsv:3:" in report.text()


def test_json_keys_can_be_set(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"de": "Ja\\nwohl", "en": "Yes"}\n')
    assert pairs_of(path=str(tmp_path / "a.jsonl"), keys=["en", "de"])[0] == [("Yes", "Ja\nwohl")]


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    odd = "a\u2028b\x0bc\x85d\x1ce\rf\x0cg\u2029h"
    (tmp_path / "a.tsv").write_bytes(f"{odd}\t{odd}\r\nx\ty\n".encode())
    assert pairs_of(path=str(tmp_path / "a.tsv"))[0] == [(odd, odd), ("x", "y")]
    (tmp_path / "a.txt").write_bytes(f"{odd}\r\n\nx".encode())
    assert lines_of(tmp_path / "a.txt") == [odd, "x"], "an empty line holds nothing"


@given(
    lines=st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), min_size=1), min_size=1)
)
@settings(deadline=None)
def test_any_text_comes_back_as_it_was(lines: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "a.txt"
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    expected = [lines[0].removeprefix("\ufeff"), *lines[1:]]
    assert lines_of(path) == [line for line in expected if line.encode().strip()]


def test_a_directory_is_its_shards_by_name_without_hidden_files(tmp_path: Path) -> None:
    for name, content in {
        "b.tsv": b"3\t3\n",
        "a.tsv.gz": gzip.compress(b"1\t1\n2\t2\n", mtime=0),
        ".hidden": b"junk",
    }.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "c.jsonl").write_text('{"source": "4", "target": "4"}')
    assert [source for source, _ in pairs_of(path=str(tmp_path))[0]] == ["1", "2", "3", "4"]


def test_broken_lines_are_counted_and_shown_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"ok\tok\nonly one\n\xff\xfe\tx\na\tb\tc\nok\tok\n")
    found, report = pairs_of(path=str(path))
    assert found == [("ok", "ok")] * 2
    assert (report.read, report.kept, report.broken) == (5, 2, 3)
    text = report.text()
    assert f"{path}:2: 1 column(s)" in text and "'only one'" in text
    assert f"{path}:3: not UTF-8" in text
    assert f"{path}:4: 3 column(s)" in text and "columns" in text


def test_broken_json_is_counted_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"source": "a", "target": "b"}\n{oops\n[1]\n{"source": "a"}\n{"source": 1, "target": "b"}\n'
        '{"source": "\\ud800", "target": "b"}\n' + "[" * 100_000 + "\n"
    )
    found, report = pairs_of(path=str(path))
    assert found == [("a", "b")] and report.broken == 6
    for line, reason in [(2, "not JSON"), (3, "a JSON list"), (4, "no key 'target'"), (5, "'source' is not a string")]:
        assert f"{path}:{line}: {reason}" in report.text()


def test_the_report_shows_a_few_examples_and_counts_the_rest(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("a\tb\n" + "broken\n" * 40)
    _, report = pairs_of(path=str(tmp_path / "a.tsv"))
    assert report.broken == 40 and report.text().count("a.tsv:") == report.show
    assert f"{40 - report.show} more" in report.text()
    assert Report.from_tree(json.loads(json.dumps(report.to_tree()))).text() == report.text()


def test_a_broken_line_of_an_aligned_file_does_not_shift_the_others(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1\n2\n3\n4\n")
    (tmp_path / "b").write_bytes(b"1\n\xff\n3\n4\n")
    found, report = pairs_of(source=str(tmp_path / "a"), target=str(tmp_path / "b"))
    assert found == [("1", "1"), ("3", "3"), ("4", "4")]
    assert f"{tmp_path}/b:2: not UTF-8" in report.text()


@pytest.mark.parametrize(("left", "right"), [(3, 5), (5, 3), (70_000, 1)])
def test_unequal_aligned_files_are_refused_with_both_counts(tmp_path: Path, left: int, right: int) -> None:
    (tmp_path / "a").write_text("x\n" * left)
    (tmp_path / "b").write_text("x\n" * right)
    with pytest.raises(UserError, match=f"/a has {left} lines but .*/b has {right}"):
        pairs_of(source=str(tmp_path / "a"), target=str(tmp_path / "b"))


def _damage(tmp_path: Path, what: str) -> Path:
    noise = "".join(f"{n * 7919 % 10007}\t{n * 104729 % 10009}\n" for n in range(20_000)).encode()
    contents = {
        "missing.tsv": None,
        "empty.tsv": b"",
        "empty.tsv.gz": gzip.compress(b"", mtime=0),
        "cut.tsv.gz": gzip.compress(noise, mtime=0)[:-3000],
        "nogz.tsv.gz": b"plain\ttext\n",
        "cut.tsv.zst": zstandard.compress(noise)[:-3000],
        "tail.tsv.zst": zstandard.compress(noise) + zstandard.compress(noise)[:7],
        "nozst.tsv.zst": b"plain\ttext\n",
        "utf16.tsv": "a\tb\n".encode("utf-16"),
        "a.zip": b"PK",
        "a.pdf": b"%PDF",
    }
    path = tmp_path / what
    content = contents[what]
    if content is not None:
        path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("missing.tsv", "no such file"),
        ("empty.tsv", "empty"),
        ("empty.tsv.gz", "empty"),
        ("cut.tsv.gz", "truncated"),
        ("nogz.tsv.gz", "damaged"),
        ("cut.tsv.zst", "truncated"),
        ("tail.tsv.zst", "truncated"),
        ("nozst.tsv.zst", "damaged"),
        ("utf16.tsv", "UTF-16"),
        ("a.zip", "the archive cannot be read"),
        ("a.pdf", "not supported; convert"),
    ],
)
def test_a_useless_file_is_refused_by_name(tmp_path: Path, what: str, says: str) -> None:
    path = _damage(tmp_path, what)
    with pytest.raises(UserError, match=says) as error:
        pairs_of(path=str(path))
    assert str(path) in str(error.value)
    with pytest.raises(UserError, match=says):
        lines_of(path)


def test_a_useless_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("a\tb\n")
    with pytest.raises(UserError, match="the directory is empty"):
        pairs_of(path=str(tmp_path))
    (tmp_path / "a.tsv").write_text("a\tb\n")
    (tmp_path / "notes.docx").write_text("a\tb\n")
    with pytest.raises(UserError, match=r"notes\.docx.*'\.docx'"):
        pairs_of(path=str(tmp_path))


def test_aligned_directories_need_the_same_number_of_shards(tmp_path: Path) -> None:
    for name in ("en/1.txt", "en/2.txt", "de/1.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x\n")
    with pytest.raises(UserError, match=r"2 file\(s\) but .* is 1"):
        pairs_of(source=str(tmp_path / "en"), target=str(tmp_path / "de"))


@pytest.mark.parametrize("config", [{}, {"path": "a", "source": "b", "target": "c"}, {"source": "b"}, {"target": "b"}])
def test_exactly_one_way_to_give_pairs(config: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"either 'path'.* or both 'source' and 'target'"):
        parse(PairFiles, config)


def test_a_plain_word_is_a_path_and_the_config_survives_yaml() -> None:
    assert parse(PairFiles, "a.tsv") == parse(PairFiles, {"path": ["a.tsv"]})
    config = parse(PairFiles, {"path": "a.tsv", "from": "zh", "to": "en", "columns": [1, 0]})
    assert (config.from_, config.to) == ("zh", "en")
    assert parse(PairFiles, tree_of(config)) == config
    assert "from: zh" in to_yaml(config)
    with pytest.raises(ConfigError, match="'columns'"):
        parse(PairFiles, {"source": "a", "target": "b", "columns": [0, 1]})


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_an_endless_line_is_refused_by_its_number_before_it_is_read(tmp_path: Path, suffix: str) -> None:
    """Packed zeros: some kilobytes that would unpack to gigabytes of one line."""
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    file = tmp_path / f"pairs.txt{suffix}"
    file.write_bytes(pack(b"first\nsecond\n" + bytes(40 << 20)))
    read = 0
    with pytest.raises(UserError, match=rf"pairs.txt{suffix}:3: a line of more than 16 MiB; .* break it into lines"):
        for _ in raw_lines(file):
            read += 1
    assert read == 2
