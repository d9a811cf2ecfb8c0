"""One job on many machines: `--shard 2/8` does the second of eight parts of the input.

The lines of a file are cut into consecutive ranges: the outputs, `out.1-of-8.txt` to `out.8-of-8.txt`, joined in order
are the output of the whole job. The files of a folder are dealt out whole. Each output keeps its journal when it is
complete, so that any shard can be started again at any time, and shards of different jobs are not mixed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allyouneed.cli.text.resumable_output import partial_paths, setting_text
from allyouneed.data.files.lines import PACKED_SUFFIXES
from allyouneed.errors import UserError


@dataclass(frozen=True)
class Shard:
    """`index` counts from 1."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise UserError(f"--shard {text}: expected I/N with I from 1 to N, e.g. 2/8")
        return cls(int(found[1]), int(found[2]))

    def span(self, total: int) -> range:
        """The lines of this shard, out of `total`, counted from 0."""
        return range(total * (self.index - 1) // self.count, total * self.index // self.count)

    def output(self, path: Path) -> Path:
        """`out.2-of-8.txt` for `out.txt`; with leading zeros, so that names sort in order."""
        packed = path.suffix if path.suffix in PACKED_SUFFIXES else ""
        bare = path.with_suffix("") if packed else path
        number = f"{self.index:0{len(str(self.count))}}-of-{self.count}"
        return bare.with_name(f"{bare.stem}.{number}{bare.suffix}{packed}")

    def siblings(self, path: Path) -> Iterator[Path]:
        """The outputs of the other shards."""
        yield from (Shard(n, self.count).output(path) for n in range(1, self.count + 1) if n != self.index)


def check_siblings(shard: Shard, output: Path, settings: Mapping[str, Any]) -> None:
    """Refuse settings that differ from those of the other shards of the same output."""
    for other in shard.siblings(output):
        try:
            with partial_paths(other)[1].open("rb") as file:
                theirs = json.loads(file.readline())["settings"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not begun, or being written
        ignored = {"shard"}
        changed = {key for key in {*theirs, *settings} - ignored if theirs.get(key) != settings.get(key)}
        if changed:
            listed = ", ".join(f"{key} was {setting_text(key, theirs.get(key))}" for key in sorted(changed))
            raise UserError(f"{other}: this shard has other settings ({listed}); all shards need the same ones")


def files_below(folder: Path, suffixes: tuple[str, ...] = ()) -> list[Path]:
    """All files of a folder and its subfolders, in order of their names, without hidden ones."""
    found = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and (not suffixes or path.suffix.lower() in suffixes)
    ]
    if not found:
        kinds = f" ({', '.join(suffixes)})" if suffixes else ""
        raise UserError(f"{folder}: has no files{kinds}")
    return found
