"""The prepared files: pairs by domain, word alignment, pairs with linked words."""

from __future__ import annotations

import gzip
import random
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pairs import Pair

from augmentation.lexicon import Lexicon, Words, learn

DOMAINS = ("everyday", "general", "stories", "parliament")
LINKED = 40_000  # pairs with aligned words
SAMPLE = {"de": 80_000, "fr": 80_000, "zh": 100_000}  # pairs that word alignment is learnt from


@dataclass(frozen=True)
class Linked:
    """A pair with words that translate each other: (start, end) in English and in the other language."""

    english: str
    other: str
    links: list[tuple[tuple[int, int], tuple[int, int]]]


@dataclass
class Language:
    """The prepared files of English and another language."""

    name: str
    data: Path

    def read(self, domain: str) -> list[Pair]:
        path = self.data / f"en-{self.name}.{domain}.tsv.gz"
        if not path.is_file():
            return []
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
            return [(row[0], row[1]) for line in file if len(row := line.rstrip("\n").split("\t")) == 2]

    @cached_property
    def domains(self) -> dict[str, list[Pair]]:
        return {domain: self.read(domain) for domain in (*DOMAINS, "manual", "interface", "dictionary")}

    @cached_property
    def pairs(self) -> list[Pair]:
        found = [pair for domain in DOMAINS for pair in self.domains[domain]]
        random.Random(0).shuffle(found)
        return found

    @cached_property
    def everyday(self) -> list[Pair]:
        found = [pair for domain in ("everyday", "stories") for pair in self.domains[domain] if len(pair[0]) < 150]
        random.Random(1).shuffle(found)
        return found

    @cached_property
    def words(self) -> Words:
        found = Words(other for _, other in self.domains["dictionary"])
        if self.name == "zh":
            found.learn(other for _, other in self.pairs)
        return found

    @cached_property
    def lexicon(self) -> Lexicon:
        short = [pair for pair in self.pairs if len(pair[0]) < 110][: SAMPLE[self.name]]
        return learn([tuple([token.word.lower() for token in self.words(text)] for text in pair) for pair in short])  # type: ignore[misc]

    @cached_property
    def cases(self) -> tuple[Counter[str], Counter[str]]:
        """How often each spelling occurs in English and in the other language, but at the beginning of a sentence."""
        some = self.pairs[:60_000]
        english, other = (Counter(t.word for pair in some for t in self.words(pair[n])[1:]) for n in (0, 1))
        return english, other

    def spelled(self, word: str, language: str) -> str:
        return max((word, word.capitalize()), key=self.cases[language != "en"].__getitem__)

    @cached_property
    def linked(self) -> list[Linked]:
        """Pairs with at least one link between words that are not among the most frequent."""
        frequent = [{word for word, _ in counts.most_common(120)} for counts in self.lexicon.counts]
        found = []
        for pair in self.pairs[:LINKED]:
            if len(pair[0]) > 220:
                continue
            here, there = self.words(pair[0]), self.words(pair[1])
            links = [
                ((here[i].start, here[i].end), (there[j].start, there[j].end))
                for i, j in self.lexicon.links(here, there, 0.03)
                if here[i].word.lower() not in frequent[0]
                and there[j].word.lower() not in frequent[1]
                and len(here[i].word) > 2
            ]
            if links:
                found.append(Linked(*pair, links))
        return found


@dataclass
class Direction:
    """A language pair in one direction."""

    here: str
    there: str
    language: Language

    def turn(self, pair: Any) -> Any:
        return tuple(pair) if self.here == "en" else tuple(pair)[::-1]
