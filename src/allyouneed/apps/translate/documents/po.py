"""PO files of gettext: `msgstr` is the translation of `msgid`; everything else stays as it is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from allyouneed.apps.translate.documents.parts import Document, Part, Unit
from allyouneed.apps.translate.spans.spans import Passage
from allyouneed.errors import UserError

STATEMENT = re.compile(r'\s*(msgctxt|msgid_plural|msgid|msgstr(?:\[(\d+)\])?)\s*(".*")\s*$')
STRING = re.compile(r'\s*(".*")\s*$')
QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
PLURALS = re.compile(r"nplurals\s*=\s*(\d+)")


@dataclass
class Field:
    """A statement and the strings that continue it."""

    name: str
    index: int
    strings: list[str]
    lines: list[str]

    @property
    def value(self) -> str:
        return "".join(self.strings)

    @property
    def raw(self) -> str:
        return "".join(self.lines)


@dataclass
class Entry:
    """The fields of an entry, and what is around them: comments, flags, blank lines."""

    parts: list[str | Field] = field(default_factory=list)
    fields: dict[str, Field] = field(default_factory=dict)  # the first of each name
    fuzzy: bool = False

    def add(self, part: Field) -> None:
        self.parts.append(part)
        self.fields.setdefault(part.name, part)


def read_po(text: str, every: bool = False) -> Document:
    """Entries without a translation or marked fuzzy are translated; all of them with `every`."""
    entries = list(_entries(text))
    header = next(
        (entry for entry in entries if (one := entry.fields.get("msgid")) is not None and not one.value), None
    )
    known = None if header is None or (one := header.fields.get("msgstr")) is None else PLURALS.search(one.value)
    parts: list[Part] = []
    for entry in entries:
        done = all(part.value for part in entry.parts if isinstance(part, Field) and part.name == "msgstr")
        kept = entry is header or (done and not entry.fuzzy and not every)
        for part in entry.parts:
            if isinstance(part, str):
                parts.append(part)
            elif kept or part.name != "msgstr":
                parts.append(part.raw)
            else:
                parts.append(_unit(entry, part, 0 if known is None else int(known[1])))
    return Document(parts)


def _unit(entry: Entry, part: Field, plurals: int) -> Part:
    source, plural = entry.fields.get("msgid"), entry.fields.get("msgid_plural")
    chosen = plural if plural is not None and (part.index > 0 or plurals == 1) else source
    if chosen is None or not any(map(str.isalpha, chosen.value)):
        return part.raw
    newline = "\r\n" if chosen.raw.endswith("\r\n") else "\n"
    return _Message(Passage(chosen.value, {}), (part.raw,), {}, str, False, part.raw, newline)


@dataclass(frozen=True, eq=False)
class _Message(Unit):
    """`statement`: as it is in the file; `newline`: of its entry."""

    statement: str = ""
    newline: str = "\n"

    def write(self, text: str, answers: Mapping[Unit, str]) -> str:
        keyword = self.statement[: self.statement.index('"')]
        last = self.newline if self.statement.endswith("\n") else ""
        lines = text.split("\n")
        lines = [line + "\n" for line in lines[:-1]] + [lines[-1]] * bool(lines[-1])
        strings = [_quote(line) for line in lines]
        if len(strings) > 1:
            strings.insert(0, '""')
        return keyword + self.newline.join(strings) + last


def _quote(text: str) -> str:
    backwards = {char: letter for letter, char in ESCAPES.items()}
    return '"' + "".join("\\" + backwards[char] if char in backwards else char for char in text) + '"'


def _value(quoted: str, number: int) -> str:
    found = QUOTED.fullmatch(quoted)
    if found is None:
        raise UserError(f"line {number}: the string {quoted[:60]} has a quote that is not escaped")
    return re.sub(r"\\(.)", lambda one: ESCAPES.get(one[1], one[0]), found[1])


def _entries(text: str) -> Iterator[Entry]:
    entry, begun = Entry(), False
    for number, line in enumerate(re.findall(r"[^\n]*\n|[^\n]+$", text), 1):
        bare = line.removeprefix("\ufeff") if number == 1 else line
        statement, string = STATEMENT.match(bare), STRING.match(bare)
        last = entry.parts[-1] if entry.parts else None
        if statement is not None:
            name, index = statement[1].split("[")[0], int(statement[2] or 0)
            if begun and name in ("msgctxt", "msgid") and entry.fields.get("msgstr") is not None:
                yield entry
                entry = Entry()
            begun = True
            entry.add(Field(name, index, [_value(statement[3], number)], [line]))
        elif string is not None and isinstance(last, Field):
            last.strings.append(_value(string[1], number))
            last.lines.append(line)
        elif not bare.strip() or bare.lstrip().startswith("#"):
            if entry.fields.get("msgstr") is not None:
                yield entry
                entry = Entry()
            entry.fuzzy = entry.fuzzy or bool(re.match(r"\s*#,.*\bfuzzy\b", bare))
            entry.parts.append(line)
        else:
            raise UserError(f"line {number}: expected msgid, msgstr, a string or a comment, got {bare.strip()[:60]!r}")
    yield entry
