"""Training files as small archives, to be moved to another machine: two thirds of the size of gzip.

    python recipes/translator/pack.py pack FOLDER OUT [--most 48]       OUT/1/*.bz2, OUT/2/*.bz2, …
    python recipes/translator/pack.py unpack OUT/1 FOLDER
    python recipes/translator/pack.py sample FOLDER OUT         the first 400 lines of every file, and back-translations

Every *.tsv.gz and *.mono.txt.gz of the folder becomes bzip2, which checks itself, monolingual text first; a folder of
OUT holds at most `--most` MB. Unpacked files are gzip again, at its fastest level.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


def compress(path: Path) -> bytes:
    return bz2.compress(gzip.decompress(path.read_bytes()))


def pack(folder: Path, output: Path, most: int, workers: int | None) -> None:
    files = [*sorted(folder.glob("*.mono.txt.gz")), *sorted(folder.glob("*.tsv.gz"))]
    sizes: list[int] = []  # of the folders
    with ProcessPoolExecutor(workers) as pool:
        for path, packed in zip(files, pool.map(compress, files), strict=True):
            fits = (n for n, size in enumerate(sizes) if size + len(packed) <= most * 1_000_000)
            part = next(fits, len(sizes))
            sizes += [0] * (part == len(sizes))
            sizes[part] += len(packed)
            into = output / str(part + 1)
            into.mkdir(parents=True, exist_ok=True)
            (into / f"{path.name.removesuffix('.gz')}.bz2").write_bytes(packed)
    print(f"{len(files)} files: " + ", ".join(f"{size / 1e6:.0f} MB" for size in sizes))


def unpack_file(path: Path, folder: Path) -> None:
    text = bz2.decompress(path.read_bytes())
    work = folder / f".{path.stem}"
    work.write_bytes(gzip.compress(text, 1, mtime=0))
    work.rename(folder / f"{path.stem}.gz")


def unpack(given: Path, folder: Path, workers: int | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(given.glob("*.bz2"))
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(unpack_file, files, [folder] * len(files)))
    print(f"{len(files)} files unpacked")


def sample(folder: Path, output: Path, lines: int = 400) -> None:
    """Enough of the training files to compile the model by; the pairs of the words stand for back-translations."""
    for path in folder.glob("*.tsv.gz"):
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
            text = "".join(line for _, line in zip(range(lines), file, strict=False))
        (output / path.name).write_bytes(gzip.compress(text.encode(), 1, mtime=0))
        if path.name.endswith(".words.tsv.gz"):
            back = output / path.name.replace(".words.tsv.gz", ".back")
            back.mkdir(exist_ok=True)
            (back / "0.tsv.gz").write_bytes((output / path.name).read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("pack", "unpack", "sample"))
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--most", type=int, default=48, help="MB of a folder")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    given = parser.parse_args()
    if given.command == "pack":
        pack(given.source, given.output, given.most, given.workers)
    elif given.command == "sample":
        sample(given.source, given.output)
    else:
        unpack(given.source, given.output, given.workers)


if __name__ == "__main__":
    main()
