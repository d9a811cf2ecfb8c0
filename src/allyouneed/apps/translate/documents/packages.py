"""Documents that are zip packages: Word, PowerPoint, Excel, OpenDocument, EPUB. Members without a translated passage
are copied as they are, packed; macros and pictures are never opened."""

from __future__ import annotations

import io
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import unescape as html_unescape
from typing import NamedTuple

from allyouneed.apps.translate.documents.html import read_html_parts
from allyouneed.apps.translate.documents.parts import (
    Builder,
    Document,
    Embedded,
    OwnLanguage,
    Part,
    free_symbols,
)
from allyouneed.apps.translate.documents.tokens import tokens
from allyouneed.apps.translate.documents.walker import OFFICE, OPEN, Elements, Vocabulary, Walker
from allyouneed.apps.translate.documents.xml import encode
from allyouneed.errors import UserError

MOST_MEMBERS = 20_000
MOST_TEXT = 32 << 20  # bytes of all members that are read, unpacked
MOST_EXPANDED, SMALL = 200, 4 << 20  # times the packed size of a member that is larger than this
HEADER = 30  # bytes before the name of a member
OLD = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # a compound file of Microsoft
LANGUAGE = re.compile(r'(?:\bw:lang\s[^>]*?\bw:(?:val|eastAsia)|\blang)="([^"]*)"')


class Member(NamedTuple):
    """`name`: a pattern of the names of members; `read`: of their text."""

    name: str
    read: Callable[[str, PackageReading], list[Part]]


@dataclass
class PackageReading:
    """What the members of one document share: its own language, and paragraphs that stay as they are."""

    language: OwnLanguage = field(default_factory=OwnLanguage)
    kept: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Package(Document):
    """`source`: the file; `members`: the parts of those that were read, and their encodings."""

    source: bytes = b""
    members: dict[str, tuple[Embedded, str]] = field(default_factory=dict)

    def write(self, texts: Sequence[str], to: str | None = None) -> str:
        """The passages, one a line, without markup."""
        return "\n".join(
            "".join(piece for piece in unit.pieces(text) if piece not in unit.marks)
            for unit, text in zip(self.units, texts, strict=True)
        )

    def data(self, texts: Sequence[str], to: str | None = None) -> bytes:
        answers = self.answers(texts, to)
        changed: dict[str, bytes] = {}
        for name, (member, encoding) in self.members.items():
            if (text := member.written(answers)) != member.source:
                changed[name] = text.encode(encoding, "xmlcharrefreplace")
        return _packed(self.source, changed) if changed else self.source


def read_package(data: bytes, kind: str, members: Sequence[Member]) -> Package:
    with _opened(data, kind) as packed:
        reading, found = PackageReading(), dict[str, tuple[Embedded, str]]()
        size = 0
        reading.kept = _column_names(packed) if kind == "xlsx" else frozenset()
        for info in packed.infolist():
            chosen = next((one for one in members if re.fullmatch(one.name, info.filename)), None)
            if chosen is None or info.filename in found:
                continue
            size += _check_size(info)
            if size > MOST_TEXT:
                raise UserError(f"more than {MOST_TEXT >> 20} MB of text; divide the document")
            try:
                text, encoding = decode_xml(_content(packed, info))
                parts = chosen.read(text, reading)
            except UserError as error:
                raise UserError(f"{info.filename}: {error}") from None
            found[info.filename] = Embedded(tuple(parts), text), encoding
    if not found:
        raise UserError(f"not .{kind}: it has none of the parts of one; check the suffix")
    order = sorted(found, key=_by_numbers)
    return Package([found[name][0] for name in order], source=data, members=found)


def _by_numbers(name: str) -> tuple[str | int, ...]:
    """slide2 before slide10."""
    return tuple(int(part) if number % 2 else part for number, part in enumerate(re.split(r"(\d+)", name)))


def decode_xml(data: bytes) -> tuple[str, str]:
    """The text of an XML file, and its encoding, by its byte order mark or its declaration."""
    marks = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
    declared = re.match(rb"""<\?xml[^>]*?encoding=["']([\w.:-]{1,40})["']""", data)
    encoding = marks.get(data[:2]) or (declared[1].decode() if declared is not None else "utf-8")
    try:
        return data.decode(encoding), encoding
    except UnicodeDecodeError as error:
        raise UserError(f"not {encoding} (byte {error.start}); save it again") from None
    except LookupError:
        raise UserError(f"unknown encoding {encoding!r}; save it as UTF-8") from None


class _opened:
    """A zip file that is a document; whatever is wrong with it is one message."""

    def __init__(self, data: bytes, kind: str) -> None:
        self.data, self.kind = data, kind

    def __enter__(self) -> zipfile.ZipFile:
        if self.data.startswith(OLD):
            raise UserError(
                f"encrypted, or of an old Office: open it with its password and save it as .{self.kind} without one"
            )
        try:
            self.zip = zipfile.ZipFile(io.BytesIO(self.data))
            if len(self.zip.infolist()) > MOST_MEMBERS:
                raise UserError(f"more than {MOST_MEMBERS:,} files in one document are not read")
            for name in ("META-INF/manifest.xml", "META-INF/encryption.xml"):
                if name in self.zip.NameToInfo:
                    info = self.zip.getinfo(name)
                    _check_size(info)
                    if _is_encrypted(_content(self.zip, info)):
                        raise UserError("encrypted; save it without a password")
        except (zipfile.BadZipFile, ValueError, OSError, EOFError, struct.error) as error:
            raise UserError(f"not .{self.kind}: {error or 'broken'}; save it again") from None
        return self.zip

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self.zip.close()


def _is_encrypted(content: bytes) -> bool:
    """Whether more is encrypted than fonts, which are only scrambled."""
    found = content.count(b"encryption-data>") + len(re.findall(rb"<(?:\w+:)?EncryptedData\b", content))
    fonts = len(re.findall(rb'Algorithm="http://(?:www\.idpf\.org/2008/embedding|ns\.adobe\.com/pdf/enc#RC)', content))
    return found > fonts


def _check_size(info: zipfile.ZipInfo) -> int:
    if info.file_size > max(SMALL, MOST_EXPANDED * info.compress_size):
        raise UserError(
            f"{info.filename}: {info.compress_size:,} bytes that expand to {info.file_size:,} are not read; if you "
            "trust the document, open it and save it again"
        )
    return info.file_size


def _content(packed: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    try:
        with packed.open(info) as file:
            return file.read(info.file_size + 1)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError, ValueError) as error:
        raise UserError(f"{info.filename}: cannot be read ({error}); save the document again") from None


def _packed(source: bytes, changed: dict[str, bytes]) -> bytes:
    """The zip file with other contents of some members; the bytes of all others are copied."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(source)) as old, zipfile.ZipFile(written, "w") as new:
        new.comment = old.comment
        for info in old.infolist():
            if info.filename in changed:
                new.writestr(info, changed[info.filename])
                continue
            begin = info.header_offset
            name, extra = (int.from_bytes(source[begin + at : begin + at + 2], "little") for at in (26, 28))
            begin += HEADER + name + extra
            info.header_offset, info.flag_bits = written.tell(), info.flag_bits & ~8  # sizes are before the content
            written.write(info.FileHeader())
            written.write(source[begin : begin + info.compress_size])
            new.filelist.append(info)
            new.NameToInfo[info.filename] = info
            new.start_dir = written.tell()
            new._didModify = True  # type: ignore[attr-defined]
    return written.getvalue()


def _walk(vocabulary: Vocabulary, text: str, reading: PackageReading) -> list[Part]:
    return Walker(text, vocabulary, reading.kept).read()


def _languages(text: str, reading: PackageReading) -> list[Part]:
    """The languages that a sheet of styles names."""
    parts: list[Part] = []
    at = 0
    for found in LANGUAGE.finditer(text):
        parts += [text[at : found.start(1)], reading.language.part(found[1], encode)]
        at = found.end(1)
    return [*parts, text[at:]]


def _column_names(packed: zipfile.ZipFile) -> frozenset[str]:
    """The columns of tables: formulas name them, and their cells must have the same text."""
    found: set[str] = set()
    for info in packed.infolist():
        if re.fullmatch(r"xl/tables/[^/]+\.xml", info.filename):
            _check_size(info)
            elements = Elements(decode_xml(_content(packed, info))[0])
            found |= {elements.attribute(one, "name") for name in ("tablecolumn", "x:tablecolumn")
                      for one in elements.all(name)}  # fmt: skip
    return frozenset(found)


def _page(text: str, reading: PackageReading) -> list[Part]:
    return read_html_parts(text, free_symbols(text), reading.language, xml=True)


def _contents(words: frozenset[str], text: str, reading: PackageReading) -> list[Part]:
    """The texts of these elements, and the language of the book."""
    builder, name = Builder(free_symbols(text), encode), ""
    for token in tokens(text, xml=True):
        if token.kind == "start":
            name = token.name
        if token.kind == "text" and name in words:
            builder.text(token.raw, html_unescape(token.raw))
        elif token.kind == "text" and name == "dc:language":
            builder.skip(reading.language.part(token.raw, encode))
        else:
            builder.skip(token.raw)
        if token.kind == "end":
            name = ""
    builder.end()
    return builder.parts


OFFICE_MEMBERS = {
    "docx": r"word/(?:document|header|footer|footnotes|endnotes|comments)\d*\.xml|word/(?:charts|diagrams)/[^/]+\.xml",
    "pptx": r"ppt/(?:slides|notesSlides|charts|diagrams)/[^/]+\.xml",
    "xlsx": r"xl/sharedStrings\.xml|xl/comments\d*\.xml|xl/(?:worksheets|comments|drawings|charts|diagrams)/[^/]+\.xml",
}


def read_docx(data: bytes) -> Document:
    return _read_office(data, "docx")


def read_pptx(data: bytes) -> Document:
    return _read_office(data, "pptx")


def read_xlsx(data: bytes) -> Document:
    """Formulas, numbers, dates, the names of sheets, and of the columns of tables, stay as they are."""
    return _read_office(data, "xlsx")


def _read_office(data: bytes, kind: str) -> Document:
    words = Member(OFFICE_MEMBERS[kind], partial(_walk, OFFICE))
    return read_package(data, kind, [words, Member(r"word/styles\.xml|ppt/presentation\.xml", _languages)])


def read_odf(data: bytes) -> Document:
    return read_package(data, "odt", [Member(r"(?:[^/]+/)?(?:content|styles)\.xml", partial(_walk, OPEN))])


def read_epub(data: bytes) -> Document:
    words = frozenset(("dc:title", "dc:description"))
    return read_package(
        data,
        "epub",
        [
            Member(r".*\.opf", partial(_contents, words)),
            Member(r".*\.ncx", partial(_contents, frozenset(("text",)))),
            Member(r".*\.x?html?", _page),
        ],
    )
