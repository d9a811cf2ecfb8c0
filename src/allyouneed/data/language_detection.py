"""Which language a text is in: naive Bayes over characters, what stands beside what, and scripts.

Learnt from the sentences of the training pairs in seconds and kept in the model's folder (`languages.json`). It tells
apart the languages of its model and nothing else: a text in another one is taken for the most alike.
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

from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.files.readers import Files, Report
from allyouneed.errors import UserError

SAMPLED = 20_000  # sentences of each language to learn from
KEPT = 2000  # runs of characters of each language to remember
LONGEST = 3  # characters of a run
READ = 1000  # characters of a text that are looked at: enough to be sure
RARE = 70  # -10 · ln p of a script: a letter in a thousand runs
SURE = 3.0  # nats between the first language and the second: twenty to one


@cache
def _script(character: str) -> str:
    """`<CJK>`, `<LATIN>`: what a character never seen before still tells."""
    return f"<{unicodedata.name(character, '?').split(maxsplit=1)[0]}>"


def _runs(text: str) -> list[str]:
    """Runs of one to three letters, with a space where a word begins or ends, and the script of each letter."""
    letters = re.sub(r"[\W\d_]+", " ", f" {text[:READ].lower()} ")
    found = [letters[i : i + size] for size in range(1, LONGEST + 1) for i in range(len(letters) - size + 1)]
    return [run for run in found if run.strip()] + [_script(letter) for letter in letters if letter != " "]


class LanguageDetector:
    """`scores[run]` is -10 · ln p(run | language) for each of `languages`, rounded."""

    def __init__(self, languages: Sequence[str], scores: Mapping[str, Sequence[int]]) -> None:
        self.languages, self.scores = list(languages), dict(scores)

    def detect(self, text: str, sure: bool = False) -> str | None:
        """The likeliest language. None for a text without letters; with `sure`, also when it could be another one."""
        known = [self.scores[run] for run in _runs(text) if run in self.scores]
        if not known:
            return None
        totals = sorted(
            (sum(column), name) for column, name in zip(zip(*known, strict=True), self.languages, strict=True)
        )
        if sure and len(totals) > 1 and totals[1][0] - totals[0][0] < 10 * SURE:
            return None
        return totals[0][1]

    def is_unfamiliar(self, text: str) -> bool:
        """Whether most letters of a text are of scripts that none of the languages is written in."""
        scripts = [_script(letter) for letter in text[:READ] if letter.isalpha()]
        return 2 * sum(self._foreign(script) for script in scripts) > len(scripts)

    def _foreign(self, script: str) -> bool:
        """One that hardly ever comes in any of them."""
        return min(self.scores.get(script, (RARE,))) >= RARE

    @classmethod
    def learn(cls, texts: Mapping[str, Iterable[str]]) -> LanguageDetector:
        """From sentences of each language; one that is written without letters (numbers, dates) cannot be told."""
        every = {name: Counter(run for text in texts[name] for run in _runs(text)) for name in sorted(texts)}
        counts = {name: count for name, count in every.items() if count}
        kept = sorted({run for count in counts.values() for run, _ in _commonest(count)})
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
    def of_files(cls, files: Sequence[Files]) -> LanguageDetector | None:
        """From training pairs that say their languages, drawn from all over them; None if there are not two."""
        chance, drawn, seen = random.Random(0), dict[str, list[str]](), Counter[str]()
        for entry in files:
            if not isinstance(entry, PairFiles):
                continue
            for pair in entry.read(Report()):
                for name, text in ((entry.from_, pair.source), (entry.to, pair.target)):
                    if name is None:
                        continue
                    held = drawn.setdefault(name, [])
                    seen[name] += 1
                    if len(held) < SAMPLED:
                        held.append(text)
                    elif (place := chance.randrange(seen[name])) < SAMPLED:
                        held[place] = text
        found = cls.learn(drawn)
        return found if len(found.languages) > 1 else None

    def save(self, path: Path) -> None:
        tree = {"languages": self.languages, "scores": self.scores}
        path.write_text(json.dumps(tree, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> LanguageDetector:
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            return cls(tree["languages"], tree["scores"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: cannot be read: {error}; copy or train the model again") from None


def _commonest(count: Counter[str]) -> list[tuple[str, int]]:
    """By number, then by name, so that the same text gives the same detector."""
    return sorted(count.items(), key=lambda item: (-item[1], item[0]))[:KEPT]
