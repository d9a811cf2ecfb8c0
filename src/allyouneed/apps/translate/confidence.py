"""Confidence of whole translations and of their words (tasks/translation/confidence.py says what it means)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from allyouneed.apps.translate.numbers.numbers import differing_numbers
from allyouneed.apps.translate.spans.carry import ChunkTranslation
from allyouneed.apps.translate.splitting.edits import moved
from allyouneed.apps.translate.splitting.split import Chunk
from allyouneed.data.languages import EAST_ASIAN
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.infer.decoding.alignment import target_spans
from allyouneed.tasks.translation.confidence import Confidence, Evidence

WIDE, LETTER = rf"(?:(?={EAST_ASIAN.pattern})[^\W_])", rf"(?:(?!{EAST_ASIAN.pattern})[^\W_])"
WORD = re.compile(rf"{WIDE}+|{LETTER}+(?:['’\-]{LETTER}+)*")


@dataclass(frozen=True)
class WordConfidence:
    """A word of a translation, its characters, and the probability that it is right. Text without spaces (Chinese) has
    one entry for each token."""

    text: str
    span: tuple[int, int]
    confidence: float


def evidence_of(chunk: Chunk, answer: ChunkTranslation) -> Evidence:
    found = [part.hypothesis for part in answer.parts]
    return Evidence(
        [log_prob for one in found for log_prob in one.log_probs],
        len(chunk.text),
        len(answer.text),
        bool(differing_numbers(chunk.text, answer.text)),
        all(one.finished for one in found),
    )


def words_of(
    answer: ChunkTranslation, at: int, text: str, tokenizer: Tokenizer, confidence: Confidence, sentence: float
) -> Iterator[WordConfidence]:
    """The words of an answer that begins at this offset of the translation `text`. What was put in place of a stand-in
    (a URL, a glossary term) has the confidence of the stand-in. `sentence`: the confidence of the answer."""
    tokens = []
    for part in answer.parts:
        spans = target_spans(tokenizer, part.hypothesis.tokens)
        for span, log_prob in zip(spans, part.hypothesis.log_probs, strict=False):  # the end mark has no characters
            begin, end = moved(span, part.edits)
            tokens.append((begin + part.target + at, end + part.target + at, log_prob))
    for found in WORD.finditer(text, at, at + len(answer.text)):
        inside = [one for one in tokens if one[0] < found.end() and found.start() < one[1]]
        if EAST_ASIAN.match(found[0]):
            for begin, end, log_prob in inside:
                begin, end = max(begin, found.start()), min(end, found.end())
                yield WordConfidence(text[begin:end], (begin, end), confidence.of_word(log_prob, sentence))
        elif inside:
            least = min(log_prob for *_, log_prob in inside)
            yield WordConfidence(found[0], found.span(), confidence.of_word(least, sentence))
