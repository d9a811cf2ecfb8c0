"""Files of data made to take the memory, the time or the files of who reads them, and what comes of each.

tests/data/files/test_hostile_data.py runs this in a process of its own, whose memory and time are bounded.

`python hostile_data.py FOLDER`: prints one line of JSON for each file: its name, how it was read, its message.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import resource
import sqlite3
import struct
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

import data_fuzz
from allyouneed.config import parse
from allyouneed.data.files.formats import arrays
from allyouneed.data.files.readers import Files, Report
from allyouneed.data.media.image import Pixels
from allyouneed.data.media.sound_files import read_sound
from allyouneed.errors import UserError
from allyouneed.errors.extras import is_installed

MEMORY = 6 << 30  # of addresses: torch and arrow map more than half of it
BOMB = 80 << 20  # bytes
LINES = (b"x" * 1023 + b"\n") * 1024
Made = tuple[str, Callable[[Path], None], str]  # name of the file, how it is made, what its message says


def zeros(size: int = BOMB) -> Iterator[bytes]:
    for _ in range(size >> 20):
        yield bytes(1 << 20)


# --- images ---------------------------------------------------------------------------------------------------------


def png(width: int, height: int, rows: bytes) -> bytes:
    """A PNG of grey pixels, one bit each, whose content is `rows`, compressed."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def large_picture(path: Path) -> None:
    path.write_bytes(png(12_000, 12_000, zlib.compress(bytes(1501 * 12_000))))


def postscript(path: Path) -> None:
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(x) run\nshowpage\n")


# --- arrays ---------------------------------------------------------------------------------------------------------


def array_header(shape: str) -> bytes:
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def array_bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x.npy", "w") as member:
            member.write(array_header(f"({BOMB >> 10}, 32, 32)"))
            for part in zeros():
                member.write(part)
        archive.writestr("y.npy", data_fuzz.npy_bytes(np.zeros(BOMB >> 10, np.uint8)))


def overlapping(path: Path) -> None:
    content = np.zeros(1 << 20, np.uint8)
    path.write_bytes(data_fuzz.npz_bytes(jpeg=content, offsets=np.tile([0, 1 << 20], 50_000), label=np.zeros(99_999)))


def beyond(path: Path) -> None:
    path.write_bytes(data_fuzz.npz_bytes(jpeg=np.zeros(10, np.uint8), offsets=np.array([0, 5, 11]), label=np.zeros(2)))


def idx(content: bytes) -> Callable[[Path], None]:
    """An IDX file with labels beside it."""

    def make(path: Path) -> None:
        path.write_bytes(content)
        path.with_name(path.name.replace("idx3", "idx1")).write_bytes(b"\0\0\x08\1\0\0\0\1\0")

    return make


def idx_bomb(path: Path) -> None:
    with gzip.open(path, "wb", 1) as out:
        out.write(struct.pack(">HBB3I", 0, 8, 3, BOMB >> 10, 32, 32))
        for part in zeros():
            out.write(part)
    path.with_name(path.name.replace("images-idx3", "labels-idx1")).write_bytes(gzip.compress(b"\0\0\x08\1\0\0\0\1\0"))


# --- compressed files and archives ----------------------------------------------------------------------------------


def gzip_bomb(path: Path) -> None:
    with gzip.open(path, "wb") as out:
        for _ in range(BOMB >> 20):
            out.write(LINES)


def zstd_bomb(path: Path) -> None:
    with path.open("wb") as out, zstandard.ZstdCompressor().stream_writer(out) as packed:
        for _ in range(BOMB >> 20):
            packed.write(LINES)


def many_members(path: Path) -> None:
    """Each is too small to be a bomb."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for number in range(3):
            archive.writestr(f"{number}.tsv", b"\n" * (BOMB // 3))


def many_tar_members(path: Path) -> None:
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for number in range(3):
            info = tarfile.TarInfo(f"{number}.tsv")
            info.size = BOMB // 3
            tar.addfile(info, io.BytesIO(b"\n" * info.size))


def links(path: Path) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo(f"{kind.decode()}.tsv")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)


# --- spreadsheets ---------------------------------------------------------------------------------------------------


STRINGS = "application/vnd.openxmlformats-officedocument.spreadsheetml.sharedStrings+xml"


def changed_book(part: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    """A spreadsheet with one of its parts changed, or its shared strings added."""

    def make(path: Path) -> None:
        whole = zipfile.ZipFile(io.BytesIO(data_fuzz.xlsx_bytes()))
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in whole.namelist():
                text = whole.read(name).decode()
                archive.writestr(name, change(text) if name.endswith(part) else text)
            if part == "Types].xml":
                archive.writestr("xl/sharedStrings.xml", f"<sst>{'<si><t/></si>' * (BOMB // 13)}</sst>")

    return make


def laughs(text: str) -> str:
    """Ten entities, each ten times the one before."""
    named = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 11))
    declaration, _, rest = text.partition("?>") if text.startswith("<?xml") else ("", "", text)
    start = f"{declaration}?>" if declaration else ""
    return f'{start}<!DOCTYPE x [<!ENTITY e0 "ha">{named}]>{rest.replace("<t>", "<t>&e10;", 1)}'


def wide_rows(text: str) -> str:
    rows = "".join(f'<row r="{n}"><c r="XFD{n}"><v>{n}</v></c></row>' for n in range(6, 600))
    return text.replace("</sheetData>", f"{rows}</sheetData>")


def far_dimension(text: str) -> str:
    begin, end = text.index("<dimension"), text.index("/>", text.index("<dimension")) + 2
    return text[:begin] + '<dimension ref="A1:XFD1048576"/>' + text[end:]


def shared_strings(text: str) -> str:
    return text.replace("</Types>", f'<Override PartName="/xl/sharedStrings.xml" ContentType="{STRINGS}"/></Types>')


# --- databases ------------------------------------------------------------------------------------------------------


def database(*statements: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        with closing(sqlite3.connect(path)) as opened:
            for statement in statements:
                opened.execute(statement)
            opened.commit()

    return make


ENDLESS = "with recursive n(x) as (select 1 union all select x + 1 from n)"


# --- columns --------------------------------------------------------------------------------------------------------


def repeated_text(path: Path) -> None:
    """One long text, many times: a dictionary of one entry."""
    import pyarrow
    from pyarrow import parquet

    count = BOMB // 100_000
    rows = pyarrow.table({"text": ["x" * 100_000] * count, "label": ["a"] * count})
    parquet.write_table(rows, path, compression="zstd")


# --- lines, JSON and sounds -----------------------------------------------------------------------------------------


def lying_flac(path: Path) -> None:
    """2^36 samples, by its header."""
    content = bytearray(data_fuzz.sound_bytes("flac"))
    content[21] |= 0x0F
    content[22:26] = b"\xff" * 4
    path.write_bytes(content)


def silence(path: Path) -> None:
    """Hours of silence."""
    import soundfile

    with soundfile.SoundFile(path, "w", 655_350, 1, format="FLAC") as out:
        for _ in range(80):
            out.write(np.zeros(1 << 20, np.int16))


def lying_wav(path: Path) -> None:
    content = bytearray(data_fuzz.wav_bytes())
    content[40:44] = b"\xff" * 4
    path.write_bytes(content)


def text(content: str | bytes) -> Callable[[Path], None]:
    return lambda path: void(path.write_bytes(content.encode() if isinstance(content, str) else content))


def void(_: Any) -> None:
    pass


MADE: tuple[Made, ...] = (
    ("header.png", text(png(60_000, 60_000, zlib.compress(b""))), "exceeds limit of"),
    ("large.png", large_picture, "12,000 × 12,000 pixels; at most"),
    ("postscript.png", postscript, "not an image that Pillow can read"),
    ("pipe.png", lambda path: os.mkfifo(path), "a device, not an image file"),
    ("bomb.npz", array_bomb, "bytes that expand to"),
    ("overlapping.npz", overlapping, "not whole numbers in ascending order"),
    ("beyond.npz", beyond, "offsets from 0 to 11, but there are 10 values"),
    ("lying.npy", text(array_header("(1099511627776, 32, 32)")), "cannot be read"),
    ("huge.npy", text(array_header("(" + "9" * 5000 + ",)")), "cannot be read"),
    ("single.npz", text(data_fuzz.npz_bytes(x=np.uint8(5), y=np.uint8(1))), "a single value, expected an array"),
    ("single.npy", text(data_fuzz.npy_bytes(np.uint8(5))), "a single value, expected an array of rows"),
    ("lying-idx3-ubyte", idx(b"\0\0\x08\x03" + b"\xff" * 12), "bytes that expand to"),
    ("dimensions-idx3-ubyte", idx(b"\0\0\x08\xff" + b"\xff" * 1020), "not an IDX file of bytes"),
    ("bomb-images-idx3-ubyte.gz", idx_bomb, "bytes that expand to"),
    ("bomb.tsv.gz", gzip_bomb, "bytes that expand to"),
    ("bomb.tsv.zst", zstd_bomb, "bytes that expand to"),
    ("many.zip", many_members, "bytes that expand to"),
    ("many.tar.gz", many_tar_members, "bytes that expand to"),
    ("links.tar.gz", links, "there are no files in it"),
    ("laughs.xlsx", changed_book("sheet1.xml", laughs), "cannot be read as .xlsx"),
    ("wide.xlsx", changed_book("sheet1.xml", wide_rows), "rows of almost nothing but empty cells"),
    ("far.xlsx", changed_book("sheet1.xml", far_dimension), ""),
    ("shared.xlsx", changed_book("Types].xml", shared_strings), "bytes that expand to"),
    ("rows.db", database(f"create view v as {ENDLESS} select x as text, 'a' as label from n"), "more rows than bytes"),
    ("never.db", database(f"create view v as {ENDLESS} select max(x) as text from n"), "no row for too long"),
    ("cell.db", database("create view v as select zeroblob(500000000) as text, 1 as label"), "string or blob too big"),
    ("schema.db", database("create table t(text, label)", "pragma writable_schema = on",
                           "update sqlite_master set sql = 'create table t(' || hex(zeroblob(2000))"),
     "cannot be read as SQLite"),
    ("repeated.parquet", repeated_text, "bytes that expand to"),
    ("wide.parquet", text(b"PAR1" + struct.pack("<I", 1 << 31) + b"PAR1"), "its columns take more than"),
    ("samples.flac", lying_flac, ""),
    ("silence.flac", silence, "expand to hours of sound"),
    ("length.wav", lying_wav, ""),
    ("pipe.wav", lambda path: os.mkfifo(path), "a device, not a sound file"),
    ("deep.json", text("[" * 200_000), "nested too deeply"),
    ("endless.json", text('[{"text": "' + "x" * (40 << 20)), "an element of more than 16 MiB"),
    ("digits.json", text('[{"text": ' + "9" * 5_000 + ', "label": "a"}]'), "not JSON"),
    ("line.tsv", text("x" * (17 << 20)), "a line of more than 16 MiB"),
    ("columns.csv", text(",".join(f"c{n}" for n in range(1_000_000)) + "\n"), "1,000,000 columns; at most 10,000"),
)  # fmt: skip
NEEDS = {".png": "image", ".xlsx": "xlsx", ".parquet": "parquet", ".flac": "sound"}


def read(path: Path) -> str:
    """What was read, or the message."""
    try:
        if path.suffix in (".wav", ".flac"):
            return f"read {len(read_sound(path))} samples"
        if path.suffix == ".png":
            return f"read {Pixels(size=(4, 4)).read(path).shape}"
        if path.suffix == ".npy":
            return f"read {arrays.read_npy(path, mapped=True).shape}"
        kind = "images" if path.suffix == ".npz" or "ubyte" in path.name else "labelled"
        part, report = Files.find(kind), Report()
        assert part is not None
        found = list(parse(part, {"path": str(path)}).read(report))
        return f"read {len(found)} of {report.read}"
    except UserError as error:
        return str(error)


def main(folder: Path) -> None:
    needed = {name: NEEDS.get(Path(name).suffix) for name, _, _ in MADE}
    made = [one for one in MADE if (extra := needed[one[0]]) is None or is_installed(extra)]
    for name, make, _ in made:
        make(folder / name)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for name, _, _ in made:
        print(json.dumps([name, read(folder / name)]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
