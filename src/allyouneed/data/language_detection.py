"""Language detection: naive Bayes over character n-grams and scripts.

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
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
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
LONGEST = 3  # characters of an n-gram
READ = 1000  # characters of a text to use
RARE = 70  # -10 · ln p of a script: one letter in a thousand n-grams
SURE = 3.0  # nats between the best and the second language: twenty to one
SHORT = 20  # letters: with fewer, a name or a loan word may decide
EAST_ASIAN_LETTER = 3  # a Chinese, Japanese or Korean letter says as much as this many others
EAST_ASIAN = ("<CJK>", "<HIRAGANA>", "<KATAKANA>", "<HANGUL>")


@cache
def _script(character: str) -> str:
    """`<CJK>`, `<LATIN>`: informative even for a character never seen before."""
    return f"<{unicodedata.name(character, '?').split(maxsplit=1)[0]}>"


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
    """`scores[ngram]` is -10 · ln p(ngram | language) for each of `languages`, rounded."""

    def __init__(self, languages: Sequence[str], scores: Mapping[str, Sequence[int]]) -> None:
        self.languages, self.scores = list(languages), dict(scores)

    def detect(self, text: str, confident: bool = False) -> str | None:
        """The most likely language. None for a text without letters; with `confident`, also if another is plausible."""
        found, nats = self.detect_odds(text)
        return None if confident and nats < SURE else found

    def detect_odds(self, text: str) -> tuple[str | None, float]:
        """The most likely language, and its log odds against the second (nats). (None, 0) without letters."""
        known = [self.scores[run] for run in _ngrams(text) if run in self.scores]
        if not known:
            return None, 0.0
        totals = sorted(
            (sum(column), name) for column, name in zip(zip(*known, strict=True), self.languages, strict=True)
        )
        return totals[0][1], (totals[1][0] - totals[0][0]) / 10 if len(totals) > 1 else math.inf

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
        every = {name: Counter(run for text in texts[name] for run in _ngrams(text)) for name in sorted(texts)}
        counts = {name: count for name, count in every.items() if count}
        kept = sorted({run for count in counts.values() for run, _ in _most_common(count)})
        totals = {name: sum(count.values()) for name, count in counts.items()}
        scores = {
            run: [
                round(-10 * math.log((count[run] + 0.5) / (totals[name] + 0.5 * len(kept))))
                for name, count in counts.items()
            ]
            for run in kept
        }
        return cls(list(counts), scores)

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


def _most_common(count: Counter[str]) -> list[tuple[str, int]]:
    """The most common n-grams, equal counts by name: the same text always gives the same detector."""
    return sorted(count.items(), key=lambda item: (-item[1], item[0]))[:KEPT]
