"""SentencePiece models: a parser of their protobuf file, and the equivalent tokenizer built with `tokenizers`.

Semantics are those of SentencePiece: the normalised text is one string with `▁` for spaces and one in front; unigram or
BPE runs over all of it; text never matches control pieces; adjacent unknown characters become one unknown token.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allyouneed.data.tokenizers import plain
from allyouneed.data.tokenizers.bounds import MAX_BYTES, check_charsmap, check_pieces
from allyouneed.errors import UserError
from allyouneed.files.reading import read_bytes

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
ALL_SPACES = 1 << 10  # spaces
NEVER_SCORE = -1e6  # score of a piece that text never matches


@dataclass(frozen=True)
class SentencePiece:
    text: str
    score: float = 0.0
    kind: int = NORMAL


@dataclass(frozen=True)
class SentencePieceModel:
    """The content of a `.model` file (sentencepiece_model.proto)."""

    pieces: list[SentencePiece]
    algorithm: int = UNIGRAM
    byte_fallback: bool = False
    charsmap: bytes = b""
    rule: str = ""  # name of the normalisation rule behind the charsmap
    dummy_prefix: bool = True
    remove_spaces: bool = True
    special_ids: dict[str, int] = field(default_factory=dict)  # unk, bos, eos, pad

    @classmethod
    def read(cls, path: Path) -> SentencePieceModel:
        raw = read_bytes(path.parent, path.name, MAX_BYTES)
        try:
            found = cls.parse(raw)
        except (ValueError, IndexError, TypeError, struct.error) as error:
            raise UserError(f"{path}: not a SentencePiece model: {error}; copy it again") from None
        check_pieces([piece.text for piece in found.pieces], str(path))
        return found

    @classmethod
    def parse(cls, raw: bytes) -> SentencePieceModel:
        pieces: list[SentencePiece] = []
        trainer: dict[int, Any] = {}
        normaliser: dict[int, Any] = {}
        for number, value in _fields(raw):
            if number == 1:
                parts = dict(_fields(_bytes(value)))
                score = struct.unpack("<f", parts[2])[0] if 2 in parts else 0.0
                pieces.append(SentencePiece(_bytes(parts.get(1, b"")).decode("utf-8"), score, parts.get(3, NORMAL)))
            elif number == 2:
                trainer = dict(_fields(_bytes(value)))
            elif number == 3:
                normaliser = dict(_fields(_bytes(value)))
        if not pieces:
            raise ValueError("it has no pieces")
        if trainer.get(24, 0):
            raise ValueError("whitespace as a suffix is not supported")
        algorithm = trainer.get(3, UNIGRAM)
        if algorithm not in (UNIGRAM, BPE):
            raise ValueError(f"model type {algorithm} is not supported (allowed: 1 unigram, 2 BPE)")
        ids = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, -1)}
        special_ids = {name: _signed(trainer.get(number, default)) for name, (number, default) in ids.items()}
        return cls(
            pieces,
            algorithm,
            bool(trainer.get(35, 0)),
            _bytes(normaliser.get(2, b"")),
            _bytes(normaliser.get(1, b"")).decode("utf-8"),
            bool(normaliser.get(3, 1)),
            bool(normaliser.get(4, 1)),
            special_ids,
        )


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a protobuf message: numbers as int, everything else as bytes."""
    at = 0
    while at < len(raw):
        key, at = _varint(raw, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(raw, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(raw, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"byte {at}: wire type {wire}")
        if at + size > len(raw):
            raise ValueError("the file is truncated")
        yield number, raw[at : at + size]
        at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(raw) or shift > 63:
            raise ValueError("the file is truncated")
        value |= (raw[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not raw[at - 1] & 0x80:
            return value, at


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("found a number instead of text")
    return value


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def build(
    model: SentencePieceModel,
    ids: Mapping[str, int] | None = None,
    more: Sequence[tuple[str, float]] = (),
    unknown: str | None = None,
    before: Sequence[Any] = (),
    special: Sequence[str] = (),
) -> Any:
    """A `tokenizers.Tokenizer` that splits texts as this model does.

    `ids`: ids of the pieces where they are not the model's own (pieces not listed get the next ids); names there that
    the model does not have never match text. `more`: pieces after the last. `unknown`: the unknown piece. `before`:
    normalizers that run first. `special`: special tokens besides the control pieces.
    """
    from tokenizers import AddedToken, decoders, normalizers
    from tokenizers import Tokenizer as Inner

    pieces = _pieces_by_id(model, ids, more)
    users = [p.text for p in pieces.values() if p.kind == USER and p.text not in special]
    name = unknown or next((p.text for p in model.pieces if p.kind == UNKNOWN), "<unk>")
    inner = Inner(_unigram(model, pieces, name) if model.algorithm == UNIGRAM else _bpe(model, pieces, name))
    steps: list[Any] = list(before)
    if "nfkc" in model.rule:  # `Precompiled` maps grapheme clusters and drops combining marks beyond the first
        steps.append(normalizers.NFC())
    if model.charsmap:
        check_charsmap(model.charsmap)
        steps.append(normalizers.Precompiled(model.charsmap))
    inner.normalizer = normalizers.Sequence([*steps, *_spaces(model, users if model.algorithm == BPE else [])])
    decoding: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.dummy_prefix or model.remove_spaces:
        decoding.append(decoders.Strip(" ", ALL_SPACES if model.remove_spaces else 1, 0))
    inner.decoder = decoders.Sequence(decoding)
    known = {piece.text for piece in pieces.values()}
    controls = [p.text for p in pieces.values() if p.kind in (CONTROL, UNKNOWN)]
    names = [text for text in dict.fromkeys([*controls, name, *special]) if text in known]
    inner.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in names])
    if model.algorithm == BPE:
        inner.add_tokens([AddedToken(text, normalized=True, special=False) for text in users])
    return inner


def _pieces_by_id(
    model: SentencePieceModel, ids: Mapping[str, int] | None, more: Sequence[tuple[str, float]]
) -> dict[int, SentencePiece]:
    """The pieces by id."""
    if ids is None:
        listed = [*model.pieces, *(SentencePiece(text, score, CONTROL) for text, score in more)]
        return dict(enumerate(listed))
    own = {piece.text: piece for piece in model.pieces}
    found = {number: own.get(text, SentencePiece(text, 0.0, UNUSED)) for text, number in ids.items()}
    last = max(found, default=-1)
    unlisted = [piece for piece in model.pieces if piece.text not in ids and piece.kind in (NORMAL, USER)]
    return found | {last + 1 + n: piece for n, piece in enumerate(unlisted)}


def _unigram(model: SentencePieceModel, pieces: dict[int, SentencePiece], unknown: str) -> Any:
    from tokenizers import models

    best = max((p.score for p in model.pieces if p.kind == NORMAL), default=0.0)
    vocabulary = []
    for number in range(max(pieces) + 1):
        piece = pieces.get(number, SentencePiece(plain.name(number), 0.0, UNUSED))
        if piece.kind == USER:  # SentencePiece's bonus: user-defined pieces always win
            score = len(piece.text) * best - 0.1
        elif piece.kind in (NORMAL, BYTE):
            score = piece.score
        else:
            score = NEVER_SCORE if piece.kind == UNUSED else 0.0
        vocabulary.append((piece.text, score))
    unk_id = next(number for number, piece in pieces.items() if piece.text == unknown)
    return models.Unigram(vocabulary, unk_id=unk_id, byte_fallback=model.byte_fallback)


def _bpe(model: SentencePieceModel, pieces: dict[int, SentencePiece], unknown: str) -> Any:
    from tokenizers import models

    ids = {piece.text: number for number, piece in pieces.items()}
    real = {p.text: p.score for p in pieces.values() if p.kind in (NORMAL, USER)}
    merges = []
    for text, score in real.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in real and right in real:
                merges.append((-score, ids[left], ids[right], left, right))
    merges.sort()
    return models.BPE(
        ids,
        [(left, right) for *_, left, right in merges],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _spaces(model: SentencePieceModel, users: list[str]) -> list[Any]:
    """Replace spaces by `▁` and prepend one, except before a user-defined piece, which is normalised on its own."""
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if model.remove_spaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.dummy_prefix and users:
        alone = "|".join(re.escape(text) for text in users)
        steps.append(normalizers.Replace(Regex(rf"\A(?!(?:{alone})\z)(?=[\s\S])"), SPACE))
    elif model.dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    return [*steps, normalizers.Replace(" ", SPACE)]
