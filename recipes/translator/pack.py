"""Training files as few, small archives, to be moved to another machine: half the size of gzip.

    python recipes/translator/pack.py pack FOLDER PATTERN … --output OUT [--most 55]     OUT/1/*, OUT/2/*, …
    python recipes/translator/pack.py unpack FOLDER IN … [--workers 16]

PPMd (`pip install pyppmd`) in pieces of 16 MB of text, so that many processes can unpack them; a folder of OUT holds at
most `--most` MB. Unpacked files are gzip at its fastest level, under their own names; a file is complete when all its
pieces are there, whichever folders of IN they came in.
"""

from __future__ import annotations

import argparse
import gzip
import lzma
import os
import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ORDER, MEMORY = 6, 256 << 20
PIECE = 16_000_000  # bytes of text


def compress(text: bytes) -> tuple[str, bytes]:
    """The suffix of a piece, and its content. PPMd's decoder refuses a few of the pieces that its encoder has written:
    these become xz."""
    import pyppmd

    encoder = pyppmd.Ppmd7Encoder(ORDER, MEMORY)
    packed = len(text).to_bytes(8, "little") + encoder.encode(text) + encoder.flush()
    try:
        right = decompress("ppmd", packed) == text
    except ValueError:
        right = False
    return ("ppmd", packed) if right else ("xz", lzma.compress(text))


def decompress(kind: str, packed: bytes) -> bytes:
    import pyppmd

    if kind == "xz":
        return lzma.decompress(packed)
    return pyppmd.Ppmd7Decoder(ORDER, MEMORY).decode(packed[8:], int.from_bytes(packed[:8], "little"))


def pack(folder: Path, patterns: list[str], output: Path, most: int, workers: int | None) -> None:
    names = sorted({path.name for pattern in patterns for path in folder.glob(pattern)})
    part, size = 1, 0
    with ProcessPoolExecutor(workers) as pool:
        for name in names:
            text = gzip.decompress((folder / name).read_bytes())
            cuts = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
            for number, (kind, packed) in enumerate(pool.map(compress, cuts)):
                if size + len(packed) > most * 1_000_000:
                    part, size = part + 1, 0
                size += len(packed)
                (output / str(part)).mkdir(parents=True, exist_ok=True)
                (output / str(part) / f"{name}.{number}-{len(cuts)}.{kind}").write_bytes(packed)
    print(f"{len(names)} files in {part} folders; the last has {size / 1e6:.0f} MB")


def unpack(folder: Path, given: Iterable[Path], workers: int | None) -> None:
    pieces: dict[str, dict[int, Path]] = {}
    totals: dict[str, int] = {}
    for path in (path for one in given for path in sorted(one.rglob("*.*-*.*"))):
        found = re.fullmatch(r"(.*)\.(\d+)-(\d+)\.(?:ppmd|xz)", path.name)
        if found is not None:
            pieces.setdefault(found[1], {})[int(found[2])] = path
            totals[found[1]] = int(found[3])
    complete = [name for name, found in pieces.items() if len(found) == totals[name]]
    missing = [name for name in complete if not (folder / name).is_file()]
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers or os.cpu_count()) as pool:
        waiting = {
            name: [pool.submit(_unpack_piece, pieces[name][n]) for n in sorted(pieces[name])] for name in missing
        }
        for name, results in waiting.items():
            work = folder / f".{name}"
            work.write_bytes(b"".join(one.result() for one in results))  # members of one gzip file
            work.rename(folder / name)
    print(f"{len(missing)} files unpacked; incomplete: {sorted(set(pieces) - set(complete))}")


def _unpack_piece(path: Path) -> bytes:
    return gzip.compress(decompress(path.suffix[1:], path.read_bytes()), 1, mtime=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int)
    commands = parser.add_subparsers(dest="command", required=True)
    into = commands.add_parser("pack")
    into.add_argument("folder", type=Path)
    into.add_argument("patterns", nargs="+")
    into.add_argument("--output", required=True, type=Path)
    into.add_argument("--most", type=int, default=55, help="MB of a folder")
    out = commands.add_parser("unpack")
    out.add_argument("folder", type=Path)
    out.add_argument("given", nargs="+", type=Path)
    given = parser.parse_args()
    if given.command == "pack":
        pack(given.folder, given.patterns, given.output, given.most, given.workers)
    else:
        unpack(given.folder, given.given, given.workers)


if __name__ == "__main__":
    main()
