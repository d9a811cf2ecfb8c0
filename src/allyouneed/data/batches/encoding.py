"""From examples to the columns of a store: token ids of each text, and numbers beside them (a label, a score, tags)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from allyouneed.data.files.labels import Tagged
from allyouneed.data.files.readers import Example
from allyouneed.data.tokenizers.base import EAST_ASIAN_CHARACTER, Tokenizer

BLOCK = 1 << 16  # characters of a long text that are encoded in one go


class LeftOut(NamedTuple):
    """Why an example cannot be used."""

    why: str
    detail: str


Row = list[Sequence[float]]  # a sequence of numbers for each column


class Encoding(ABC):
    """How a task writes its examples down. `columns`: names and number formats; `facts`: all that the numbers depend on
    besides the examples; `max_tokens`: the longest that is kept, None when long ones are cut later."""

    columns: dict[str, str]
    facts: dict[str, Any]
    max_tokens: int | None

    @abstractmethod
    def encode(self, chunk: Sequence[Any]) -> Iterator[Row | LeftOut]:
        """One answer for each example."""

    def too_long(self, tokens: int) -> LeftOut | None:
        if self.max_tokens is None or tokens <= self.max_tokens:
            return None
        return LeftOut("too many tokens", f"{tokens} tokens with the end mark, at most {self.max_tokens}")


def id_format(tokenizer: Tokenizer) -> str:
    return "<u2" if tokenizer.size <= 1 << 16 else "<u4"


class Texts(Encoding):
    """A column for each text. An example is left out when a text has more than `max_tokens`, `template` counted; with
    `together`, when all its texts have, and so many marks more between them."""

    def __init__(
        self,
        tokenizers: Mapping[str, Tokenizer],
        max_tokens: int | None,
        marks: int = 1,
        together: int | None = None,
        word_starts: bool = False,
    ) -> None:
        self.tokenizers = dict(tokenizers)
        self.max_tokens, self.marks, self.together, self.word_starts = max_tokens, marks, together, word_starts
        self.columns = {name: id_format(tokenizer) for name, tokenizer in self.tokenizers.items()}
        if word_starts:
            self.columns["starts"] = "<u1"
        self.facts = {
            "texts": {name: tokenizer.hash for name, tokenizer in self.tokenizers.items()},
            "max_tokens": max_tokens,
            "marks": marks,
            "together": together is not None,
            "columns": self.columns,
        }

    def encode(self, chunk: Sequence[Example]) -> Iterator[Row | LeftOut]:
        sides = [
            encode_all(tokenizer, [_text(example, side) for example in chunk])
            for side, tokenizer in enumerate(self.tokenizers.values())
        ]
        for number, example in enumerate(chunk):
            row: Row = [side[number] for side in sides]
            to = getattr(example, "to", None)
            if to is not None:  # the language to translate into is the first thing a model hears
                row[0] = [next(iter(self.tokenizers.values())).language(to), *row[0]]
            lengths = [len(ids) for ids in row]
            together = self.together is not None
            between = self.together or 0 if len(example.texts) == len(sides) else 0
            left_out = self.too_long((sum(lengths) if together else max(lengths)) + self.marks + between)
            more = self.besides(example)
            yield left_out or (more if isinstance(more, LeftOut) else row + more)

    def besides(self, example: Any) -> Row | LeftOut:
        """The columns that are no texts."""
        if not self.word_starts:
            return []
        (tokenizer,) = self.tokenizers.values()
        return [[start for block in blocks(example.text) for start in tokenizer.word_starts(block)]]


def _text(example: Example, side: int) -> str:
    """An example may have fewer texts than there are columns: a second text is not always there."""
    return example.texts[side] if side < len(example.texts) else ""


class WithLabel(Texts):
    """Texts and the number of a label."""

    def __init__(self, *texts: Any, labels: Sequence[str], **options: Any) -> None:
        super().__init__(*texts, **options)
        self.numbers = {label: number for number, label in enumerate(labels)}
        self.columns["label"] = "<u4"
        self.facts |= {"labels": list(labels)}

    def besides(self, example: Any) -> Row | LeftOut:
        number = self.numbers.get(example.label)
        return unseen(example.label) if number is None else [[number]]


class WithScore(Texts):
    """Texts and how alike they are."""

    def __init__(self, *texts: Any, **options: Any) -> None:
        super().__init__(*texts, **options)
        self.columns["score"] = "<f4"

    def besides(self, example: Any) -> Row:
        return [[example.score]]


class Tags(Encoding):
    """The tokens of all words, and beside each the number of its word's tag, from 1; 0 where a word goes on."""

    def __init__(self, tokenizer: Tokenizer, labels: Sequence[str], max_tokens: int, marks: int = 2) -> None:
        self.tokenizer, self.max_tokens, self.marks = tokenizer, max_tokens, marks
        self.numbers = {label: number for number, label in enumerate(labels, start=1)}
        self.columns = {"text": id_format(tokenizer), "tags": "<u4"}
        self.facts = {"texts": {"text": tokenizer.hash}, "labels": list(labels)}
        self.facts |= {"max_tokens": max_tokens, "marks": marks}

    def encode(self, chunk: Sequence[Tagged]) -> Iterator[Row | LeftOut]:
        for example, words in zip(chunk, encode_words(self.tokenizer, [e.words for e in chunk]), strict=True):
            strange = [tag for tag in example.tags if tag not in self.numbers]
            if strange:
                yield unseen(strange[0])
                continue
            tags: list[int] = []
            for word, tag in zip(words, example.tags, strict=True):
                tags += [self.numbers[tag], *[0] * (len(word) - 1)]
            ids = [number for word in words for number in word]
            yield self.too_long(len(ids) + self.marks) or [ids, tags]


def unseen(label: str) -> LeftOut:
    """Official test sets do have such labels: they have no loss, but as answers they count as missed."""
    return LeftOut("label unseen in training", f"{label!r} does not occur in the training data")


def encode_words(tokenizer: Tokenizer, sentences: Sequence[Sequence[str]]) -> list[list[list[int]]]:
    """Token ids word by word, so that no token belongs to two words. A word is encoded as it would stand in a text:
    with a space before it, unless it is the first or stands in a run of Chinese or Japanese."""
    flat = [text for words in sentences for text in spaced(words)]
    ids = iter(tokenizer.encode_batch(flat))
    return [[next(ids) for _ in words] for words in sentences]


def spaced(words: Sequence[str]) -> list[str]:
    found = []
    for number, word in enumerate(words):
        run = number > 0 and EAST_ASIAN_CHARACTER.match(words[number - 1][-1:]) and EAST_ASIAN_CHARACTER.match(word)
        found.append(word if number == 0 or run else f" {word}")
    return found


def encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts of any length: a book is encoded in blocks of lines, so that it is never held twice."""
    cut = [blocks(text) for text in texts]
    ids = iter(tokenizer.encode_batch([block for parts in cut for block in parts]))
    return [[number for _ in parts for number in next(ids)] for parts in cut]


def blocks(text: str) -> list[str]:
    """The text as pieces that begin with a line each; one piece unless it is very long."""
    found = []
    begin = 0
    while len(text) - begin > BLOCK:
        end = text.find("\n", begin + BLOCK)
        if end < 0:
            break
        found.append(text[begin : end + 1])
        begin = end + 1
    return [*found, text[begin:]]
