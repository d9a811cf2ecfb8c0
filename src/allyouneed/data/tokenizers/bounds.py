"""Bounds of a tokenizer that somebody else may have made: what running it on a text may cost.

Every step that can lengthen a text is bounded by its definition, before it runs; then the tokenizer is tried on a short
text."""

from __future__ import annotations

import base64
import json
import re
import string
from collections.abc import Collection, Iterator
from typing import Any

from allyouneed.data.tokenizers.errors import translate_error
from allyouneed.data.tokenizers.regex import OutOfBounds, least_width
from allyouneed.errors import UserError
from allyouneed.files.reading import parse_json

MAX_BYTES = 1 << 28  # of a tokenizer.json; the largest have a tenth of that
MAX_STEPS = 64  # of a normalizer, pre-tokenizer or decoder
MAX_ADDED = 1000  # characters that one step puts before or in place of others
MAX_GROWTH = 256  # characters that all steps together may make of one; NFKC makes up to 18
MAX_TRIED_GROWTH = 32  # the same, on a text of letters
MAX_TOKEN = 10_000  # characters
MAX_SPLITTING = 100_000_000  # sum of squared lengths of tokens, which finding their parts takes; the largest take 2e7
MAX_SPECIAL_TOKENS = 1000  # around a text
MAX_WORD = 10_000  # characters that WordPiece looks up in one word
MAX_GAP = 1 << 20  # ids of a small vocabulary with gaps
# steps that turn one character into two
DOUBLING = {"ByteLevel": 2, "Metaspace": 2}
ESCAPED_LETTER = re.compile(r"\\u00[567]", re.IGNORECASE)  # by which a key may be spelled
TRIED = string.printable + "Éß中文عربي日本語"


def parse_tokenizer(text: str, where: str) -> Any:
    """A `tokenizers.Tokenizer` from a tokenizer.json, checked."""
    from tokenizers import Tokenizer

    _check_charsmaps(text, where)
    try:
        inner = Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # bare exceptions, and panics that are not subclasses of `Exception`
        raise UserError(f"{where}: cannot be read as a tokenizer: {str(error)[:200]}") from None
    check_tokenizer(inner, where)
    return inner


def most_ids(tokens: int) -> int:
    """The limit of ids for this number of tokens: gaps are allowed, but the library makes tables up to the largest."""
    return max(MAX_GAP, 2 * tokens)


def check_tokenizer(inner: Any, where: str) -> None:
    """Refuse a tokenizer whose texts, tables or running times may explode; padding and truncation are switched off."""
    inner.no_padding()  # ours happen in batches; a file may ask for a billion tokens
    inner.no_truncation()
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        step = getattr(inner, name)
        if step is not None:
            try:
                _check_steps(json.loads(step.__getstate__()))
            except (OutOfBounds, RecursionError) as error:
                raise UserError(f"{where}: {name.replace('_', '-')}: {error or 'nested too deeply'}") from None
    template = inner.post_processor
    if template is not None and template.num_special_tokens_to_add(True) > MAX_SPECIAL_TOKENS:
        raise UserError(f"{where}: adds more than {MAX_SPECIAL_TOKENS:,} special tokens to a text")
    vocabulary = inner.get_vocab(with_added_tokens=True)
    if (last := max(vocabulary.values(), default=0)) >= (most := most_ids(len(vocabulary))):
        raise UserError(f"{where}: {len(vocabulary):,} tokens with ids up to {last:,}; they must be below {most:,}")
    longest = max(map(len, vocabulary), default=0)
    if longest > MAX_TOKEN:
        raise UserError(f"{where}: a token of {longest:,} characters; at most {MAX_TOKEN:,} are supported")
    if getattr(inner.model, "max_input_chars_per_word", 0) > MAX_WORD:
        raise UserError(f"{where}: max_input_chars_per_word is more than {MAX_WORD:,}")
    _try(inner, where)


def check_pieces(pieces: Collection[str] | Collection[bytes], where: str) -> None:
    """Refuse tokens that are so long that finding their parts, for merges, would take minutes."""
    if max(map(len, pieces), default=0) > MAX_TOKEN:
        longest = max(map(len, pieces))
        raise UserError(f"{where}: a token of {longest:,} characters; at most {MAX_TOKEN:,} are supported")
    if sum(len(piece) ** 2 for piece in pieces) > MAX_SPLITTING:
        raise UserError(f"{where}: {len(pieces):,} tokens are too long on average to find their parts")


def _check_steps(tree: Any) -> None:
    growth, steps = 1.0, list(_steps(tree))
    if len(steps) > MAX_STEPS:
        raise OutOfBounds(f"{len(steps):,} steps; at most {MAX_STEPS} are supported")
    for step in steps:
        added = max((len(value) for key, value in step.items() if _adds(key, value)), default=0)
        if added > MAX_ADDED:
            raise OutOfBounds(f"{step.get('type')} adds {added:,} characters; at most {MAX_ADDED:,} are supported")
        growth *= max(1.0, _growth(step))
        if growth > MAX_GROWTH:
            raise OutOfBounds(f"makes more than {MAX_GROWTH:,} characters of one")


def _steps(tree: Any) -> Iterator[dict[str, Any]]:
    """Every step, those of a sequence one by one."""
    if isinstance(tree, dict):
        if "type" in tree and tree["type"] != "Sequence":
            yield tree
        for value in tree.values():
            yield from _steps(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _steps(value)


def _adds(key: str, value: Any) -> bool:
    return isinstance(value, str) and key not in ("type", "precompiled_charsmap", "behavior")


def _growth(step: dict[str, Any]) -> float:
    """Characters that the step makes of one; its regular expression is checked on the way."""
    pattern = step.get("pattern")
    pattern = pattern if isinstance(pattern, dict) else {}
    least = len(pattern.get("String", " "))
    if "Regex" in pattern:
        try:
            least = least_width(pattern["Regex"])
        except OutOfBounds as error:
            raise OutOfBounds(f"regular expression {pattern['Regex'][:60]!r}: {error}") from None
    if step["type"] == "Replace":
        return len(step["content"]) / least if least else len(step["content"]) + 1
    if step["type"] == "Precompiled":
        return _charsmap_growth(_charsmap(step))
    return DOUBLING.get(step["type"], 1)


def _check_charsmaps(text: str, where: str) -> None:
    """The library makes the tables while it reads a tokenizer.json."""
    if "charsmap" not in text and not ESCAPED_LETTER.search(text):
        return
    try:
        tree = parse_json(text)
        for step in _steps(tree.get("normalizer") if isinstance(tree, dict) else None):
            if "precompiled_charsmap" in step:
                check_charsmap(_charsmap(step))
    except ValueError as error:
        raise UserError(f"{where}: cannot be read as a tokenizer: {error}") from None


def check_charsmap(raw: bytes) -> None:
    """Refuse a SentencePiece charsmap (the size of a trie, the trie, and what characters turn into, ended by zeros)
    that is smaller than its trie: the library makes a table of the size that it names."""
    if len(raw) < 4 or int.from_bytes(raw[:4], "little") > len(raw) - 4:
        raise OutOfBounds(f"a charsmap of {len(raw):,} bytes is not whole")


def _charsmap(step: dict[str, Any]) -> bytes:
    try:
        return base64.b64decode(step.get("precompiled_charsmap") or "")
    except (TypeError, ValueError):
        raise OutOfBounds("the charsmap is not base64") from None


def _charsmap_growth(raw: bytes) -> int:
    strings = raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")
    return max((len(found.decode("utf-8", "replace")) for found in strings), default=0)


def _try(inner: Any, where: str) -> None:
    try:
        normalizer = inner.normalizer
        normal = TRIED if normalizer is None else normalizer.normalize_str(TRIED)
        if len(normal) > MAX_TRIED_GROWTH * len(TRIED) + MAX_ADDED:
            raise UserError(f"makes {len(normal):,} characters of {len(TRIED)}")
        ids = inner.encode(TRIED, add_special_tokens=False).ids
        text = inner.decode(ids)
        if len(text) > MAX_TRIED_GROWTH * len(TRIED) + MAX_ADDED:
            raise UserError(f"decodes a text of {len(TRIED)} characters as {len(text):,}")
    except BaseException as error:
        found = translate_error(error, [TRIED])
        raise (UserError(f"{where}: {found}") if isinstance(found, UserError) else found) from None
