"""Tokenizers from vocabulary files: vocab.txt (WordPiece), vocab.json with merges.txt (BPE), bytes (ByT5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allyouneed.data.tokenizers.bounds import MAX_BYTES, most_ids
from allyouneed.data.tokenizers.byte_level import BYTES, byte_characters
from allyouneed.errors import UserError
from allyouneed.files import reading

CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
CLIP_PIECES = rf"<\|startoftext\|>|<\|endoftext\|>|{CONTRACTIONS}|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}]+"
QWEN_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def wordpiece(path: Path, unknown: str, options: Mapping[str, Any]) -> Any:
    """BERT (Devlin et al. 2019): words and punctuation, then greedy longest match."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens = [line.rstrip("\n") for line in read_text(path).splitlines(keepends=True)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if unknown not in vocabulary:
        raise UserError(f"{path}: {unknown} is missing; the file does not belong to this model")
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
    """GPT-2 (Radford et al. 2019): byte pairs, merged in order. `pieces`: another pre-tokenizer pattern."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    inner = Tokenizer(_bpe_model(vocab, merges))
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
    """CLIP (Radford et al. 2021): lower case, one space, words end in `</w>`."""
    from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

    inner = Tokenizer(_bpe_model(vocab, merges, end_of_word_suffix="</w>", unk_token=unknown))
    inner.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    cut = pre_tokenizers.Split(Regex(CLIP_PIECES), behavior="removed", invert=True)
    inner.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    inner.decoder = clip_decoder()
    return inner


def clip_decoder() -> Any:
    """CLIP's decoder, which its tokenizer.json omits."""
    from tokenizers import Regex, decoders

    ends = decoders.Replace(Regex(r"\A\s+|\s+\z"), "")
    return decoders.Sequence([decoders.ByteLevel(), decoders.Replace("</w>", " "), ends])


def clean_up_spaces(decoder: Any) -> Any:
    """Remove spaces before punctuation and inside contractions (`clean_up_tokenization_spaces`)."""
    from tokenizers import decoders

    ends = [decoders.Replace(f" {mark}", mark) for mark in (".", "?", "!", ",")]
    inside = [decoders.Replace(f" {part}", part) for part in ("n't", "'m", "'s", "'ve", "'re")]
    first = [] if decoder is None else [decoder]
    return decoders.Sequence([*first, decoders.Fuse(), *ends, decoders.Replace(" ' ", "'"), *inside])


def byt5(names: Sequence[str], extra: Sequence[str]) -> Any:
    """ByT5 (Xue et al. 2022): three special tokens, one token per byte, then more special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    character_of = {byte: char for char, byte in byte_characters().items()}
    vocabulary = {name: number for number, name in enumerate(names)}
    vocabulary |= {character_of[byte]: byte + len(names) for byte in range(BYTES)}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in [*names, *extra]])
    return inner


def read_text(path: Path) -> str:
    return reading.read_text(path.parent, path.name, MAX_BYTES)


def read_vocab(path: Path) -> dict[str, int]:
    """A vocabulary: token -> id."""
    tree = reading.read_json(path.parent, path.name)
    most = most_ids(len(tree))
    wrong = [name for name, number in tree.items() if type(number) is not int or not 0 <= number < most]
    if wrong or not tree or len(set(tree.values())) < len(tree):
        raise UserError(f"{path}: not a vocabulary (a unique id below {most:,} for each token)")
    return tree


def _bpe_model(vocab: Path, merges: Path, **options: Any) -> Any:
    from tokenizers import models

    pairs = []
    for number, line in enumerate(read_text(merges).split("\n"), start=1):
        if not line or line.startswith("#version"):
            continue
        pair = tuple(line.rstrip("\r").split(" "))
        if len(pair) != 2:
            raise UserError(f"{merges}:{number}: a merge must have two tokens")
        pairs.append(pair)
    try:
        return models.BPE(read_vocab(vocab), pairs, **options)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{merges}: does not match {vocab.name}: {error}") from None
