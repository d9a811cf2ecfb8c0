"""Glossaries: what is found, what replaces it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from allyouneed.apps.translate.glossary import Glossary
from allyouneed.apps.translate.spans.spans import Passage, protect, restore, written
from allyouneed.errors import UserError

TERMS = Glossary(
    {"house": "Haus", "green house": "Gewächshaus", "Apple": "Apple", "房子": "house", "C++": "C++", "Node.js": "N"}
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A house.", "A Haus."),
        ("House and HOUSE", "Haus and HAUS"),
        ("a green house, houses", "a Gewächshaus, houses"),
        ("Apple, apple and APPLE", "Apple, apple and APPLE"),
        ("这房子很大", "这house很大"),
        ("房子房子，8房子Tom", "house house，8 house Tom"),
        ("in C++ and C++x", "in C++ and C++x"),
        ("see http://a.com/house or `house` or {house}", "see http://a.com/house or `house` or {house}"),
        ("use Node.js now", "use N now"),
        ("the house-house", "the Haus-Haus"),
    ],
)
def test_terms_are_replaced_as_whole_words_and_in_their_case(text: str, expected: str) -> None:
    found = protect(text, None, TERMS)
    assert restore(found.template, found.spans) == text
    assert written(found.template, found.spans) == expected
    assert "ouse" not in found.template.replace("houses", ""), "the model does not read a term"


def test_terms_beside_the_marks_of_a_document() -> None:
    marks = {char: span for char, span in protect("<b></b>").spans.items()}
    (first, one), (second, two) = marks.items()
    found = protect(f"a {first}house{second}", Passage("", {first: one, second: two}).spans, TERMS)
    assert written(found.template, found.spans) == "a <b>Haus</b>"


def test_a_glossary_is_read_from_lines(tmp_path: Path) -> None:
    path = tmp_path / "terms.tsv"
    path.write_text("\ufeffhouse\tHaus\r\n\nApple\n", encoding="utf-8")
    assert Glossary.read(path).terms == {"house": "Haus", "Apple": "Apple"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b"a\tb\tc\n\tb\n",
            r"terms.tsv: line 1: expected a term, a tab and its translation, got 'a\\tb\\tc'; line 2: ",
        ),
        (b"a\tb\na\tc\n", "line 2: 'a' has two translations, 'b' and 'c'"),
        (b"\xff\tb", r"not UTF-8 \(byte 0\)"),
        (b"x\n" * 3 + b"\tb\n" * 9, "; and 4 more; mend the file"),
    ],
)
def test_bad_lines_are_refused_in_one_message(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "terms.tsv"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message):
        Glossary.read(path)


@pytest.mark.parametrize("terms", [{"": "x"}, {"x": " "}, {"x": "a\nb"}, {1: "x"}, ["x"]])
def test_bad_terms_are_refused(terms: object) -> None:
    with pytest.raises(UserError, match="glossary"):
        Glossary.of(terms)  # type: ignore[arg-type]
