"""Word tagging: part of speech, named entities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allyouneed.data.batches.encoding import add_spaces, encode_words
from allyouneed.data.batches.packing import generator
from allyouneed.data.files.labels import Tagged
from allyouneed.data.tokenizers.base import EAST_ASIAN_CHARACTER
from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import EvaluationResult, Predictor, evenly_spaced, run_in_batches
from allyouneed.metrics.answers import EntitySpan, accuracy, has_spans, macro_f1, span_f1, spans
from allyouneed.metrics.ranking import auc
from allyouneed.nn.batch import Batch
from allyouneed.tasks.language.masked_lm import choose_masked
from allyouneed.tasks.task import VALIDATION_SEED

Sentence = str | Sequence[str]
SHARE = 0.15  # of the tokens, replaced when a discriminator is evaluated


@dataclass(frozen=True)
class TaggedSentence:
    """The words of a sentence, their tags, and the spans of BIO tags."""

    words: list[str]
    tags: list[str]

    @property
    def spans(self) -> list[tuple[str, list[str]]]:
        """(kind, words) of every span."""
        return [(span.kind, self.words[span.begin : span.end]) for span in self.places]

    @property
    def places(self) -> list[EntitySpan]:
        return spans(self.tags)


class Tagger(Predictor):
    """Tags words. A sentence is a list of words, or a string, which is split at spaces (Chinese and Japanese: into
    characters). A sentence longer than the training length is tagged in parts."""

    @property
    def labels(self) -> list[str]:
        return list(self.folder.labels)

    def tag(self, sentences: str | Sequence[Sentence]) -> Any:
        """(word, tag) for each word of a sentence (a string), or of each sentence of a list."""
        many = [sentences] if isinstance(sentences, str) else sentences
        found = [list(zip(full.words, full.tags, strict=True)) for full in self.tag_full(many)]
        return found[0] if isinstance(sentences, str) else found

    def tag_full(self, sentences: Sequence[Sentence]) -> list[TaggedSentence]:
        if isinstance(sentences, str):
            raise UserError("tag_full takes a list of sentences; use [sentence] for a single one")
        words_of = [self._words(sentence) for sentence in sentences]
        if self.tokenizer.foreign:
            encoded = [self._encode_in_text(*both) for both in zip(sentences, words_of, strict=True)]
        else:
            encoded = encode_words(self.tokenizer, words_of)
        parts = [(number, part) for number, words in enumerate(encoded) for part in self._parts(words)]
        rows = [self.tokenizer.frame([i for word in part for i in word]) for _, part in parts]

        def answer(batch: list[int]) -> list[list[int]]:
            given = self.to_rows([rows[n] for n in batch])
            return self.best(self.model.logits(Batch(given)))

        found, labels = [list[str]() for _ in sentences], self.labels
        for (number, part), tags in zip(
            parts, run_in_batches(self.model, [len(r) for r, _ in rows], answer), strict=True
        ):
            position = len(self.tokenizer.template.before)
            last = position + sum(map(len, part)) - 1
            for word in part:
                found[number].append(labels[tags[max(0, min(position, last))]])
                position += len(word)
        return [TaggedSentence(words, tags) for words, tags in zip(words_of, found, strict=True)]

    def best(self, scores: Tensor) -> list[list[int]]:
        """The number of the tag of each token, from its scores (…, labels)."""
        found: list[list[int]] = scores.argmax(-1).tolist()
        return found

    def _words(self, sentence: Any) -> list[str]:
        if isinstance(sentence, str):
            return split_words(sentence)
        words = list(sentence)
        if not all(isinstance(word, str) and word.strip() for word in words):
            raise UserError("expected a string or a list of non-empty words")
        return words

    def _encode_in_text(self, sentence: Sentence, words: list[str]) -> list[list[int]]:
        """The tokens of each word when the whole text is tokenized, as imported taggers were trained; empty for a word
        that shares its first token with the next."""
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
        firsts[0] = 0  # tokens before the first word belong to it
        return [ids[here:there] for here, there in zip(firsts, [*firsts[1:], len(ids)], strict=True)]

    def _parts(self, words: list[list[int]]) -> list[list[list[int]]]:
        """Groups of words that fit within `max_input`; a longer word is truncated."""
        room = self.max_input - self.tokenizer.template.count()
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
    ) -> EvaluationResult:
        found = [full.tags for full in self.tag_full([example.words for example in examples])]
        expected = [list(example.tags) for example in examples]
        flat, wanted = [t for tags in found for t in tags], [t for tags in expected for t in tags]
        in_spans = has_spans(self.labels)
        f1 = span_f1(found, expected) if in_spans else macro_f1(flat, wanted)
        figures = {"f1": f1, "accuracy": accuracy(flat, wanted)}
        what = "of spans" if in_spans else "mean over the tags"
        text = f"F1       {f1:5.1f}  {what}\naccuracy {figures['accuracy']:5.1f} %  of {len(flat)} words"
        samples = [
            {"expected": _tagged_text(example.words, example.tags), "found": _tagged_text(example.words, tags)}
            for example, tags in evenly_spaced(list(zip(examples, found, strict=True)), show)
        ]
        return EvaluationResult(figures, text, samples)


class Discriminator(Tagger):
    """Tags each word as `original` or `replaced` (ELECTRA)."""

    @property
    def labels(self) -> list[str]:
        return ["original", "replaced"]

    def best(self, scores: Tensor) -> list[list[int]]:
        found: list[list[int]] = (scores[..., 0] > 0).long().tolist()
        return found

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        """Tell tokens drawn at random from those of the texts; the same ones in every evaluation."""
        own = np.setdiff1d(np.arange(self.tokenizer.size), self.tokenizer.specials)
        texts, replaced = list[np.ndarray](), list[np.ndarray]()
        for number, ids in enumerate(self.tokenizer.encode_batch([example.text for example in examples])):
            rng, kept = generator(VALIDATION_SEED, 0, number), np.array(ids[: self.max_input - 2], np.int64)
            chosen = choose_masked(len(kept), None, SHARE, rng) if len(kept) else np.zeros(0, bool)
            drawn = np.where(chosen, own[rng.integers(len(own), size=len(kept))], kept)
            texts.append(drawn)
            replaced.append(drawn != kept)
        rows, first = [self.tokenizer.frame(ids.tolist()) for ids in texts], len(self.tokenizer.template.before)

        def answer(batch: list[int]) -> list[Tensor]:
            scores = self.model.logits(Batch(self.to_rows([rows[n] for n in batch])))[..., 0].float().cpu()
            return [scores[row, first : first + len(texts[n])] for row, n in enumerate(batch)]

        found = run_in_batches(self.model, [len(row) for row, _ in rows], answer)
        scores, wanted = torch.cat(found).numpy(), np.concatenate(replaced)
        right = (scores > 0) == wanted
        figures = {"auc": auc(scores.tolist(), wanted.tolist()), "accuracy": 100 * float(right.mean())}
        text = f"AUC      {figures['auc']:.3f}\naccuracy {figures['accuracy']:5.1f} %  of {len(wanted):,} tokens"
        samples = [
            {"text": self.tokenizer.decode(texts[n].tolist()), "found": self._shown(texts[n], found[n].numpy() > 0)}
            for n in evenly_spaced(range(len(examples)), show)
        ]
        return EvaluationResult(figures, f"{text}, {SHARE:.0%} of them replaced at random", samples)

    def _shown(self, ids: Any, marked: Any) -> str:
        return " ".join(self.tokenizer.tokens(ids[marked].tolist())) or "nothing"


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


def _tagged_text(words: Sequence[str], tags: Sequence[str]) -> str:
    return " ".join(word if tag == "O" else f"{word}/{tag}" for word, tag in zip(words, tags, strict=True))
