"""Mutated files for every reader of data: each kind of `Files` × each format of files, and every kind of media.

Kinds and formats come from their registries, so that a new one joins by existing. tests/data/files/test_data_fuzz.py
runs this in a process of its own, whose memory is bounded.

`python data_fuzz.py FOLDER COUNT SEED`: that many mutants, the same every time; it ends with what came out of them, and
fails where that was neither examples with a report nor one message.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import resource
import sqlite3
import struct
import sys
import tarfile
import time
import traceback
import warnings
import wave
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from allyouneed.config import parse
from allyouneed.data.files.formats import archives
from allyouneed.data.files.formats.encodings import USUAL
from allyouneed.data.files.lines import PACKED_SUFFIXES
from allyouneed.data.files.readers import LINE_SUFFIXES, TABLE_SUFFIXES, Files, Report
from allyouneed.data.media.image import Pixels
from allyouneed.data.media.sound_files import read_samples, read_sound
from allyouneed.errors import UserError
from allyouneed.errors.extras import is_installed

MEMORY = 6 << 30  # of addresses: torch and arrow map more than half of it
SLOW = 20  # seconds for one mutant
RESULTS = ("read", "nothing", "refused")
LONGEST = 1000  # characters of a message
WORDS = ["the", "cat", "sees", "a", "small", "bird", "很有趣", "été"]
ENCODED = (".csv", ".tsv", ".jsonl", ".txt", ".json")  # read in other encodings now and then

# one row with all columns that any kind of files reads; a kind takes its own
CELLS: dict[str, Any] = {
    "text": "the „small“ cat", "label": "HUM", "source": "很有趣", "target": "very\nfunny", "first": "a", "second": "b",
    "score": 2.5, "prompt": "hi", "chosen": "good", "rejected": "bad", "question": "who?", "context": "the cat sees",
    "file_name": "a.png", "user": "7", "item": "x", "items": "y z", "time": 3, "click": 1,
}  # fmt: skip
LISTS: dict[str, Any] = {
    "tokens": ["the", "cat"],
    "tags": ["B-X", "O"],
    "answers": {"text": ["the cat"], "answer_start": [0]},
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "good"}],
}
ALONE = {"interleaved": [{"pieces": ["the cat", "sees"], "answer": "a bird"}]}  # kinds that refuse other columns
ROWS = 4
INFO = "dataset/dataset_info.json"  # what the columns of a dataset of Hugging Face are
DATASET = json.dumps({"features": {"label": {"names": ["HUM", "ENTY"], "_type": "ClassLabel"}}}).encode()


def cells() -> list[dict[str, Any]]:
    """Rows of texts and numbers, all different."""
    return [
        {k: f"{v} {WORDS[n]}" if isinstance(v, str) and k != "label" else v for k, v in CELLS.items()}
        for n in range(ROWS)
    ]


def objects() -> list[dict[str, Any]]:
    """The same with lists and objects."""
    return [row | LISTS for row in cells()]


# --- a file of every format -----------------------------------------------------------------------------------------


def csv_bytes(separator: str) -> bytes:
    def line(values: Iterable[Any]) -> str:
        written = (str(value).replace("\n", " ") if separator == "\t" else f'"{value}"' for value in values)
        return separator.join(written) + "\n"

    return (line(CELLS) + "".join(line(row.values()) for row in cells())).encode()


def xlsx_bytes() -> bytes:
    from openpyxl import Workbook

    book, out = Workbook(), io.BytesIO()
    for row in [list(CELLS), *(list(row.values()) for row in cells())]:
        book.active.append(row)
    book.save(out)
    return out.getvalue()


def arrow_bytes(write: Callable[[Any, io.BytesIO], None]) -> bytes:
    import pyarrow

    out = io.BytesIO()
    write(pyarrow.Table.from_pylist(objects()), out)
    return out.getvalue()


def parquet(table: Any, out: io.BytesIO) -> None:
    from pyarrow import parquet

    parquet.write_table(table, out, row_group_size=2)


def stream(table: Any, out: io.BytesIO) -> None:
    import pyarrow

    with pyarrow.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def feather(table: Any, out: io.BytesIO) -> None:
    import pyarrow

    with pyarrow.ipc.new_file(out, table.schema, options=pyarrow.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table)


def database_bytes() -> bytes:
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute(f"create table rows ({', '.join(f'{name} text' for name in CELLS)})")
        holes = ", ".join("?" * len(CELLS))
        database.executemany(f"insert into rows values ({holes})", [list(row.values()) for row in cells()])
        database.commit()
        return database.serialize()


def lines_bytes() -> bytes:
    return "\n\n".join(" ".join(WORDS[n:] + WORDS[:n]) for n in range(ROWS)).encode()


WRITERS: dict[str, Callable[[], bytes]] = {
    ".csv": lambda: csv_bytes(","),
    ".tsv": lambda: csv_bytes("\t"),
    ".txt": lines_bytes,
    "": lines_bytes,
    ".json": lambda: json.dumps(objects()).encode(),
    ".jsonl": lambda: "".join(json.dumps(row) + "\n" for row in objects()).encode(),
    ".ndjson": lambda: "".join(json.dumps(row) + "\n" for row in objects()).encode(),
    ".conll": lambda: b"the\tO\ncat\tB-X\n\na\tO\nbird\tB-X\n",
    ".bio": lambda: b"the O\ncat B-X\n\na O\nbird B-X\n",
    ".iob": lambda: b"the O\ncat B-X\n\n",
    ".md": lines_bytes,
    ".xlsx": xlsx_bytes,
    ".parquet": lambda: arrow_bytes(parquet),
    ".arrow": lambda: arrow_bytes(stream),
    ".feather": lambda: arrow_bytes(feather),
    ".db": database_bytes,
    ".sqlite": database_bytes,
    ".sqlite3": database_bytes,
}
OPTIONAL = {".xlsx": "xlsx", ".parquet": "parquet", ".arrow": "parquet", ".feather": "parquet"}


def packed(suffix: str, content: bytes, name: str) -> bytes:
    """An archive of one file, or the compressed file."""
    if suffix == ".gz":
        return gzip.compress(content, mtime=0)
    if suffix == ".zst":
        return zstandard.ZstdCompressor().compress(content)
    out = io.BytesIO()
    if suffix == ".zip":
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, content)
        return out.getvalue()
    mode: Any = "w:" + {".tar": "", ".tgz": "gz"}.get(suffix, suffix.rsplit(".", 1)[-1])
    with tarfile.open(fileobj=out, mode=mode) as tar:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def formats() -> dict[str, bytes]:
    """A file of every format that a registry names, plain, compressed and in every kind of archive."""
    known = [*TABLE_SUFFIXES, *LINE_SUFFIXES, *WRITERS]
    missing = set(known) - set(WRITERS)
    assert not missing, f"formats without a file to mutate: add {missing} to WRITERS"
    there = [suffix for suffix in WRITERS if suffix not in OPTIONAL or is_installed(OPTIONAL[suffix])]
    plain = {f"a{suffix}": WRITERS[suffix]() for suffix in there}
    rows = plain["a.jsonl"]
    own = {
        f"{kind}.jsonl": "".join(json.dumps(row) + "\n" for row in listed).encode() for kind, listed in ALONE.items()
    }
    return (
        plain
        | own
        | {f"a.jsonl{suffix}": packed(suffix, rows, "a.jsonl") for suffix in PACKED_SUFFIXES}
        | {f"b{suffix}": packed(suffix, rows, "a.jsonl") for suffix in archives.SUFFIXES}
    )


# --- images and sounds ----------------------------------------------------------------------------------------------

PIXELS = np.arange(6 * 8 * 8 * 3, dtype=np.uint64).astype(np.uint8).reshape(6, 8, 8, 3)
IMAGE_FORMATS = ("png", "jpeg", "webp", "bmp", "gif", "tiff", "ppm")
LABELS = np.array(list("abcabc"))


def image_bytes(kind: str, number: int = 0) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(PIXELS[number]).save(out, kind)
    return out.getvalue()


def npz_bytes(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def joined_images() -> bytes:
    parts = [image_bytes("png", number) for number in range(6)]
    offsets = np.cumsum([0, *map(len, parts)])
    return npz_bytes(jpeg=np.frombuffer(b"".join(parts), np.uint8), offsets=offsets, label=LABELS)


def npy_bytes(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def idx_bytes(array: Any) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def picture_table() -> bytes:
    import pyarrow

    out = io.BytesIO()
    rows = [{"image": {"bytes": image_bytes("png", n), "path": None}, "label": str(n % 2)} for n in range(4)]
    parquet(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


def wav_bytes() -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as sound:
        sound.setnchannels(2)
        sound.setsampwidth(2)
        sound.setframerate(8_000)
        sound.writeframes((np.arange(800) % 97 * 100).astype("<i2").tobytes())
    return out.getvalue()


def sound_bytes(kind: str) -> bytes:
    import soundfile

    out = io.BytesIO()
    soundfile.write(out, np.sin(np.arange(4_000) / 9), 8_000, format=kind)
    return out.getvalue()


def media() -> dict[str, bytes]:
    """Files of images and sounds; those of a name with `labels` belong to the one before."""
    found = {
        "pixels.npz": npz_bytes(x=PIXELS, y=LABELS),
        "joined.npz": joined_images(),
        "images.npy": npy_bytes(PIXELS),
        "train-images-idx3-ubyte": idx_bytes(PIXELS[..., 0]),
        "train-images-idx3-ubyte.gz": gzip.compress(idx_bytes(PIXELS[..., 0]), mtime=0),
        "sound.wav": wav_bytes(),
        "joined-sounds.npz": npz_bytes(
            audio=np.arange(900, dtype=np.int16), offsets=[0, 300, 900], label=[0, 1], rate=8000
        ),
    }
    found |= {f"folder/{kind}.{kind}": image_bytes(kind) for kind in IMAGE_FORMATS}
    if is_installed("parquet"):
        found["pictures.parquet"] = picture_table()
    if is_installed("sound"):
        found |= {f"sound.{kind}": sound_bytes(kind) for kind in ("flac", "ogg", "aiff", "mp3")}
    return found


def beside() -> dict[str, bytes]:
    """Files that stay whole, beside the mutated ones."""
    labels = np.arange(6, dtype=np.uint8) % 3
    idx = idx_bytes(labels)
    names = {"train-labels-idx1-ubyte": idx, "train-labels-idx1-ubyte.gz": gzip.compress(idx, mtime=0)}
    if is_installed("parquet"):
        names["dataset/data.arrow"] = arrow_bytes(stream)
    return names | {"labels.npy": npy_bytes(LABELS)}


# --- mutants --------------------------------------------------------------------------------------------------------


def mutate(content: bytes, dice: random.Random) -> bytes:
    """Cut, flip, repeat, insert, overwrite or leave out: what transfers, editors and people do to files."""
    damaged = bytearray(content)
    for _ in range(dice.randint(1, 4)):
        at, length = dice.randrange(len(damaged) + 1), dice.randint(1, 64)
        at = dice.choice([at, min(at, 64), max(0, len(damaged) - at % 64)])  # headers and footers more often
        how = dice.randrange(7)
        if how == 0:
            del damaged[at:]
        elif how == 1 and damaged:
            damaged[at % len(damaged)] ^= 1 << dice.randrange(8)
        elif how == 2:
            damaged[at:at] = damaged[at : at + length]
        elif how == 3:
            damaged[at:at] = dice.randbytes(length)
        elif how == 4:
            damaged[at : at + 4] = dice.choice([b"\xff" * 4, b"\0" * 4, struct.pack("<i", dice.randrange(1 << 31))])
        elif how == 5:
            damaged[at : at + 8] = struct.pack(dice.choice("<>") + "q", dice.choice([-1, 1 << 31, 1 << 40, 1 << 62]))
        else:
            del damaged[at : at + length]
    return bytes(damaged)


# what decodes the contents of files of these examples
DECODERS: dict[str, Callable[[Any], Any]] = {"image": Pixels(size=(4, 4)).read, "sound": read_samples}


def read_data(kind: type[Files], path: Path, encoding: str | None) -> str:
    """Read all examples of a file, and all images of them."""
    report = Report()
    keys = {"encoding": encoding} if encoding else {}
    found = list(parse(kind, {"path": str(path), **keys}).read(report))
    if report.kept != len(found):
        return f"{report.kept} kept, but {len(found)} examples"
    for example in found:
        if any(text.encode("utf-8", "replace").decode() != text for text in example.texts):
            return "a text that is not Unicode"
        for noun, decoder in DECODERS.items():
            if noun in kind.examples:
                decode(decoder, example.image if hasattr(example, "image") else example.content)
    return "read" if found else "nothing"


def decode(read: Callable[[Any], Any], medium: Any) -> None:
    """An image that cannot be read is dropped by its row."""
    try:
        read(medium)
    except UserError as error:
        check_message(error)


def check_message(error: UserError) -> None:
    text = str(error)
    assert len(text.strip().splitlines()) == 1 and len(text) <= LONGEST, (
        f"a message of {len(text)} characters: {text[:300]}"
    )


def outcome(read: Callable[[], str], path: Path) -> str:
    began = time.monotonic()
    try:
        result = read()
    except UserError as error:
        try:
            check_message(error)
            result = "refused" if path.name in str(error) else f"does not name the file: {error}"
        except AssertionError as wrong:
            result = str(wrong)
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        result = f"{type(error).__name__} in {Path(at.filename).name}:{at.lineno}: {str(error)[:200]}"
    seconds = time.monotonic() - began
    return result if seconds < SLOW else f"{result} after {seconds:.0f} s"


def subjects(folder: Path) -> list[tuple[str, bytes, Callable[[Path, random.Random], str]]]:
    """Every kind of files with every format that it reads, and every kind of media: name, content and reader."""

    def data(kind: type[Files]) -> Callable[[Path, random.Random], str]:
        def read(path: Path, dice: random.Random) -> str:
            encoding = dice.choice([None, None, *USUAL]) if path.suffix in ENCODED else None
            return outcome(lambda: read_data(kind, path, encoding), path)

        return read

    def sound(path: Path, dice: random.Random) -> str:
        longest = dice.choice([None, 30.0])
        return outcome(lambda: "read" if len(read_sound(path, longest=longest)) else "nothing", path)

    def image(path: Path, dice: random.Random) -> str:
        return outcome(lambda: "read" if len(Pixels(size=(4, 4)).read(path)) else "", path)

    found = []
    files = formats() | media()
    for name, content in (files | beside() | {INFO: DATASET}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    for kind, part in Files.known().items():
        outcomes = {name: data(part)(folder / name, random.Random(1)) for name in files}
        wrong = {name: result for name, result in outcomes.items() if result not in RESULTS}
        assert not wrong, f"{kind}: {wrong}"
        readable = [name for name, result in outcomes.items() if result == "read"]
        assert readable, f"nothing to read for files of kind {kind}: add its columns to CELLS or LISTS"
        found += [(name, files[name], data(part)) for name in readable if name.partition("/")[0] != "folder"]
    found += [(name, content, sound) for name, content in files.items() if name.startswith("sound.")]
    if is_installed("parquet"):
        found.append((INFO, DATASET, lambda path, dice: data(Files.known()["labelled"])(path.parent, dice)))
    return found + [(name, content, image) for name, content in files.items() if name.startswith("folder/")]


def main(folder: Path, count: int, seed: int) -> None:
    warnings.filterwarnings("ignore")
    known = subjects(folder)
    print(len(known), "subjects", flush=True)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    total: Counter[str] = Counter()
    dice = random.Random(seed)
    order = (
        [known[number % len(known)] for number in range(count)] if count >= len(known) else dice.sample(known, count)
    )
    for number, (name, content, read) in enumerate(order):
        chance = random.Random(f"{seed} {number}")
        path = folder / name
        path.write_bytes(mutate(content, chance))
        (folder / "now").write_text(f"{name}, mutant {number}")  # should the process end here
        result = read(path, chance)
        if result not in RESULTS:
            print(f"{name}, mutant {number} of seed {seed}: {result}", flush=True)
            result = "wrong"
        total[result] += 1
        path.write_bytes(content)
    print(dict(total))
    sys.exit(bool(total["wrong"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
