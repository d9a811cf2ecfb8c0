"""Texts and their vectors, saved in the folder of the model that embedded them: what `search` finds.

`index/` in a model folder: `vectors.f32` and `rows.jsonl`, a vector and a line for each text, `ends.i64`, where the
lines end, and `meta.json`, which says how many of them count. Texts are only ever appended, and count when `meta.json`
is replaced, so that an interrupted run leaves what it had finished.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from allyouneed.data.retrieval.nearest import nearest
from allyouneed.errors import UserError
from allyouneed.files import sha256, sync, write_text
from allyouneed.files.reading import parse_json, read_bytes
from allyouneed.interop.load import weight_files

if TYPE_CHECKING:
    from torch import Tensor

    from allyouneed.folder import Folder

INDEX, META, VECTORS, ROWS, ENDS = "index", "meta.json", "vectors.f32", "rows.jsonl", "ends.i64"
FORMAT = 1
TOGETHER = 2048  # texts embedded, and counted, at a time

Row = tuple[str, Mapping[str, Any]]  # a text, and the other columns of its row
Embed = Callable[[list[str]], "Tensor"]


@dataclass(frozen=True)
class FoundText:
    """A text that was found: its number in the index, the other columns of its row, and its cosine similarity with the
    query, or its probability of being relevant if a cross-encoder has ranked it."""

    index: int
    text: str
    score: float
    columns: dict[str, Any] = field(default_factory=dict)


def fingerprint(folder: Folder) -> str:
    """What is the same for two folders of one model."""
    if folder.path is None:
        raise UserError("the model has not been saved; save it first")
    ours = folder.path / "config.json"  # of ours, it has the checksums of all files
    files = weight_files(folder.path) if folder.origin or not ours.is_file() else [ours]
    return hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()


class TextIndex:
    """The index in a model folder. `models`: the fingerprints of its model, here and where it came from."""

    def __init__(self, folder: Path, width: int, models: Sequence[str], count: int = 0) -> None:
        self.folder, self.width, self.models, self.count = folder / INDEX, width, list(models), count

    @classmethod
    def is_in(cls, folder: Path | None) -> bool:
        return folder is not None and (folder / INDEX / META).is_file()

    @classmethod
    def open(cls, model: Folder) -> TextIndex:
        path = model.path
        if path is None or not cls.is_in(path):
            raise UserError(
                f"{path or 'the model'}: has no index; make one with `allyouneed index FILE --model {path or 'FOLDER'} "
                "--output NEW`, and search in NEW"
            )
        try:
            meta = parse_json(read_bytes(path / INDEX, META))
            found = cls(path, int(meta["width"]), [str(one) for one in meta["models"]], int(meta["count"]))
            sizes = {VECTORS: 4 * found.width * found.count, ENDS: 8 * found.count}
            short = [name for name, size in sizes.items() if (found.folder / name).stat().st_size < size]
            short += [] if (found.folder / ROWS).stat().st_size >= found._end else [ROWS]
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise UserError(f"{path / INDEX}: cannot be read ({error}); make the index again") from None
        if short or meta.get("format") != FORMAT or found.width < 1 or found.count < 0:
            what = f"{', '.join(short)} incomplete" if short else "of another version"
            raise UserError(f"{path / INDEX}: {what}; make the index again")
        found.check(model)
        return found

    def check(self, model: Folder) -> None:
        """Refuse another model than that of the vectors."""
        if fingerprint(model) not in self.models:
            raise UserError(
                f"{model.path}: is not the model that embedded the texts of {self.folder}, and vectors of two models "
                "cannot be compared; use that model, or make a new index with this one"
            )

    def __len__(self) -> int:
        return self.count

    @property
    def _end(self) -> int:
        return int(self._ends[-1]) if self.count else 0

    @property
    def _ends(self) -> NDArray[np.int64]:
        return np.memmap(self.folder / ENDS, np.int64, "r", shape=(self.count,))

    @property
    def vectors(self) -> NDArray[np.float32]:
        """(texts, width), of length 1, mapped from the file."""
        if not self.count:
            return np.zeros((0, self.width), np.float32)
        return np.memmap(self.folder / VECTORS, np.float32, "c", shape=(self.count, self.width))

    def add(self, rows: Iterable[Row], embed: Embed, progress: Callable[[int], object] | None = None) -> int:
        """Embed and append the rows that are not in it yet; the number of those that are new."""
        self.folder.mkdir(exist_ok=True)
        known, before = {hashlib.sha256(line).digest() for line in self._lines()}, self.count
        for name, size in ((VECTORS, 4 * self.width * self.count), (ROWS, self._end), (ENDS, 8 * self.count)):
            with (self.folder / name).open("ab") as file:
                file.truncate(size)  # an interrupted run may have left more
        new = self._new(rows, known)
        while some := list(islice(new, TOGETHER)):
            vectors = torch.nn.functional.normalize(embed([text for text, _ in some]).float().cpu(), dim=-1).numpy()
            if not np.isfinite(vectors).all():
                raise UserError("the model gives vectors with NaN or infinity; it cannot be used for an index")
            ends = self._end + np.cumsum([len(line) for _, line in some], dtype=np.int64)
            written = {VECTORS: vectors.tobytes(), ROWS: b"".join(line for _, line in some), ENDS: ends.tobytes()}
            for name, content in written.items():
                with (self.folder / name).open("ab") as file:
                    file.write(content)
                sync(self.folder / name)
            self.count += len(some)
            self._save()
            if progress is not None:
                progress(self.count - before)
        self._save()
        return self.count - before

    def _save(self) -> None:
        meta = {"format": FORMAT, "count": self.count, "width": self.width, "models": self.models}
        write_text(self.folder / META, json.dumps(meta, indent=2) + "\n")

    def _lines(self) -> Iterator[bytes]:
        begin = 0
        if self.count:
            with (self.folder / ROWS).open("rb") as file:
                for end in self._ends.tolist():
                    yield file.read(end - begin)
                    begin = end

    @staticmethod
    def _new(rows: Iterable[Row], known: set[bytes]) -> Iterator[tuple[str, bytes]]:
        """Each text and its line, once."""
        for text, columns in rows:
            tree = {"text": text} | ({"columns": columns} if columns else {})
            line = json.dumps(tree, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace") + b"\n"
            if text.strip() and (digest := hashlib.sha256(line).digest()) not in known:
                known.add(digest)
                yield text, line

    def rows(self, numbers: Iterable[int]) -> list[Row]:
        """The texts of these numbers, with the other columns of their rows."""
        found, ends = list[Row](), self._ends
        with (self.folder / ROWS).open("rb") as file:
            for number in numbers:
                file.seek(begin := int(ends[number - 1]) if number else 0)
                tree = json.loads(file.read(int(ends[number]) - begin))
                found.append((tree["text"], tree.get("columns", {})))
        return found

    def search(self, vectors: Tensor, top: int) -> list[list[FoundText]]:
        """The `top` texts of each vector (queries, width), the most similar first."""
        if not self.count:
            return [[] for _ in vectors]
        units = torch.nn.functional.normalize(vectors.float().cpu(), dim=-1)
        scores, numbers = nearest(units, self.vectors, top)
        return [
            [
                FoundText(number, text, score, dict(columns))
                for number, score, (text, columns) in zip(own, some, self.rows(own), strict=True)
            ]
            for own, some in zip(numbers.tolist(), scores.tolist(), strict=True)
        ]
