"""Markdown: a paragraph, a heading, a list item or a table cell is a passage. Front matter, code, reference definitions
and HTML that is not read are copied. A paragraph of several lines becomes one line."""

from __future__ import annotations

import re

from allyouneed.apps.translate.documents.html import BLOCKS, read_html_parts
from allyouneed.apps.translate.documents.inline import DEFINITION, add_inline, encoder, labels_of
from allyouneed.apps.translate.documents.parts import Builder, Document, free_symbols
from allyouneed.apps.translate.splitting.split import CodeFences

LINE = re.compile(r"[^\n]*\n|[^\n]+$")
QUOTES = r"[ \t]*(?:>[ \t]?)*"
# quotes, list marks with check boxes, footnotes, headings
PREFIX = re.compile(
    rf"{QUOTES}(?:[ \t]*(?:[-*+]|\d{{1,9}}[.)])(?:[ \t]+|(?=\r?$)))*(?:\[[ xX]\][ \t]+)?(?:\[\^[^\[\]\s]+\]:[ \t]*)?"
    r"(?:#{1,6}(?:[ \t]+|(?=\r?$)))?"
)
MARKS_BLOCK = re.compile(r"[-*+]|\d|#|\[")  # in a prefix: a new block begins
TAIL = re.compile(r"(?:[ \t]+#+)?(?:[ \t]*\{[#.:][^{}]*\})?[ \t]*\r?\n?$")  # of a heading
RULE = re.compile(r"[ \t>]*(?:={2,}|-{2,}|(?:[-*_][ \t]*){3,}|:{3,}.*|\$\$)[ \t]*\r?$")
DELIMITER = re.compile(r"[ \t>]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*\r?$")
CELLS = re.compile(r"((?<!\\)\|)")
HTML = re.compile(r"[ ]{0,3}<(?:/?(?P<name>[A-Za-z][\w-]*)(?=[\s/>]|$)|!|\?)")
VERBATIM = re.compile(r"[ ]{0,3}<(?:(?P<name>script|pre|style|textarea)(?=[\s>]|$)|(?P<comment>!--))", re.IGNORECASE)
FRONT = re.compile(r"\ufeff?(---|\+\+\+)[ \t]*\r?\n.*?^(?:\1|\.\.\.)[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)


def read_markdown(text: str) -> Document:
    return _MarkdownReader(text).read()


class _MarkdownReader:
    def __init__(self, text: str) -> None:
        front = FRONT.match(text)
        self.front = "" if front is None else front[0]
        self.lines = LINE.findall(text[len(self.front) :])
        self.labels = labels_of(iter(self.lines))
        marks = [number for number, line in enumerate(self.lines) if line.strip() == "$$"]
        self.math = {n for first, last in zip(marks[::2], marks[1::2], strict=False) for n in range(first, last + 1)}
        self.symbols = free_symbols(text)
        self.builder = Builder(self.symbols, encoder(False), [self.front] * bool(self.front))
        self.paragraph = ""
        self.in_list = False

    def read(self) -> Document:
        fences, blank, table, at = CodeFences(), True, False, 0
        while at < len(self.lines):
            line = self.lines[at]
            bare = line.rstrip("\n").rstrip("\r")
            body = bare[len(_prefix(bare)) :]
            size = 1
            table = table and bool(bare.strip()) and "|" in bare
            if (
                fences.is_code(body)
                or at in self.math
                or not body.strip()
                or RULE.match(bare)
                or DEFINITION.match(bare)
            ):
                self._copy(line)
            elif blank and not self.in_list and re.match(r" {4}|\t", bare):
                self._copy(line)
                at += 1
                continue  # code goes on after it as after a blank line
            elif not self.paragraph and (lines := self._html(at)):
                size = lines
            elif table or self._is_table(at):
                table = True
                self._row(line)
            elif self.paragraph and not MARKS_BLOCK.search(_prefix(bare)) and not VERBATIM.match(bare):
                self.paragraph += line
            else:
                self._begin(line)
            blank = not bare.strip()
            if not blank and not bare[0].isspace():
                self.in_list = bool(re.match(r"[-*+\d]", _prefix(bare)))
            at += size
        self._end()
        return Document(self.builder.parts)

    def _begin(self, line: str) -> None:
        self._end()
        prefix = _prefix(line)
        self.builder.skip(prefix)
        rest = line[len(prefix) :]
        if prefix.rstrip().endswith("#"):
            tail = TAIL.search(rest)
            words = rest if tail is None else rest[: tail.start()]
            add_inline(self.builder, words, self.labels)
            self.builder.skip(rest[len(words) :])
        else:
            self.paragraph = rest

    def _copy(self, line: str) -> None:
        self._end()
        self.builder.skip(line)

    def _end(self) -> None:
        text, self.paragraph = self.paragraph, ""
        words = text.rstrip()
        add_inline(self.builder, words, self.labels)
        self.builder.skip(text[len(words) :])

    def _is_table(self, at: int) -> bool:
        line, following = self.lines[at], self.lines[at + 1 : at + 2]
        return (
            "|" in line and bool(following) and "-" in following[0] and bool(DELIMITER.match(following[0].rstrip("\n")))
        )

    def _row(self, line: str) -> None:
        self._end()
        prefix = re.match(QUOTES, line)
        lead = "" if prefix is None else prefix[0]
        self.builder.skip(lead)
        if DELIMITER.match(line.rstrip("\n")):
            self.builder.skip(line[len(lead) :])
            return
        cells = Builder(self.symbols, encoder(True))
        for number, cell in enumerate(CELLS.split(line[len(lead) :])):
            if number % 2:
                cells.skip(cell)
            else:
                add_inline(cells, cell.rstrip("\r\n"), self.labels)
                cells.skip(cell[len(cell.rstrip("\r\n")) :])
        self.builder.skip(*cells.parts)

    def _html(self, at: int) -> int:
        """Read a block of HTML; the number of its lines, or 0 if the line is a paragraph."""
        line = self.lines[at]
        verbatim, tag = VERBATIM.match(line), HTML.match(line)
        name = "" if tag is None else (tag["name"] or "").lower()
        if tag is None or (verbatim is None and name and name not in BLOCKS):
            return 0
        end = at + 1
        if verbatim is not None:
            close = "-->" if verbatim["comment"] else f"</{verbatim['name'].lower()}>"
            while close not in self.lines[end - 1].lower() and end < len(self.lines):
                end += 1
        else:
            while end < len(self.lines) and self.lines[end].strip():
                end += 1
        self.builder.skip(*read_html_parts("".join(self.lines[at:end]), self.symbols))
        return end - at


def _prefix(line: str) -> str:
    found = PREFIX.match(line)
    return "" if found is None else found[0]
