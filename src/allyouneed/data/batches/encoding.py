"""Encode examples as the columns of a store: token ids of each text, plus numbers (a label, a score, tags)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from allyouneed.data.files.labels import Tagged
from allyouneed.data.files.readers import Example
from allyouneed.data.tokenizers.base import EAST_ASIAN_CHARACTER, Tokenizer

BLOCK = 1 << 16  # characters of a long text encoded in one call


class Dropped(NamedTuple):
    """Why an example is left out."""

    reason: str
    detail: str


EncodedRow = list[Sequence[float]]  # one sequence of numbers per column


class Encoding(ABC):
    """How a task encodes its examples. `columns`: names and dtypes. `spec`: everything besides the examples that the
    numbers depend on. `max_tokens`: longer examples are dropped; None if long ones are split later."""

    name: str  # part of a store's fingerprint: changing it re-encodes every data set
    most: ClassVar[int] = 1 << 16  # examples encoded together
    columns: dict[str, str]
    spec: dict[str, Any]
    max_tokens: int | None
    truncated: int = 0  # examples whose source was

    @abstractmethod
    def encode(self, chunk: Sequence[Any]) -> Iterator[EncodedRow | Dropped]:
        """One result per example."""

    def drop_if_too_long(self, tokens: int) -> Dropped | None:
        if self.max_tokens is None or tokens <= self.max_tokens:
            return None
        return Dropped("too many tokens", f"{tokens} tokens including EOS, at most {self.max_tokens}")


def id_format(tokenizer: Tokenizer) -> str:
    return "<u2" if tokenizer.size <= 1 << 16 else "<u4"


class TextEncoding(Encoding):
    """One column per text. An example is dropped if a text plus `special_count` special tokens exceeds `max_tokens`.
    With `separators`, its texts are counted as one sequence with that many separator tokens in between. `truncate`: the
    first text is truncated instead, if that leaves any of it."""

    name = "Texts"

    def __init__(
        self,
        tokenizers: Mapping[str, Tokenizer],
        max_tokens: int | None,
        special_count: int = 1,
        separators: int | None = None,
        word_starts: bool = False,
        truncate: bool = False,
    ) -> None:
        self.tokenizers = dict(tokenizers)
        self.max_tokens, self.special_count, self.separators = max_tokens, special_count, separators
        self.word_starts, self.truncate = word_starts, truncate
        self.columns = {name: id_format(tokenizer) for name, tokenizer in self.tokenizers.items()}
        if word_starts:
            self.columns["starts"] = "<u1"
        self.spec = {
            "texts": {name: tokenizer.hash for name, tokenizer in self.tokenizers.items()},
            "max_tokens": max_tokens,
            "marks": special_count,
            "together": separators is not None,
            "columns": self.columns,
        } | ({"truncate": True} if truncate else {})

    def encode(self, chunk: Sequence[Example]) -> Iterator[EncodedRow | Dropped]:
        random = [getattr(example, "bpe_dropout", None) is not None for example in chunk]
        sides = [
            encode_texts(tokenizer, ["" if skip else _text(one, side) for one, skip in zip(chunk, random, strict=True)])
            for side, tokenizer in enumerate(self.tokenizers.values())
        ]
        for number, example in enumerate(chunk):
            row: EncodedRow = [side[number] for side in sides]
            if random[number]:
                row = self._segment_randomly(example)
            to = getattr(example, "to", None)
            if to is not None:  # multilingual models read the target language first
                row[0] = [next(iter(self.tokenizers.values())).language(to), *row[0]]
            joined = self.separators is not None
            separators = self.separators or 0 if len(example.texts) == len(sides) else 0
            if self.truncate and self.max_tokens is not None:
                others = sum(map(len, row[1:])) if joined else 0
                room = self.max_tokens - self.special_count - separators - others
                if len(row[0]) > room > 0:
                    row[0], self.truncated = row[0][:room], self.truncated + 1
            lengths = [len(ids) for ids in row]
            tokens = (sum(lengths) if joined else max(lengths)) + self.special_count + separators
            dropped = self.drop_if_too_long(tokens)
            more = self.extra_columns(example)
            yield dropped or (more if isinstance(more, Dropped) else row + more)

    def _segment_randomly(self, example: Any) -> EncodedRow:
        texts = zip(self.tokenizers.values(), example.texts, strict=True)
        return [tokenizer.bpe_dropout(example.bpe_dropout).encode(t, example.segmentation) for tokenizer, t in texts]

    def extra_columns(self, example: Any) -> EncodedRow | Dropped:
        """The columns besides the texts."""
        if not self.word_starts:
            return []
        (tokenizer,) = self.tokenizers.values()
        return [[start for block in split_blocks(example.text) for start in tokenizer.word_starts(block)]]


def _text(example: Example, side: int) -> str:
    """The text of this column; empty where an example has fewer texts than there are columns."""
    return example.texts[side] if side < len(example.texts) else ""


class LabelledTextEncoding(TextEncoding):
    """Texts and the index of their label, or of each of their labels."""

    name = "WithLabel"

    def __init__(self, *texts: Any, labels: Sequence[str], **options: Any) -> None:
        super().__init__(*texts, **options)
        self.numbers = {label: number for number, label in enumerate(labels)}
        self.columns["label"] = "<u4"
        self.spec |= {"labels": list(labels)}

    def extra_columns(self, example: Any) -> EncodedRow | Dropped:
        unseen = [label for label in example.labels if label not in self.numbers]
        return drop_unseen_label(unseen[0]) if unseen else [[self.numbers[label] for label in example.labels]]


class ScoredTextEncoding(TextEncoding):
    """Two texts and their similarity score."""

    name = "WithScore"

    def __init__(self, *texts: Any, **options: Any) -> None:
        super().__init__(*texts, **options)
        self.columns["score"] = "<f4"

    def extra_columns(self, example: Any) -> EncodedRow:
        return [[example.score]]


class TagEncoding(Encoding):
    """The tokens of all words, and per token the index of its word's tag, from 1; 0 where a token continues a word."""

    name = "Tags"

    def __init__(self, tokenizer: Tokenizer, labels: Sequence[str], max_tokens: int, special_count: int = 2) -> None:
        self.tokenizer, self.max_tokens, self.special_count = tokenizer, max_tokens, special_count
        self.numbers = {label: number for number, label in enumerate(labels, start=1)}
        self.columns = {"text": id_format(tokenizer), "tags": "<u4"}
        self.spec = {"texts": {"text": tokenizer.hash}, "labels": list(labels)}
        self.spec |= {"max_tokens": max_tokens, "marks": special_count}

    def encode(self, chunk: Sequence[Tagged]) -> Iterator[EncodedRow | Dropped]:
        for example, words in zip(chunk, encode_words(self.tokenizer, [e.words for e in chunk]), strict=True):
            unknown = [tag for tag in example.tags if tag not in self.numbers]
            if unknown:
                yield drop_unseen_label(unknown[0])
                continue
            tags: list[int] = []
            for word, tag in zip(words, example.tags, strict=True):
                tags += [self.numbers[tag], *[0] * (len(word) - 1)]
            ids = [number for word in words for number in word]
            yield self.drop_if_too_long(len(ids) + self.special_count) or [ids, tags]


def drop_unseen_label(label: str) -> Dropped:
    """Official test sets do contain such labels: they have no loss, but predictions for them count as wrong."""
    return Dropped("label unseen in training", f"{label!r} does not occur in the training data")


def encode_words(tokenizer: Tokenizer, sentences: Sequence[Sequence[str]]) -> list[list[list[int]]]:
    """Token ids word by word, so that no token spans two words. A word is encoded with the space before it, unless it
    is the first word or continues a run of Chinese or Japanese."""
    flat = [text for words in sentences for text in add_spaces(words)]
    ids = iter(tokenizer.encode_batch(flat))
    return [[next(ids) for _ in words] for words in sentences]


def add_spaces(words: Sequence[str]) -> list[str]:
    spaced = []
    for number, word in enumerate(words):
        run = number > 0 and EAST_ASIAN_CHARACTER.match(words[number - 1][-1:]) and EAST_ASIAN_CHARACTER.match(word)
        spaced.append(word if number == 0 or run else f" {word}")
    return spaced


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts of any length. Books are encoded in blocks of lines to bound memory."""
    split = [split_blocks(text) for text in texts]
    ids = iter(tokenizer.encode_batch([block for parts in split for block in parts]))
    return [[number for _ in parts for number in next(ids)] for parts in split]


def split_blocks(text: str) -> list[str]:
    """Blocks of at least `BLOCK` characters that end with a line; short texts are one block."""
    blocks = []
    begin = 0
    while len(text) - begin > BLOCK:
        end = text.find("\n", begin + BLOCK)
        if end < 0:
            break
        blocks.append(text[begin : end + 1])
        begin = end + 1
    return [*blocks, text[begin:]]
