"""Pieces of an interleaved text: texts, images and sounds in reading order, and how images and sounds are read.

[{"image": "7.png"}, "Which digit is this?"]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from allyouneed.config import Config
from allyouneed.data.media.image import Pixels
from allyouneed.data.media.sound import HOP, RATE, log_mel
from allyouneed.data.media.sound_files import read_samples
from allyouneed.errors import UserError, near
from allyouneed.nn.batch import MEDIA

KINDS = ("text", *MEDIA)
MARKS = {kind: (f"<{kind}>", f"</{kind}>") for kind in MEDIA}  # special tokens before and after the slots of a medium
PLACEHOLDER = re.compile("|".join(f"<{kind}>" for kind in MEDIA))
Size = Annotated[int, Field(gt=0)]


class MediaPiece(NamedTuple):
    """`kind`: text, image or audio. `value`: the text; or what the kind's reader reads, such as a path."""

    kind: str
    value: Any


def parse_pieces(given: Any) -> tuple[MediaPiece, ...]:
    """Pieces of a text, or a list of texts and objects with one key of `KINDS`; an error tells what is wrong."""
    if isinstance(given, str):
        return (MediaPiece("text", given),)
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise UserError(f"expected a text or a list of pieces, got {type(given).__name__}")
    return tuple(_parse_piece(number, entry) for number, entry in enumerate(given, start=1))


def _parse_piece(number: int, entry: Any) -> MediaPiece:
    if isinstance(entry, str):
        return MediaPiece("text", entry)
    if not isinstance(entry, Mapping):
        raise UserError(
            f"piece {number}: a {type(entry).__name__}; expected a text or an object such as {{'image': …}}"
        )
    if len(entry) != 1:
        raise UserError(f"piece {number}: {len(entry)} keys; expected one of {', '.join(KINDS)}")
    ((kind, value),) = entry.items()
    if kind not in KINDS:
        raise UserError(f"piece {number}: unknown key {kind!r}{near(kind, KINDS)} (allowed: {', '.join(KINDS)})")
    if kind == "text" and not isinstance(value, str):
        raise UserError(f"piece {number}: text: a {type(value).__name__}; expected a text")
    return MediaPiece(kind, value)


def fill_placeholders(text: str, given: Mapping[str, Sequence[Any]]) -> tuple[MediaPiece, ...]:
    """The pieces of a text in which `<image>` and `<audio>` stand for these media, in order; where a text has none of a
    kind, those of the kind come first."""
    found, rest = list[MediaPiece](), {kind: list(given.get(kind, ())) for kind in MEDIA}
    for kind, values in rest.items():
        count = text.count(f"<{kind}>")
        if not count:
            found += [MediaPiece(kind, value) for value in values]
            rest[kind] = []
        elif count != len(values):
            raise UserError(f"{count} placeholders <{kind}> in the prompt, but {len(values)} given; they must match")
    at = 0
    for match in PLACEHOLDER.finditer(text):
        kind = match[0][1:-1]
        found += [MediaPiece("text", text[at : match.start()]), MediaPiece(kind, rest[kind].pop(0))]
        at = match.end()
    return tuple(
        piece for piece in (*found, MediaPiece("text", text[at:])) if piece.value != "" or piece.kind != "text"
    )


def pieces_text(pieces: Iterable[MediaPiece]) -> str:
    """The texts, with placeholders for the rest."""
    return "".join(piece.value if piece.kind == "text" else f"<{piece.kind}>" for piece in pieces)


class ImageInput(Pixels):
    """How images are read. `slots`: vectors of an image in the text."""

    slots: Size = 1
    """Vectors of an image in the text; set from the model."""

    def load(self, stored: NDArray[Any]) -> Tensor:
        """(count, channels, height, width) of flat stored images."""
        return self.scaled(stored.reshape(-1, *self.sides, self.channels))


class AudioInput(Config):
    """How sounds are read: log-mel frames, every 10 ms, padded with silence to `seconds`."""

    slots: Size = 1
    """Vectors of a sound in the text; set from the model."""
    mels: Size = 80
    """Mel channels of a frame; set from the model."""
    seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """The longest sound; default: what the model has positions for, or 30."""

    def read(self, sound: Any) -> Tensor:
        """A path, mono samples at 16 kHz, or (samples, rate) -> (mels, time)"""
        return log_mel(read_samples(sound, self.seconds), self.mels, self.seconds)

    def stored(self, sound: Any) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self.read(sound).numpy()
        return found

    def load(self, stored: NDArray[Any]) -> Tensor:
        """(count, mels, time) of flat stored frames."""
        frames = round(self.seconds * RATE) // HOP
        return torch.from_numpy(np.array(stored, dtype=np.float32).reshape(-1, self.mels, frames))


MediaInputs = Mapping[str, ImageInput | AudioInput]  # by kind; those that a model reads
