"""Texts with images and sounds among them: JSON, one object per line or in an array."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from allyouneed.data.files.chats import object_files
from allyouneed.data.files.readers import Files, Paths, Report
from allyouneed.data.files.tables import read_objects
from allyouneed.data.media.pieces import MediaPiece, parse_pieces, pieces_text
from allyouneed.errors import UserError, near

KEYS = ("pieces", "answer")


class InterleavedText(NamedTuple):
    """Pieces in reading order; images and sounds are paths. `answer`: the text to be learned; None: all texts are."""

    pieces: tuple[MediaPiece, ...]
    answer: str | None
    file: str
    line: int

    @property
    def texts(self) -> tuple[str, ...]:
        """One text: pieces need not have any."""
        found = [piece.value for piece in self.pieces if piece.kind == "text"]
        return ("\n".join([*found, *([] if self.answer is None else [self.answer])]),)

    @property
    def metadata(self) -> str:
        return " ".join(str(piece.value) for piece in self.pieces if piece.kind != "text")

    @property
    def prompt(self) -> str:
        return pieces_text(self.pieces)


class InterleavedFiles(Files):
    """Files of interleaved texts: JSON objects with `pieces`, a list of texts, `{"image": path}` and `{"audio": path}`,
    and an optional `answer`. Paths are relative to the file. With an answer only that is learned, otherwise all
    texts."""

    examples: ClassVar[str] = "texts"
    kind: Literal["interleaved"] = "interleaved"
    path: Paths
    """A file or a list of files: .jsonl, .ndjson or .json."""

    def files(self) -> list[Path]:
        return object_files(self.path)

    def other_inputs(self) -> dict[str, Any]:
        """Names, sizes and times of the images and sounds."""
        digest = hashlib.sha256()
        for example in self.read(Report()):
            for piece in example.pieces:
                if piece.kind != "text":
                    stat = piece.value.stat()
                    digest.update(f"{piece.value.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        return {"media": digest.hexdigest()}

    def read(self, report: Report) -> Iterator[InterleavedText]:
        for file in self.sources():
            for number, entry, text in read_objects(file, ("pieces",), report, "key"):
                try:
                    yield _parse(entry, file.path, number)
                except UserError as error:
                    report.drop("broken", file, number, str(error), text)


def _parse(entry: Mapping[str, Any], file: Path, number: int) -> InterleavedText:
    for key in entry:
        if key not in KEYS:
            raise UserError(f"unknown key {key!r}{near(key, KEYS)} (allowed: {', '.join(KEYS)})")
    answer = entry.get("answer")
    if answer is not None and not isinstance(answer, str):
        raise UserError(f"answer: a {type(answer).__name__}, expected a text")
    pieces = tuple(_locate(piece, file.parent) for piece in parse_pieces(entry["pieces"]))
    if answer is None and not any(piece.kind == "text" for piece in pieces):
        raise UserError("no text and no answer: there is nothing to learn")
    return InterleavedText(pieces, answer, str(file), number)


def _locate(piece: MediaPiece, folder: Path) -> MediaPiece:
    if piece.kind == "text":
        return piece
    if not isinstance(piece.value, str):
        raise UserError(f"{piece.kind}: a {type(piece.value).__name__}, expected a path")
    path = folder / piece.value
    if not path.is_file():
        raise UserError(f"{piece.kind} {path}: no such file")
    return MediaPiece(piece.kind, path)
