"""Byte-level subwords, trained by the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from allyouneed.data.tokenizers.byte_level import BYTE_OF, BYTES
from allyouneed.errors import UserError

MIN_FREQUENCY = 2
# A digit is a token of its own, and so is the space before it: the same digit is always the same token, which copying
# numbers needs.
EAST_ASIAN = r"\p{Han}\p{Hiragana}\p{Katakana}ー"
PIECES = "|".join(
    [rf"[{EAST_ASIAN}]+", rf" ?[\p{{L}}\p{{M}}&&[^{EAST_ASIAN}]]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+", r"\s+"]
)


def train_subwords(
    kind: Literal["bpe", "unigram"], vocab: int, min_frequency: int | None, specials: list[str], texts: Iterable[str]
) -> Any:
    """A `tokenizers.Tokenizer`: these special tokens first, then the bytes, then the learned pieces."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Inner

    inner = Inner(models.BPE() if kind == "bpe" else models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    common: dict[str, Any] = {
        "vocab_size": vocab,
        "special_tokens": specials,
        "initial_alphabet": sorted(BYTE_OF),
        "show_progress": False,
    }
    trainer: Any
    if kind == "bpe":
        trainer = trainers.BpeTrainer(min_frequency=min_frequency or MIN_FREQUENCY, **common)
    else:
        trainer = trainers.UnigramTrainer(**common)
    seen = _CountingIterator(texts)
    inner.train_from_iterator(seen, trainer)
    if not seen.characters:
        raise UserError("no text to learn a vocabulary from; check the data files")
    if kind == "unigram":
        inner = Inner.from_str(_settle_scores(inner.to_str(), len(specials)))
    return inner


def _settle_scores(text: str, specials: int) -> str:
    """Remove from a unigram model what depends on the iteration order of the library's hash tables.

    Float sums differ in their last digits, and unused bytes get the lowest scores, spaced slightly apart in random
    order; rounding, and one common score for unused bytes, make training deterministic.
    """
    tree = json.loads(text)
    pieces = [(piece, round(score, 6)) for piece, score in tree["model"]["vocab"][specials:]]
    bottom = min(score for _, score in pieces)
    unused = bottom + 1e-4 * (BYTES + 1)  # the library spaces them by 1e-4
    settled = [(p, bottom if len(p) == 1 and score <= unused else score) for p, score in pieces]
    settled.sort(key=lambda item: (-item[1], item[0]))
    tree["model"]["vocab"][specials:] = [list(item) for item in settled]
    return json.dumps(tree, ensure_ascii=False)


class _CountingIterator:
    """Counts the characters that pass through."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = iter(texts)
        self.characters = 0

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            self.characters += len(text)
            yield text
