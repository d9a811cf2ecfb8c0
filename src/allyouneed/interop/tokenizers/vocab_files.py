"""Tokenizers of plain files: WordPiece's vocab.txt, vocab.json with merges.txt, ranks of bytes, bytes alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allyouneed.data.tokenizers.byte_level import BYTES, byte_characters
from allyouneed.errors import UserError

MOST = 1 << 28  # bytes of a file; the largest vocabularies have a tenth of that
CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
CLIP_PIECES = rf"<\|startoftext\|>|<\|endoftext\|>|{CONTRACTIONS}|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}]+"
QWEN_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def wordpiece(path: Path, unknown: str, options: Mapping[str, Any]) -> Any:
    """BERT (Devlin et al. 2019): words and punctuation, then the longest known beginnings."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens = [line.rstrip("\n") for line in text_of(path).splitlines(keepends=True)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if unknown not in vocabulary:
        raise UserError(f"{path}: has no {unknown}; it does not belong to this model")
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    inner.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=options.get("tokenize_chinese_chars", True),
        strip_accents=options.get("strip_accents"),
        lowercase=options.get("do_lower_case", True),
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix="##")
    return inner


def byte_pairs(vocab: Path, merges: Path, options: Mapping[str, Any], pieces: str | None = None) -> Any:
    """GPT-2 (Radford et al. 2019): pairs of bytes, merged in order. `pieces`: how a text is cut first, if not so."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    inner = Tokenizer(_merging(vocab, merges))
    prefix = bool(options.get("add_prefix_space", False))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    if pieces is not None:
        inner.normalizer = normalizers.NFC()
        cut = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [cut, pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)]
        )
    inner.decoder = decoders.ByteLevel()
    return inner


def clip(vocab: Path, merges: Path, unknown: str) -> Any:
    """CLIP (Radford et al. 2021): lower case, one space, words that end with `</w>`."""
    from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

    inner = Tokenizer(_merging(vocab, merges, end_of_word_suffix="</w>", unk_token=unknown))
    inner.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    cut = pre_tokenizers.Split(Regex(CLIP_PIECES), behavior="removed", invert=True)
    inner.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    inner.decoder = words_with_ends()
    return inner


def words_with_ends() -> Any:
    """How CLIP's words become a text again; its tokenizer.json does not say it."""
    from tokenizers import Regex, decoders

    ends = decoders.Replace(Regex(r"\A\s+|\s+\z"), "")
    return decoders.Sequence([decoders.ByteLevel(), decoders.Replace("</w>", " "), ends])


def tidied(decoder: Any) -> Any:
    """No spaces before full stops and inside contractions, where a tokenizer's options ask for it."""
    from tokenizers import decoders

    ends = [decoders.Replace(f" {mark}", mark) for mark in (".", "?", "!", ",")]
    inside = [decoders.Replace(f" {part}", part) for part in ("n't", "'m", "'s", "'ve", "'re")]
    first = [] if decoder is None else [decoder]
    return decoders.Sequence([*first, decoders.Fuse(), *ends, decoders.Replace(" ' ", "'"), *inside])


def byte_tokens(names: Sequence[str], extra: Sequence[str]) -> Any:
    """ByT5 (Xue et al. 2022): after the first special tokens one for each byte, then more special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    of_byte = {byte: char for char, byte in byte_characters().items()}
    vocabulary = {name: number for number, name in enumerate(names)}
    vocabulary |= {of_byte[byte]: byte + len(names) for byte in range(BYTES)}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in [*names, *extra]])
    return inner


def text_of(path: Path) -> str:
    bounded(path)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: the tokenizer cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file in UTF-8; copy it again") from None


def bounded(path: Path) -> None:
    if path.is_file() and path.stat().st_size > MOST:
        raise UserError(f"{path}: {path.stat().st_size:,} bytes are too many for a tokenizer; it is not read")


def tree_of(path: Path) -> dict[str, Any]:
    """A JSON file that holds a mapping; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        tree = json.loads(text_of(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: holds no mapping of names")
    return tree


def numbers_of(path: Path) -> dict[str, int]:
    """A vocabulary: a number for each token."""
    tree = tree_of(path)
    wrong = [name for name, number in tree.items() if type(number) is not int or not 0 <= number < 1 << 31]
    if wrong or not tree or len(set(tree.values())) < len(tree):
        raise UserError(f"{path}: not a vocabulary (a number of its own for each token)")
    return tree


def _merging(vocab: Path, merges: Path, **options: Any) -> Any:
    from tokenizers import models

    pairs = []
    for number, line in enumerate(text_of(merges).split("\n"), start=1):
        if not line or line.startswith("#version"):
            continue
        pair = tuple(line.rstrip("\r").split(" "))
        if len(pair) != 2:
            raise UserError(f"{merges}:{number}: not two tokens to merge")
        pairs.append(pair)
    try:
        return models.BPE(numbers_of(vocab), pairs, **options)
    except Exception as error:  # the library raises bare Exception for anything it does not understand
        raise UserError(f"{merges}: does not fit {vocab.name}: {error}") from None
