"""Files of names and values: JSON and ARB, YAML, Java properties, .strings of Apple, notebooks. Only values that have
words are translated; every other byte stays as it is, comments and indentation too.

A format tells where its values are and how they are written; a value may be an ICU message, whose variants (`{count,
plural, one{…} other{…}}`) are translated one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from allyouneed.apps.translate.documents.markdown import read_markdown
from allyouneed.apps.translate.documents.parts import Document, Embedded, OwnLanguage, Part, Unit
from allyouneed.apps.translate.spans.spans import Passage
from allyouneed.data.languages import iso_code
from allyouneed.errors import UserError

CHOICE = re.compile(r"\{\s*\w+\s*,\s*(?:plural|select|selectordinal)\s*,")
BRACES = re.compile(r"[{}]|'[{}][^']*'|''")
LOCALE = re.compile(r"[A-Za-z]{2,3}(?:[-_][A-Za-z]{2,4})?")
DEEPEST = 200


class ValueSpan(NamedTuple):
    """A value of a file: its characters in it, what it says, and how another text is written in its place. `parts`: of
    a value that is a document itself, or the name of a language."""

    start: int
    end: int
    text: str
    encode: Callable[[str], str]
    parts: tuple[Part, ...] | None = None


def read_values(text: str, values: Iterable[ValueSpan]) -> Document:
    parts: list[Part] = []
    at = 0
    for value in values:
        raw = text[value.start : value.end]
        parts.append(text[at : value.start])
        if value.parts is None:
            inside = tuple(_message(value.text, 0))
            plain = any(isinstance(part, Unit) for part in inside)
            parts.append(Embedded(inside, raw, value.encode) if plain else raw)
        else:
            parts.append(Embedded(value.parts, raw, value.encode))
        at = value.end
    return Document([*parts, text[at:]])


def _message(text: str, depth: int) -> Iterator[Part]:
    """A text in which the variants of each choice are messages of their own."""
    found = CHOICE.search(text) if depth < DEEPEST else None
    variants = [] if found is None else _variants(text, found.end())
    if found is None or not variants:
        yield Unit(Passage(text, {}), (text,), {}, str) if any(map(str.isalpha, text)) else text
        return
    if text[: found.start()].strip():
        yield from _message(text[: found.start()], DEEPEST)
    else:
        yield text[: found.start()]
    at = found.start()
    for start, end in variants:
        yield text[at:start]
        yield from _message(text[start:end], depth + 1)
        at = end
    close = text.index("}", at + 1) + 1
    yield text[at:close]
    yield from _message(text[close:], depth + 1)


def _variants(text: str, at: int) -> list[tuple[int, int]]:
    """What is in the braces of each variant of a choice; nothing if they are not balanced."""
    found, depth, start = list[tuple[int, int]](), 0, 0
    for brace in BRACES.finditer(text, at):
        if brace[0] == "{":
            depth += 1
            start = brace.end() if depth == 1 else start
        elif brace[0] == "}":
            depth -= 1
            if depth < 0:
                return found
            if depth == 0:
                found.append((start, brace.start()))
    return []


JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"|[{}\[\]:,]')
Path = list[str | int]  # the names and the places that lead to a value


def read_json(text: str) -> Document:
    """The strings of a JSON file; names, and what ARB says about a message (`@name`), stay as they are."""
    own = OwnLanguage()
    escape = text.isascii() and "\\u" in text

    def value(start: int, end: int, path: Path) -> ValueSpan:
        words, name = json.loads(text[start:end]), str((path or [""])[0])
        parts: tuple[Part, ...] | None = (words,) if name.startswith("@") else None
        if name == "@@locale":
            parts = (own.part(words, lambda to: to.replace("-", "_")),)
        return ValueSpan(start, end, words, partial(json.dumps, ensure_ascii=escape), parts)

    return read_values(text, [value(*one) for one in _json_values(text) if text[one[0]] == '"'])


def read_notebook(text: str) -> Document:
    """The Markdown cells of a Jupyter notebook; code, outputs and metadata stay as they are."""
    found = _load_json(text)
    try:
        kinds = [cell["cell_type"] for cell in found["cells"]]
    except (KeyError, TypeError):
        raise UserError("not a Jupyter notebook of version 4 or later: it has no cells; check the file") from None
    sources = {("cells", number, "source") for number, kind in enumerate(kinds) if kind == "markdown"}
    return read_values(text, [_cell(text, start, end) for start, end, path in _json_values(text)
                              if len(path) == 3 and tuple(path) in sources])  # fmt: skip


def _cell(text: str, start: int, end: int) -> ValueSpan:
    raw = text[start:end]
    found = json.loads(raw)
    words = found if isinstance(found, str) else "".join(map(str, found))
    space = re.search(r"\n[ \t]*", raw)
    first, last = (space[0], raw[raw.rindex("\n") : -1]) if space is not None else ("", "")

    def encode(words: str) -> str:
        if isinstance(found, str):
            return json.dumps(words, ensure_ascii=False)
        lines = [json.dumps(line, ensure_ascii=False) for line in words.splitlines(keepends=True)]
        return f"[{first}{(',' + (first or ' ')).join(lines)}{last}]"

    return ValueSpan(start, end, words, encode, tuple(read_markdown(words).parts))


def _load_json(text: str) -> Any:
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except ValueError as error:
        raise UserError(f"not JSON: {error}; mend the file") from None
    except RecursionError:
        raise UserError("not read: too many JSON objects inside of each other; divide the file") from None


def _json_values(text: str) -> Iterator[tuple[int, int, Path]]:
    """Where each string and each list of a JSON file begins and ends, and what leads to it; in the order of their
    ends."""
    _load_json(text)
    path: Path = []
    begins: list[int] = []
    named = False  # whether the name of the next value is known
    for token in JSON_TOKEN.finditer(text):
        mark = token[0]
        if mark in "{[":
            path.append(0 if mark == "[" else "")
            begins.append(token.start())
            named = mark == "["
        elif mark in "}]":
            path.pop()
            start = begins.pop()
            if mark == "]":
                yield start, token.end(), [*path]
        elif mark == ",":
            last = path[-1]
            path[-1], named = (last + 1, True) if isinstance(last, int) else ("", False)
        elif mark != ":" and path and not named:
            path[-1], named = json.loads(mark), True
        elif mark != ":":
            yield token.start(), token.end(), [*path]


def read_yaml(text: str) -> Document:
    """The texts of a YAML file; names, numbers, dates, `yes` and `no` stay as they are. The name of its language is
    replaced if everything is under it, as in the files of Rails."""
    import yaml

    try:
        tokens = list(yaml.scan(text, Loader=yaml.SafeLoader))
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f"line {mark.line + 1}: "
        raise UserError(f"{where}not YAML: {getattr(error, 'problem', None) or error}; mend the file") from None
    resolver = yaml.resolver.Resolver()

    def is_text(words: str) -> bool:
        return bool(resolver.resolve(yaml.ScalarNode, words, (True, False)).endswith(":str"))

    own, values, is_name = OwnLanguage(), list[ValueSpan](), False
    tops = [n for n, token in enumerate(tokens) if isinstance(token, yaml.KeyToken) and token.start_mark.column == 0]
    for number, token in enumerate(tokens):
        if isinstance(token, yaml.KeyToken):
            is_name = True
        if not isinstance(token, yaml.ScalarToken):
            is_name = is_name and not isinstance(token, yaml.ValueToken)
            continue
        start, end, words = token.start_mark.index, token.end_mark.index, token.value
        encode = partial(_yaml_scalar, text[start:end], token.style, is_text)
        if is_name:
            nested = isinstance(tokens[min(number + 2, len(tokens) - 1)], yaml.BlockMappingStartToken)
            if tops == [number - 1] and nested and LOCALE.fullmatch(words) and iso_code(words) is not None:
                values.append(ValueSpan(start, end, words, encode, (own.part(words),)))
            is_name = False
        elif token.style or is_text(words):
            values.append(ValueSpan(start, end, words, encode))
    return read_values(text, values)


def _yaml_scalar(raw: str, style: str | None, is_text: Callable[[str], bool], text: str) -> str:
    """A text as it is written in the place of a scalar. `is_text`: it would be none without quotes, such as `no`."""
    if style in ("|", ">"):
        head, _, body = raw.partition("\n")
        indent = re.match(r"[ \t\r\n]*\n|", body)
        space = re.match(r" *", body[0 if indent is None else indent.end() :])
        between = "\n" + ("\n" if style == ">" else "") + ("" if space is None else space[0])
        return (
            f"{head}\n{between.lstrip(chr(10))}{between.join(text.rstrip().split(chr(10)))}{raw[len(raw.rstrip()) :]}"
        )
    if style == "'" and "\n" not in text:
        return "'" + text.replace("'", "''") + "'"
    if style is None and PLAIN.fullmatch(text) and is_text(text):
        return text
    return json.dumps(text, ensure_ascii=False)


PLAIN = re.compile(r"[^\W\d_](?:[^\n:#,\[\]{}&*!|>'\"%@`\\]|(?<=\S)['’](?=\S))*(?<! )")
PROPERTY = re.compile(
    r"^[ \t\f]*(?:[#!][^\r\n]*|(?:[^\\:=\s]|\\[^\r\n])++[ \t\f]*[:=]?[ \t\f]*"
    r"(?P<value>(?:[^\\\r\n]|\\(?:\r\n|[^\r]|\r))*+))",
    re.MULTILINE,
)
ESCAPE = re.compile(r"\\(?:[uU]([0-9A-Fa-f]{4})|\r?\n[ \t]*|(.)|$)", re.DOTALL)
LETTERS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
BACKWARDS = {"\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\f": "\\f"}


def _unescape(text: str) -> str:
    plain = ESCAPE.sub(lambda one: chr(int(one[1], 16)) if one[1] else LETTERS.get(one[2] or "", one[2] or ""), text)
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def read_properties(text: str) -> Document:
    """The values of a Java properties file. Letters that the file could not have are written as `\\u00e4`; where a
    value has `{0}`, an apostrophe is written twice, as `MessageFormat` reads it."""
    latin = all(ord(char) < 256 for char in text)
    least = 128 if text.isascii() else 256 if latin else 0x110000  # characters from here on are escaped

    def escape(char: str) -> str:
        if ord(char) < least:
            return BACKWARDS.get(char, char)
        pairs = char.encode("utf-16-be").hex()
        return "".join(f"\\u{pairs[n : n + 4]}" for n in range(0, len(pairs), 4))

    def value(found: re.Match[str]) -> ValueSpan:
        words = _unescape(found["value"])
        doubled = bool(re.search(r"\{\d", words)) and not re.search(r"(?<!')(?:'')*'(?!')", words)
        words = words.replace("''", "'") if doubled else words

        def encode(text: str) -> str:
            text = text.replace("'", "''") if doubled else text
            return ("\\" if text[:1] == " " else "") + "".join(map(escape, text))

        return ValueSpan(*found.span("value"), words, encode)

    return read_values(text, [value(found) for found in PROPERTY.finditer(text) if found["value"]])


STRING = re.compile(r"/\*.*?(?:\*/|\Z)|//[^\n]*|(?P<equals>=\s*)?(?P<string>\"(?:[^\"\\]|\\.)*+\")", re.DOTALL)


def read_strings(text: str) -> Document:
    """The values of a .strings file of Apple."""

    def encode(words: str) -> str:
        return '"' + "".join('\\"' if char == '"' else BACKWARDS.get(char, char) for char in words) + '"'

    found = [one for one in STRING.finditer(text) if one["equals"] is not None]
    if not found and text.removeprefix("\ufeff").strip():
        raise UserError('not .strings: no line has the form "name" = "value";')
    return read_values(text, [ValueSpan(*one.span("string"), _unescape(one["string"][1:-1]), encode) for one in found])
