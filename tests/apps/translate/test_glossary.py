"""Glossaries: what is found, what replaces it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allyouneed.apps.translate.glossary import LETTERS, WORD, Glossary, Term, TermIndex
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


def plain_find(glossary: Glossary, text: str) -> list[Term]:
    """The definition: every term is tried at every word."""

    def translation(found: str) -> str | None:
        for term, target in glossary.terms.items():
            if found == term:
                return target
        for term, target in glossary.terms.items():
            if term != term.lower() and len(term) > 1 and found == term.upper():
                return target.upper()
        for term, target in glossary.terms.items():
            if found.lower() == term:
                return (
                    target.upper()
                    if len(found) > 1 and found.isupper()
                    else target[:1].upper() + target[1:]
                    if found[:1].isupper()
                    else target
                )
        return None

    found, last = list[Term](), 0
    for word in WORD.finditer(text):
        start = word.start()
        for end in sorted({start + len(term) for term in glossary.terms}, reverse=True) if start >= last else ():
            goes_on = LETTERS.match(text, end) is not None and LETTERS.match(text, end - 1) is not None
            target = translation(text[start:end])
            if end <= len(text) and not goes_on and target is not None:
                found.append(Term(start, end, target))
                last = end
                break
    return found


words = st.lists(st.sampled_from(["a", "b", "A", "Ab", "ab", "é", "房", "子", "+", "_", "7"]), min_size=1, max_size=4)
texts = st.tuples(words, st.sampled_from(["", " ", "  ", "-"])).map(lambda it: it[1].join(it[0]))


@given(st.dictionaries(texts, st.sampled_from(["x", "Yz", "房"]), min_size=1, max_size=8), st.lists(texts, max_size=6))
def test_the_terms_found_are_those_of_the_plain_definition(terms: dict[str, str], parts: list[str]) -> None:
    glossary, text = Glossary(terms), " ".join(parts)
    assert list(glossary.find(text)) == plain_find(glossary, text)


class CountedLookups(dict[int, int]):
    count = 0

    def __contains__(self, key: object) -> bool:
        self.count += 1
        return super().__contains__(key)


@pytest.mark.parametrize("share", ["none", "first word", "all but the last word"])
def test_thousands_of_terms_take_time_in_proportion_to_the_text(share: str) -> None:
    """A few lookups for each word, also where every term begins with the words of the text."""
    numbers = range(1, 1000 if share == "all but the last word" else 4000)
    terms = {
        "none": [f"term{number}" for number in numbers],
        "first word": ["the " + "w" * number for number in numbers],
        "all but the last word": ["a " * number + "b" for number in numbers],
    }[share]
    text = {"none": "term7 no", "first word": "the wwwx", "all but the last word": "a"}[share]
    text = " ".join([text] * 2000)
    glossary = Glossary({term: "x" for term in terms})
    indexes = (glossary._cased_index, glossary._lower_index)
    for index in indexes:
        index.beginnings = CountedLookups(index.beginnings)
    assert len(list(glossary.find(text))) == (2000 if share == "none" else 0)
    assert sum(index.beginnings.count for index in indexes) <= 30 * len(text.split())  # type: ignore[attr-defined]


def test_capital_letters_of_other_alphabets_and_those_that_become_two() -> None:
    glossary = Glossary({"οδος": "street", "ev": "house"})
    assert [one.target for one in glossary.find("ΟΔΟΣ, İ ev")] == ["STREET", "house"]


def test_an_index_without_terms_finds_none() -> None:
    assert TermIndex([]).sizes("a b", [(0, 1), (2, 3)]) == [0, 0]
