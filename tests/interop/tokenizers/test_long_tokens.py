"""Vocabularies whose merges are found by cutting every token: the work is bounded before it begins."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allyouneed.errors import UserError
from allyouneed.interop.single_file.llama2c import read_vocabulary
from allyouneed.interop.tokenizers.sentencepiece import SentencePieceModel
from allyouneed.interop.tokenizers.tiktoken import read_ranks

BYTES = [bytes([n]) for n in range(256)]


def tiktoken(path: Path, tokens: list[bytes]) -> Any:
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % n for n, t in enumerate([*BYTES, *tokens])))
    return read_ranks(path)


def llama2c(path: Path, tokens: list[bytes]) -> Any:
    pieces = [b"<unk>", b"<s>", b"</s>", *(f"<0x{n:02X}>".encode() for n in range(256)), *tokens]
    path.write_bytes(struct.pack("<i", 8) + b"".join(struct.pack("<fi", 0.0, len(raw)) + raw for raw in pieces))
    return read_vocabulary(path, len(pieces))


def sentencepiece(path: Path, tokens: list[bytes]) -> Any:
    def field(number: int, content: bytes) -> bytes:
        size, length = len(content), b""
        while size > 0x7F:
            size, length = size >> 7, length + bytes([size & 0x7F | 0x80])
        return bytes([number << 3 | 2]) + length + bytes([size]) + content

    path.write_bytes(b"".join(field(1, field(1, token)) for token in [b"<unk>", b"a", *tokens]))
    return SentencePieceModel.read(path)


@pytest.mark.parametrize("read", [tiktoken, llama2c, sentencepiece])
def test_tokens_that_take_minutes_to_cut_are_refused(
    read: Callable[[Path, list[bytes]], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read(tmp_path / "vocabulary", [b"aa", b"a" * 100]) is not None
    with pytest.raises(UserError, match="vocabulary: a token of 10,001 characters; at most 10,000 are supported"):
        read(tmp_path / "vocabulary", [b"a" * 10_001])
    monkeypatch.setattr("allyouneed.data.tokenizers.bounds.MAX_SPLITTING", 10_000)
    with pytest.raises(UserError, match="tokens are too long on average to find their parts"):
        read(tmp_path / "vocabulary", [b"a" * n for n in range(2, 102)])
