"""What each word of a sentence is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from allyouneed.data.batches.encoding import add_spaces, encode_words
from allyouneed.data.files.labels import Tagged
from allyouneed.data.tokenizers.base import EAST_ASIAN_CHARACTER
from allyouneed.errors import UserError
from allyouneed.evaluate.answers import Span, accuracy, has_spans, macro_f1, span_f1, spans
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import Judged, Predictor, in_batches, spread
from allyouneed.nn.batch import Batch

Sentence = str | Sequence[str]


@dataclass(frozen=True)
class Tags:
    """A sentence as words, the tag of each, and what BIO tags say together."""

    words: list[str]
    tags: list[str]

    @property
    def spans(self) -> list[tuple[str, list[str]]]:
        """(kind, words) of every span."""
        return [(span.kind, self.words[span.begin : span.end]) for span in self.places]

    @property
    def places(self) -> list[Span]:
        return spans(self.tags)


class Tagger(Predictor):
    """Tags words. A sentence is a list of words, or a string: it is parted at spaces, Chinese and Japanese into
    characters. A sentence longer than what the model was trained on is tagged in parts."""

    @property
    def labels(self) -> list[str]:
        return list(self.folder.labels)

    def tag(self, sentences: str | Sequence[Sentence]) -> Any:
        """(word, tag) for each word of a sentence (a string), or of each sentence of a list."""
        many = [sentences] if isinstance(sentences, str) else sentences
        found = [list(zip(full.words, full.tags, strict=True)) for full in self.tag_full(many)]
        return found[0] if isinstance(sentences, str) else found

    def tag_full(self, sentences: Sequence[Sentence]) -> list[Tags]:
        if isinstance(sentences, str):
            raise UserError("tag_full takes a list of sentences; write [sentence] for a single one")
        worded = [self._words(sentence) for sentence in sentences]
        if self.tokenizer.foreign:
            encoded = [self._in_text(*both) for both in zip(sentences, worded, strict=True)]
        else:
            encoded = encode_words(self.tokenizer, worded)
        parts = [(number, part) for number, words in enumerate(encoded) for part in self._parts(words)]
        rows = [self.tokenizer.frame([i for word in part for i in word]) for _, part in parts]

        def answer(batch: list[int]) -> list[list[int]]:
            given = self.given([rows[n] for n in batch])
            best: list[list[int]] = self.model.logits(Batch(given)).argmax(-1).tolist()
            return best

        found: list[list[str]] = [[] for _ in sentences]
        for (number, part), tags in zip(parts, in_batches(self.model, [len(r) for r, _ in rows], answer), strict=True):
            place = len(self.tokenizer.template.before)
            last = place + sum(map(len, part)) - 1
            for word in part:
                found[number].append(self.folder.labels[tags[max(0, min(place, last))]])
                place += len(word)
        return [Tags(words, tags) for words, tags in zip(worded, found, strict=True)]

    def _words(self, sentence: Any) -> list[str]:
        if isinstance(sentence, str):
            return split_words(sentence)
        words = list(sentence)
        if not all(isinstance(word, str) and word.strip() for word in words):
            raise UserError("a sentence is a string, or a list of words of which none is empty")
        return words

    def _in_text(self, sentence: Sentence, words: list[str]) -> list[list[int]]:
        """The tokens of each word from its first one on, of a text that is read whole, as other people's taggers were
        trained; none for a word that shares its first token with the next."""
        text = sentence.strip() if isinstance(sentence, str) else "".join(add_spaces(words))
        ids, places = self.tokenizer.encode(text), self.tokenizer.spans(text)
        firsts, at, token = [], 0, 0
        for word in words:
            begin = text.index(word, at)
            at = begin + len(word)
            while token < len(places) and places[token][1] <= begin:
                token += 1
            firsts.append(token)
        if not firsts:
            return []
        firsts[0] = 0  # what stands before the first word goes with it
        return [ids[here:there] for here, there in zip(firsts, [*firsts[1:], len(ids)], strict=True)]

    def _parts(self, words: list[list[int]]) -> list[list[list[int]]]:
        """Words together as long as they fit between the marks; a word that is too long by itself is cut."""
        room = self.longest - self.tokenizer.template.count()
        parts: list[list[list[int]]] = []
        used = room + 1
        for word in words:
            word = word[:room]
            if used + len(word) > room:
                parts.append([])
                used = 0
            parts[-1].append(word)
            used += len(word)
        return parts

    def judge(
        self, examples: Sequence[Tagged], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> Judged:
        found = [full.tags for full in self.tag_full([example.words for example in examples])]
        expected = [list(example.tags) for example in examples]
        flat, wanted = [t for tags in found for t in tags], [t for tags in expected for t in tags]
        in_spans = has_spans(self.labels)
        f1 = span_f1(found, expected) if in_spans else macro_f1(flat, wanted)
        figures = {"f1": f1, "accuracy": accuracy(flat, wanted)}
        what = "of spans" if in_spans else "mean over the tags"
        text = f"F1       {f1:5.1f}  {what}\naccuracy {figures['accuracy']:5.1f} %  of {len(flat)} words"
        samples = [
            {"expected": _shown(example.words, example.tags), "found": _shown(example.words, tags)}
            for example, tags in spread(list(zip(examples, found, strict=True)), show)
        ]
        return Judged(figures, text, samples)


def split_words(text: str) -> list[str]:
    words: list[str] = []
    for word in text.split():
        run = ""
        for character in word:
            if EAST_ASIAN_CHARACTER.match(character):
                words += [run] if run else []
                words.append(character)
                run = ""
            else:
                run += character
        words += [run] if run else []
    return words


def _shown(words: Sequence[str], tags: Sequence[str]) -> str:
    return " ".join(word if tag == "O" else f"{word}/{tag}" for word, tag in zip(words, tags, strict=True))
