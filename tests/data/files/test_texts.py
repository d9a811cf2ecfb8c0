"""Documents from plain text: none split, none joined, broken ones reported."""

import gzip
from pathlib import Path

import pytest

from allyouneed.config import ConfigError, parse
from allyouneed.data.batches.encoding import BLOCK, encode_texts, split_blocks
from allyouneed.data.files.readers import Report
from allyouneed.data.files.texts import TextFiles
from allyouneed.data.tokenizers.base import TokenizerConfig, train
from allyouneed.errors import UserError

TEXT = "One.\nStill one.\n\n\nTwo.\n \nThree\n"


def read(path: Path, **keys: object) -> tuple[list[tuple[str, int]], Report]:
    report = Report()
    files = parse(TextFiles, {"path": str(path), **keys})
    return [(document.text, document.line) for document in files.read(report)], report


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("paragraph", [("One.\nStill one.", 1), ("Two.", 5), ("Three", 7)]),
        ("line", [("One.", 1), ("Still one.", 2), ("Two.", 5), ("Three", 7)]),
        ("file", [("One.\nStill one.\n\n\nTwo.\n \nThree", 1)]),
    ],
)
def test_documents_are_paragraphs_lines_or_files(
    tmp_path: Path, document: str, expected: list[tuple[str, int]]
) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    found, report = read(tmp_path / "a.txt.gz", document=document)
    assert found == expected and report.read == report.kept == len(expected)


def test_the_text_of_a_json_line_is_under_the_given_key(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "a\\n\\nb"}\n{"text": "x"}\n')
    found, report = read(tmp_path / "a.jsonl", key="body")
    assert found == [("a\n\nb", 1)] and "a.jsonl:2: no key 'body'" in report.text()


def test_a_document_that_is_no_text_is_left_out_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo\n\xff\n\nthree\n")
    found, report = read(tmp_path / "a.txt")
    assert [text for text, _ in found] == ["one", "three"] and "a.txt:4: not UTF-8" in report.text()
    assert report.read == 3 and report.kept == 2


def test_an_empty_file_and_a_strange_key_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match=r"a\.txt: the file is empty"):
        read(tmp_path / "a.txt")
    with pytest.raises(ConfigError, match=r"columns: unknown"):
        read(tmp_path / "a.txt", columns=[0, 1])


def test_a_long_text_is_encoded_in_blocks_of_lines_and_comes_back() -> None:
    tokenizer = train(TokenizerConfig(vocab=300), ["the cat sees the moon"])
    line = "the cat sees  the moon \n"
    text = line * (3 * BLOCK // len(line)) + "x" * (BLOCK + 5) + "\nend"
    parts = split_blocks(text)
    assert len(parts) >= 3 and "".join(parts) == text and all(part.endswith("\n") for part in parts[:-1])
    (ids,) = encode_texts(tokenizer, [text])
    assert tokenizer.decode(ids) == text
