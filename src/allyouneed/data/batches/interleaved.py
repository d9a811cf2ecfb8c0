"""Encode interleaved texts: token ids, which of them are slots, and the images and sounds themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from allyouneed.config import tree_of
from allyouneed.data.batches.encoding import Dropped, EncodedRow, Encoding, id_format
from allyouneed.data.files.interleaved import InterleavedText
from allyouneed.data.media.pieces import MARKS, MediaInputs, MediaPiece
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError
from allyouneed.nn.batch import MEDIA

DTYPES = {"image": "<u1", "audio": "<f4"}  # of stored media: pixels, log-mel frames


class EncodedPieces(NamedTuple):
    """Token ids; for each 0, or the number of the medium whose slot it is (`Rows.slots`); and the media: piece and
    position of the first slot."""

    ids: list[int]
    slots: list[int]
    media: list[tuple[MediaPiece, int]]


def encode_pieces(
    tokenizer: Tokenizer, pieces: Sequence[MediaPiece], inputs: MediaInputs, specials: bool = False
) -> EncodedPieces:
    """A medium becomes `<image>`, its slots and `</image>` (Huang et al. 2023, 2.2); at slots the ids are not read.
    `specials`: parse special tokens in texts."""
    found = EncodedPieces([], [], [])
    for piece in pieces:
        if piece.kind == "text":
            ids = tokenizer.encode(piece.value, specials)
            slots = [0] * len(ids)
        elif piece.kind not in inputs:
            reads = f"texts and {', '.join(inputs)}" if inputs else "texts only"
            raise UserError(f"{piece.kind}: this model reads {reads}")
        else:
            before, after = (tokenizer.special(mark) for mark in MARKS[piece.kind])
            count = inputs[piece.kind].slots
            found.media.append((piece, len(found.ids) + 1))
            ids = [before, *[before] * count, after]
            slots = [0, *[MEDIA.index(piece.kind) + 1] * count, 0]
        found.ids.extend(ids)
        found.slots.extend(slots)
    return found


class InterleavedEncoding(Encoding):
    """Token ids of a text from the begin to the end token; for each whether it is learned, and its slot; the images and
    the sounds in it."""

    name = "Interleaved"

    def __init__(self, tokenizer: Tokenizer, inputs: MediaInputs, max_tokens: int | None) -> None:
        self.tokenizer, self.inputs, self.max_tokens = tokenizer, inputs, max_tokens
        self.columns = {"text": id_format(tokenizer), "learned": "<u1", "slots": "<u1"}
        self.columns |= {kind: DTYPES[kind] for kind in inputs}
        self.spec = {"texts": {"text": tokenizer.hash}, "max_tokens": max_tokens}
        self.spec |= {"inputs": {kind: tree_of(reader) for kind, reader in inputs.items()}}

    def encode(self, chunk: Sequence[InterleavedText]) -> Iterator[EncodedRow | Dropped]:
        for example in chunk:
            try:
                yield self.encode_one(example)
            except UserError as error:
                yield Dropped("broken", str(error))

    def encode_one(self, example: InterleavedText) -> EncodedRow | Dropped:
        tokenizer, answer = self.tokenizer, example.answer
        ids, slots, media = encode_pieces(tokenizer, example.pieces, self.inputs)
        marks = {mark for kind in self.inputs for mark in MARKS[kind]}
        never = {tokenizer.special(mark) for mark in marks}
        learned = [int(answer is None and one not in never) for one in ids]
        added = [*([] if answer is None else tokenizer.encode(answer)), tokenizer.eos]
        ids, slots = [tokenizer.bos, *ids, *added], [0, *slots, *[0] * len(added)]
        if (dropped := self.drop_if_too_long(len(ids) - 1)) is not None:
            return dropped
        row: list[Any] = [ids, [0, *learned, *[1] * len(added)], slots]
        for kind in self.inputs:
            row.append(self._stored(kind, [piece for piece, _ in media if piece.kind == kind]))
        return row

    def _stored(self, kind: str, pieces: Sequence[MediaPiece]) -> NDArray[Any]:
        stored = [self.inputs[kind].stored(piece.value).reshape(-1) for piece in pieces]
        return np.concatenate(stored) if stored else np.zeros(0, dtype=DTYPES[kind])
