"""Language detection: naive Bayes over frequent words, character n-grams and scripts.

Frequent words tell more than the spelling of the others, which may be names and loan words: *Das Meeting wurde
gecancelt* is German by two of its four words. So the spelling of a word counts up to a limit.

Trained in seconds on the sentences of the training pairs and stored in the model folder (`languages.json`). It knows
the languages of its model only: a text in any other is assigned to the most similar one.
"""

from __future__ import annotations

import json
import math
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from allyouneed.errors import UserError
from allyouneed.files import write_text
from allyouneed.files.reading import read_text

if TYPE_CHECKING:
    from allyouneed.data.files.readers import Files

SAMPLED = 20_000  # training sentences per language
KEPT = 2000  # n-grams kept per language
WORDS = 1000  # words kept per language
SPELLING = 40  # -10 · ln p: what the n-grams of a word may say for one language against another
LONGEST = 3  # characters of an n-gram
READ = 1000  # characters of a text to use
RARE = 70  # -10 · ln p of a script: one letter in a thousand n-grams
SURE = 3.0  # nats between the best and the second language: twenty to one
SHORT = 20  # letters: with fewer, a name or a loan word may decide
EAST_ASIAN_LETTER = 3  # a Chinese, Japanese or Korean letter says as much as this many others
EAST_ASIAN = ("<CJK>", "<HIRAGANA>", "<KATAKANA>", "<HANGUL>")
EAST_ASIAN_WORDS = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]+")


@cache
def _script(character: str) -> str:
    """`<CJK>`, `<LATIN>`: informative even for a character never seen before."""
    return f"<{unicodedata.name(character, '?').split(maxsplit=1)[0]}>"


def _words(text: str) -> list[str]:
    """The words of a text, each between spaces; East Asian words are one up to the next space or other letter."""
    letters = re.sub(r"[\W\d_]+", " ", text[:READ].lower())
    return [f" {word} " for word in EAST_ASIAN_WORDS.sub(r" \g<0> ", letters).split()]


def _ngrams(text: str) -> list[str]:
    """N-grams of one to three letters, with a space at word boundaries, and the script of each letter."""
    letters = re.sub(r"[\W\d_]+", " ", f" {text[:READ].lower()} ")
    found = [letters[i : i + size] for size in range(1, LONGEST + 1) for i in range(len(letters) - size + 1)]
    return [run for run in found if run.strip()] + [_script(letter) for letter in letters if letter != " "]


class _DetectorFile(BaseModel):
    model_config = ConfigDict(strict=True)

    languages: Annotated[list[str], Field(min_length=1, max_length=10_000)]
    scores: dict[str, list[Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]]]


class LanguageDetector:
    """`scores[ngram]` is -10 · ln p(ngram | language) for each of `languages`, rounded, and so is `scores[" word "]`.
    Earlier detectors have no words."""

    def __init__(self, languages: Sequence[str], scores: Mapping[str, Sequence[int]]) -> None:
        self.languages, self.scores = list(languages), dict(scores)
        self._has_words = any(len(run) > LONGEST and run[0] == " " for run in self.scores)
        self._word = lru_cache(maxsize=10_000)(self._word_scores)

    def detect(self, text: str, confident: bool = False) -> str | None:
        """The most likely language. None for a text without letters; with `confident`, also if another is plausible."""
        found, nats = self.detect_odds(text)
        return None if confident and nats < SURE else found

    def detect_odds(self, text: str) -> tuple[str | None, float]:
        """The most likely language, and its log odds against the second (nats). (None, 0) without letters."""
        if self._has_words:
            known = [found for word in _words(text) if (found := self._word(word)) is not None]
        else:
            known = [self.scores[run] for run in _ngrams(text) if run in self.scores]
        if not known:
            return None, 0.0
        totals = sorted(
            (sum(column), name) for column, name in zip(zip(*known, strict=True), self.languages, strict=True)
        )
        return totals[0][1], (totals[1][0] - totals[0][0]) / 10 if len(totals) > 1 else math.inf

    def _word_scores(self, word: str) -> Sequence[int] | None:
        """What a word says: its spelling, up to a limit (twice that for each East Asian letter), and itself, if
        it is frequent."""
        known = [self.scores[run] for run in _ngrams(word) if run in self.scores]
        if not known:
            return None
        sums = [sum(column) for column in zip(*known, strict=True)]
        most = min(sums) + SPELLING * max(1, 2 * sum(_script(letter) in EAST_ASIAN for letter in word))
        itself = self.scores.get(word, ()) if len(word) > LONGEST else ()
        return [min(spelling, most) + own for spelling, own in zip(sums, itself or [0] * len(sums), strict=True)]

    def is_short(self, text: str) -> bool:
        """Whether a text has too few letters to tell its language."""
        scripts = [_script(letter) for letter in text[:READ] if letter.isalpha()]
        return sum(EAST_ASIAN_LETTER if script in EAST_ASIAN else 1 for script in scripts) < SHORT

    def can_be(self, text: str, language: str) -> bool:
        """Whether a language uses the scripts of all letters of a text: `我是Tom` is not German."""
        column = self.languages.index(language)
        scripts = {_script(letter) for letter in text[:READ] if letter.isalpha()}
        return all(self.scores.get(script, [RARE] * len(self.languages))[column] < RARE for script in scripts)

    def is_unfamiliar(self, text: str) -> bool:
        """Whether most letters of a text are in scripts that none of the languages uses."""
        scripts = [_script(letter) for letter in text[:READ] if letter.isalpha()]
        return 2 * sum(self._foreign(script) for script in scripts) > len(scripts)

    def _foreign(self, script: str) -> bool:
        """Whether all languages almost never use it."""
        return min(self.scores.get(script, (RARE,))) >= RARE

    @classmethod
    def learn(cls, texts: Mapping[str, Iterable[str]]) -> LanguageDetector:
        """Train a detector on sentences of each language; one written without letters (numbers, dates) is left out."""
        held = {name: list(texts[name]) for name in sorted(texts)}
        every = {name: Counter(run for text in some for run in _ngrams(text)) for name, some in held.items()}
        counts = {name: count for name, count in every.items() if count}
        words = {name: Counter(word for text in held[name] for word in _single(text)) for name in counts}
        return cls(list(counts), _scores(counts, KEPT) | _scores(words, WORDS, LONGEST + 1))

    def with_words(self, texts: Mapping[str, Iterable[str]]) -> LanguageDetector:
        """The same n-grams with the frequent words of these sentences of each of its languages."""
        words = {name: Counter(word for text in texts[name] for word in _single(text)) for name in self.languages}
        runs = {run: scores for run, scores in self.scores.items() if len(run) <= LONGEST or run[0] != " "}
        return LanguageDetector(self.languages, runs | _scores(words, WORDS, LONGEST + 1))

    @classmethod
    def from_files(cls, files: Sequence[Files]) -> LanguageDetector | None:
        """Train on a sample of training pairs with language tags; None if they have fewer than two languages."""
        from allyouneed.data.files.readers import Report

        rng, drawn, seen = random.Random(0), dict[str, list[str]](), Counter[str]()
        for entry in files:
            names = getattr(entry, "from_", None), getattr(entry, "to", None)
            if names == (None, None):
                continue
            for pair in entry.read(Report()):
                for name, text in zip(names, pair.texts, strict=True):
                    if name is None:
                        continue
                    held = drawn.setdefault(name, [])
                    seen[name] += 1
                    if len(held) < SAMPLED:
                        held.append(text)
                    elif (index := rng.randrange(seen[name])) < SAMPLED:
                        held[index] = text
        found = cls.learn(drawn)
        return found if len(found.languages) > 1 else None

    def save(self, path: Path) -> None:
        tree = {"languages": self.languages, "scores": self.scores}
        write_text(path, json.dumps(tree, ensure_ascii=False, separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: Path) -> LanguageDetector:
        text = read_text(path.parent, path.name)
        try:
            found = _DetectorFile.model_validate_json(text)
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"]
            raise UserError(f"{path}: cannot be read: {reason}; copy or train the model again") from None
        if any(len(scores) != len(found.languages) for scores in found.scores.values()):
            raise UserError(f"{path}: cannot be read: not a score for each language; copy or train the model again")
        return cls(found.languages, found.scores)


def _single(text: str) -> Iterator[str]:
    """The words of a text; of East Asian ones each letter, which counts as a word but is learned as an n-gram."""
    for word in _words(text):
        yield from word[1:-1] if _script(word[1]) in EAST_ASIAN else (word,)


def _scores(counts: Mapping[str, Counter[str]], most: int, least: int = 1) -> dict[str, list[int]]:
    """-10 · ln p of the `most` frequent runs of each language of at least `least` characters, in every language."""
    kept = sorted({run for count in counts.values() for run, _ in _most_common(count, most) if len(run) >= least})
    totals = {name: sum(count.values()) for name, count in counts.items()}
    return {
        run: [
            round(-10 * math.log((count[run] + 0.5) / (totals[name] + 0.5 * len(kept))))
            for name, count in counts.items()
        ]
        for run in kept
    }


def _most_common(count: Counter[str], most: int) -> list[tuple[str, int]]:
    """The most common runs, equal counts by name: the same text always gives the same detector."""
    return sorted(count.items(), key=lambda item: (-item[1], item[0]))[:most]
