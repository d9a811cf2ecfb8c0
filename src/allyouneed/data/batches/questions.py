"""Questions and the windows of their texts: a long text is read in overlapping pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allyouneed.data.batches.encoding import Dropped, EncodedRow, Encoding, id_format
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items
from allyouneed.data.batches.store import Store
from allyouneed.data.files.questions import AskedText
from allyouneed.data.tokenizers.base import Tokenizer

LEAST = 8  # tokens of a text that are read with a question, at least


class QuestionEncoding(Encoding):
    """The tokens of question and text, and the first and last token of the first answer, from 1; 0: there is none."""

    name = "Questions"
    max_tokens: int

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, unanswerable: bool) -> None:
        self.tokenizer, self.max_tokens, self.unanswerable = tokenizer, max_tokens, unanswerable
        ids = id_format(tokenizer)
        self.columns = {"question": ids, "text": ids, "answer": "<u4"}
        self.spec = {"texts": {"text": tokenizer.hash, "question": tokenizer.hash}, "max_tokens": max_tokens}
        self.spec |= {"unanswerable": unanswerable}

    def encode(self, chunk: Sequence[AskedText]) -> Iterator[EncodedRow | Dropped]:
        questions = self.tokenizer.encode_batch([example.question for example in chunk])
        texts = self.tokenizer.encode_batch([example.context for example in chunk])
        for example, question, text in zip(chunk, questions, texts, strict=True):
            room = self.max_tokens - self.tokenizer.template.count(2) - len(question)
            if room < LEAST:
                yield Dropped("too many tokens", f"the question has {len(question)} tokens of {self.max_tokens}")
            elif not example.answers and not self.unanswerable:
                yield Dropped("no answer", "set task.unanswerable: true to learn which questions have none")
            else:
                yield [question, text, self._ends(example)]

    def _ends(self, example: AskedText) -> list[int]:
        if not example.answers:
            return [0, 0]
        begin, end = example.begins[0], example.begins[0] + len(example.answers[0])
        inside = [n for n, (a, b) in enumerate(self.tokenizer.spans(example.context), 1) if a < end and b > begin]
        return [inside[0], inside[-1]] if inside else [0, 0]


class Windows(NamedTuple):
    """Window n is `lengths[n]` tokens of text `texts[n]` from `begins[n]` on."""

    texts: Ints
    begins: Ints
    lengths: Ints

    @classmethod
    def split(cls, lengths: Ints, rooms: Ints, share: float) -> Windows:
        """Texts of these lengths in windows of up to `rooms` tokens, each beginning `share` of its room after the one
        before. The last one ends with the text."""
        steps = np.maximum(1, (rooms * share).astype(np.int64))
        counts = 1 + np.maximum(0, -(-(lengths - rooms) // steps))
        texts = np.repeat(np.arange(len(lengths)), counts)
        number = np.arange(len(texts)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = np.minimum(number * steps[texts], np.maximum(0, lengths - rooms)[texts])
        return cls(texts, begins, np.minimum(lengths[texts] - begins, rooms[texts]))


class QuestionItems(Items):
    """A question and a window of its text, as two texts in a row. The answer is the row's positions of its first and
    last token: those of the first token of the row, if the window does not contain it whole."""

    one_per_row = True

    def __init__(self, store: Store, tokenizer: Tokenizer, max_tokens: int, share: float) -> None:
        self.store, self.tokenizer = store, tokenizer
        store.check(text=tokenizer, question=tokenizer)
        self.pads = (tokenizer.pad,)
        asked, lengths = (store[name].lengths.astype(np.int64) for name in ("question", "text"))
        rooms = max_tokens - tokenizer.template.count(2) - asked
        self.windows = Windows.split(lengths, rooms, share)
        self._lengths = self.windows.lengths + asked[self.windows.texts] + tokenizer.template.count(2)

    def __len__(self) -> int:
        return len(self.windows.texts)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self._lengths,)

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        tokens, types, answers = list[int](), list[int](), []
        for number in members.tolist():
            text, begin, length = (int(part[number]) for part in self.windows)
            question = self.store["question"][text].tolist()
            row, kinds = self.tokenizer.frame(question, self.store["text"][text][begin : begin + length].tolist())
            offset = text_offset(self.tokenizer, len(question))
            first, last = (int(end) - 1 - begin for end in self.store["answer"][text])
            inside = 0 <= first <= last < length
            answers.append([offset + first, offset + last] if inside else [0, 0])
            tokens, types = tokens + row, types + kinds
        side = FlatSide(np.array(tokens, np.int64), {"types": np.array(types, np.int64)})
        return FlatBatch((side,), answers=np.array(answers, np.int64))

    def show(self, number: int) -> dict[str, str]:
        text, begin, length = (int(part[number]) for part in self.windows)
        shown = self.store["text"][text][begin : begin + length].tolist()
        return {
            "question": self.tokenizer.decode(self.store["question"][text].tolist()),
            "text": self.tokenizer.decode(shown),
        }


def text_offset(tokenizer: Tokenizer, question: int) -> int:
    """Where the text begins in a row, after a question of this many tokens."""
    return len(tokenizer.template.before) + question + len(tokenizer.template.between)
