"""The work of reading and writing a document grows in proportion to its size, also for hostile ones. It is counted, not
timed: characters that the tokenizer passes over, and lines of Python that are executed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from allyouneed.apps.translate import documents
from allyouneed.apps.translate.documents import tokens as module
from allyouneed.apps.translate.documents.formats import FORMATS, read_document
from allyouneed.apps.translate.documents.tokens import tokens

FOLDER = str(Path(documents.__file__).parent)
TAGS = [
    '<a title="', "<a title='", '<a b=">" ', "<a b='\">", "<b>", "</b>", "<b></i>", "<pre><b>", "<!--", "<!-", "<!",
    "<?", "<![CDATA[", "<![CDATA[>", "]]>", "<!DOCTYPE [", "<", "</", "<a ", "<a/", "<a=", "a", "&amp;", "&",
    "<script>", "<title><b>", "<p>a", "a<b>", "<li class=notranslate>", '<img alt="a">', "<x/>a", "  \n", "\"'>",
    "<a b='>\">",
]  # fmt: skip
PIECES = {
    "html": TAGS,
    "xml": TAGS,
    "md": ["*", " *a", "a* ", "**a", "_", "`", "``a", "[", "]", "](", "[a](", "\\", "<a ", "<!--", "> ", "- ", "1. ",
           "#", "|a", "~~", "[^a", "[a]: b\n", "a\n", "    ", "<div>\n", "---\n", "  \n", "&am"],
    "srt": ["a\n", "- a\n", "<i>", "{\\", "\n\n", "00:00:01,000 --> 00:00:02,000\na,\n\n", "a "],
    "vtt": ["a\n", "<v ", "&amp;", "\n\n00:01.000 --> 00:02.000\nb, \n", "<00:"],
    "po": ['"a"\n', "# c\n", "#, fuzzy\n", "\n", 'msgstr ""\n\nmsgid "a"\n', 'msgctxt "a"\n'],
    "text": ["a\n", " ", "- "],
    "csv": ["a,", '"a",', '"",', ",", "\n", "\r\n", '"a\n""",', ";a"],
    "tsv": ["a\t", '"a', '""', '"a""', '"', "\t", "\n", 'a\n"', '""x\t', '"""x\t'],
    "xliff": ["<trans-unit><source>a <g>b</g></source></trans-unit>", "<!-- c -->", "&amp;"],
    "ts": ["<message><source>a</source><translation/></message>", "a\n"],
    "tmx": ['<tu><tuv xml:lang="en"><seg>a<ph/></seg></tuv></tu>'],
    "json": ['"a",', '{"a": "b"},', '"{n, plural, one{a}}",', '["a"],'],
    "yaml": ["- a\n", '- "b"\n', "- >\n  c\n", "- d: e\n  f: g\n"],
    "properties": ["a=b\n", "c=d\\\n", "# e\n", "\\", "f "],
    "strings": ['"a" = "b";\n', "/*", "// c\n", '"'],
    "ipynb": ['{"cell_type": "markdown", "source": ["a"]},', '{"cell_type": "code", "source": "b"},'],
    "tex": ["{", "}", "$", "$$", r"\[", r"\(", "%", r"\begin{equation}", r"\emph{a}", r"\emph{", r"\a[", r"\x{}",
            "a\n\n", "a & ", r"a \\", r"\verb|", r"\footnote{b}", "[", "]"],
}  # fmt: skip
PAIRS = {"tex": [("{", "}"), (r"\emph{a", "}"), ("$a", "}")],
         "md": [("[", "]"), ("[", "a* "), (" *a", "b_ ")], "html": [("<pre><b>", "</i>"), ("a<b>", "</i>")],
         "xml": [("a<b>", "</i>")]}  # fmt: skip
HEADS = {"srt": "1\n00:00:01,000 --> 00:00:02,000\n", "vtt": "WEBVTT\n\n00:01.000 --> 00:02.000\n", "po": 'msgid "x"\n'}
HEADS |= {"xliff": "<xliff>", "ts": "<ts>", "tmx": "<tmx>", "json": "[", "ipynb": '{"cells": [', "strings": '"a"="b";'}
ENDS = {
    "xliff": "</xliff>",
    "ts": "</ts>",
    "tmx": "</tmx>",
    "json": '""]',
    "yaml": "- x",
    "ipynb": '{"cell_type": "raw", "source": ""}], "nbformat": 4}',
    "po": 'msgstr ""\n',
    "csv": ",x",
}
OPTIONS = {"csv": {"column": "1"}, "tsv": {"column": "1"}}


class Counted(str):
    """A text that counts the characters that its methods pass over."""

    work = 0

    def find(self, *args: Any) -> int:
        found = super().find(*args)
        begin = args[1] if len(args) > 1 else 0
        end = args[2] if len(args) > 2 else len(self)
        Counted.work += 1 + (end if found < 0 else found) - begin
        return found

    def rfind(self, *args: Any) -> int:
        Counted.work += len(self)
        return super().rfind(*args)


class CountedPattern:
    """A pattern without backtracking: a match passes over what it matches, a failure perhaps over the whole rest."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern = pattern

    def match(self, text: str, at: int) -> re.Match[str] | None:
        found = self.pattern.match(text, at)
        Counted.work += 1 + (len(text) if found is None else found.end()) - at
        return found


@pytest.mark.parametrize("xml", [False, True])
def test_the_tokenizer_passes_over_each_character_a_few_times(xml: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ATTRIBUTE", CountedPattern(module.ATTRIBUTE))
    for first in TAGS:
        for second in ("", *TAGS[::3]):
            for last in ("", ">", "'", '"'):
                text = Counted((first + second) * 60 + last)
                Counted.work = 0
                assert "".join(token.raw for token in tokens(text, xml)) == text
                assert Counted.work <= 16 * len(text) + 100, (first, second, last)


@contextmanager
def counted_lines() -> Iterator[list[int]]:
    """How many lines of the document readers are executed."""
    count = [0]

    def line(frame: FrameType, event: str, _: object) -> Any:
        count[0] += event == "line"
        return line

    def call(frame: FrameType, event: str, _: object) -> Any:
        count[0] += 1
        return line if frame.f_code.co_filename.startswith(FOLDER) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield count
    finally:
        sys.settrace(before)


def lines_of(format: str, text: str) -> int:
    with counted_lines() as count:
        document = read_document(
            HEADS.get(format, "") + text + ENDS.get(format, " x"), format, **OPTIONS.get(format, {})
        )
        document.write([unit.passage.swapcase() for unit in document.units])
    return count[0]


@pytest.mark.parametrize("format", sorted(PIECES))
def test_the_readers_do_as_much_for_each_piece(format: str) -> None:
    assert set(PIECES) == {name for name, one in FORMATS.items() if not one.data}
    for first, second in [(piece, "") for piece in PIECES[format]] + PAIRS.get(format, []):
        one, two = (lines_of(format, first * size + second * size) for size in (100, 200))
        assert two <= 2.1 * one + 200, (first, second, one, two)


def test_the_counters_find_quadratic_work() -> None:
    text = Counted("<a " * 200)
    Counted.work = 0
    for at in range(0, len(text), 3):
        text.find(">", at)
    assert Counted.work > 16 * len(text) + 100
