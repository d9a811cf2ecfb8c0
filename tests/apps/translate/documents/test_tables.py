"""Tables: the cells of the chosen columns are translated, and no other byte changes."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allyouneed.apps.translate.documents.formats import read_document
from allyouneed.errors import UserError


def upper(text: str, format: str = "csv", **reading: Any) -> str:
    document = read_document(text, format, **reading)
    return document.write([unit.passage.upper() for unit in document.units])


@pytest.mark.parametrize(
    ("text", "column", "wanted"),
    [
        ("id,text\n1,a b\n2,c\n", "text", "id,text\n1,A B\n2,C\n"),
        ('\ufeff"id";"text"\r\n1;"a, ""b"""\r\n\r\n2;c', "text", '\ufeff"id";"text"\r\n1;"A, ""B"""\r\n\r\n2;C'),
        ('a|b\n"x\ny"|z\n', "1", 'a|b\n"X\nY"|z\n'),
        ("text\nword\n12\n\n", "text", "text\nWORD\n12\n\n"),
        ("a,b,a b\n x ,y,z\n", ["3", "a"], "a,b,a b\n X ,y,Z\n"),
        ("2,1\nx,y\n", "1", "2,1\nx,Y\n"),
        ("a,b\r\nx,y\nz,\r\n", "b", "a,b\r\nx,Y\nz,\r\n"),
        ("", "1", ""),
    ],
)
def test_only_the_cells_of_the_column_change(text: str, column: str | list[str], wanted: str) -> None:
    assert upper(text, column=column) == wanted


def test_the_first_row_may_be_translated() -> None:
    assert upper("a,b\nc,d\n", column="2", header=False) == "a,B\nc,D\n"


def test_a_translation_is_quoted_where_it_needs_it() -> None:
    document = read_document("t,u\nx,y\n", "csv", column=["t", "u"])
    assert document.write(['a "b"', "c, d"]) == 't,u\n"a ""b""","c, d"\n'


def test_quotes_in_tsv_are_characters_unless_they_enclose_a_cell() -> None:
    text = 't\tu\n5" pipe\t"a "b" c\n"x ""y"""\t"z"\n'
    assert upper(text, "tsv", column=["t", "u"]) == 't\tu\n5" PIPE\t"A "B" C\n"X ""Y"""\t"Z"\n'
    document = read_document("t\nx\n", "tsv", column="t")
    assert document.write(["a\tb"]) == "t\na b\n", "a tab would begin another cell"


@pytest.mark.parametrize(
    ("text", "reading", "message"),
    [
        ("id,text\n1,a\n", {}, r"name the column that is translated \(--column: id, text; or 1 to 2\)"),
        ("id,text\n1,a\n", {"column": "txet"}, r"no column 'txet' \(did you mean 'text'\?\)"),
        ("id,text\n1,a\n", {"column": "3"}, "no column '3'"),
        ("id,text\n1,a\n", {"column": "0"}, "no column '0'"),
        ("a,a\n1,b\n", {"column": "a"}, "2 columns are named 'a'; choose one by its number"),
        ("id,text\n1\n", {"column": "text"}, "line 2: 1 columns, expected at least 2"),
        ('id,text\n1,"a\n', {"column": "text"}, "line 2: '\"a': a quote is not closed"),
        ('id,text\n1,"a" b\n', {"column": "text"}, "line 2: .*a quote is not closed, or something follows"),
        ("id,text\n", {"header": False}, r"\(--column: 1 to 2\)"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(text: str, reading: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_document(text, "csv", **reading)


cells = st.text(st.sampled_from('ab 1",;\t\n\r'), max_size=5)


@given(st.lists(st.lists(cells, min_size=2, max_size=2), min_size=1, max_size=5), st.sampled_from(",;\t"))
def test_a_table_of_the_standard_library_is_read_and_written_alike(rows: list[list[str]], delimiter: str) -> None:
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter).writerows([["first", "second"], *rows])
    text = file.getvalue()
    document = read_document(text, "csv", column="second")
    assert document.write([unit.passage for unit in document.units]) == text
    found = list(csv.reader(io.StringIO(upper(text, column="second"), newline=""), delimiter=delimiter))
    assert found[1:] == [[one, two.upper()] for one, two in rows]


@given(st.text(st.sampled_from('ab",;\t\n\r|'), max_size=40), st.sampled_from(["csv", "tsv"]))
def test_any_text_comes_back_or_is_refused(text: str, format: str) -> None:
    try:
        document = read_document(text, format, column="1")
    except UserError:
        return
    assert document.write([unit.passage for unit in document.units]) == text
