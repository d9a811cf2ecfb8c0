"""Words and phrases of dictionaries, and sentences with marked terms."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from pairs import Pair

from allyouneed.apps.translate.glossary import Term
from allyouneed.apps.translate.spans.term_marks import mark_terms
from augmentation.corpus import Direction
from augmentation.lexicon import HAN
from augmentation.nouns import invented
from augmentation.nouns import words as words_of

FRAGMENTS = set(
    words_of("ll ve re don didn doesn isn wasn won couldn wouldn shouldn aren weren haven hasn hadn tom mary")
)


def word_pairs(direction: Direction) -> list[Pair]:
    """The frequent words of the source language, most frequent first, each with its best translation."""
    language, forward = direction.language, direction.here == "en"
    known: dict[str, list[str]] = {}
    for pair in language.domains["dictionary"]:
        one, two = direction.turn((pair[0].removeprefix("to "), pair[1]))
        if " " not in one and len(two.split()) <= (1 if direction.there != "zh" else 2):
            known.setdefault(one.lower(), []).append(two)
    best = language.lexicon.best[0 if forward else 1]
    found = []
    for word, _ in language.lexicon.counts[0 if forward else 1].most_common(7000):
        if word in FRAGMENTS or (len(word) < 2 and not HAN.match(word)):
            continue
        scores = {two: score for score, two in best.get(word, [])}
        choices = [(scores.get(two.lower(), 0.0), two) for two in known.get(word, [])]
        top = max(choices, default=(0.0, ""), key=lambda one: one[0])
        if top[0] < 0.02 and best.get(word):
            score, two = best[word][0]
            if score > (0.03 if language.name != "zh" else 0.06) and two not in FRAGMENTS:
                top = score, language.spelled(two, direction.there) if direction.there != "zh" else two
        if top[0] > 0:
            found.append((language.spelled(word, direction.here) if direction.here != "zh" else word, top[1]))
    return found


def words(direction: Direction, rng: random.Random) -> Iterator[Pair]:
    for number, (source, target) in enumerate(word_pairs(direction)[:5000]):
        yield source, target
        if number < 2000 and direction.here != "zh":
            yield source.capitalize(), target[:1].upper() + target[1:]
        elif number % 4 == 0 and direction.here != "zh":
            yield source.upper(), target.upper()


def phrases(direction: Direction, rng: random.Random) -> Iterator[Pair]:
    """Entries of the dictionaries that consist of frequent words."""
    frequent = {word for word, _ in direction.language.lexicon.counts[0].most_common(4000)}
    found = [
        pair
        for pair in direction.language.domains["dictionary"]
        if 2 <= len(pair[0].split()) <= 4
        and not re.search("[/(]", pair[1])
        and all(word.lower() in frequent for word in pair[0].split())
    ]
    rng.shuffle(found)
    for english, other in found:
        yield direction.turn((english, other))


def glossary(direction: Direction, rng: random.Random) -> Iterator[Pair]:
    """Marked terms: with the word of the target, with another word, or to be left as they are; some pairs without."""
    linked = direction.language.linked
    alike: dict[str, list[str]] = {}  # words that may replace each other
    for one in linked:
        for link in one.links:
            translation = direction.turn((one.english, one.other))[1][slice(*direction.turn(link)[1])]
            alike.setdefault(shape(translation), []).append(translation)
    while True:
        one = rng.choice(linked)
        source, target = direction.turn((one.english, one.other))
        links = sorted(direction.turn(link) for link in one.links)
        if rng.random() < 0.15:
            yield source, target
            continue
        chosen = sorted(rng.sample(links, min(len(links), rng.choice((1, 1, 1, 2, 2, 3)))))
        if rng.random() < 0.3:
            chosen = adjacent(source, target, links) or chosen
        terms, changes = [], []
        for (start, end), (first, last) in chosen:
            kind, translation = rng.random(), target[first:last]
            if kind < 0.15:  # left as it is
                translation = source[start:end]
            elif kind < 0.4:  # another word, so that the mark decides
                others = alike.get(shape(translation), [])
                if len(others) > 4 and rng.random() < 0.7:
                    translation = rng.choice(others)
                else:
                    translation = invented(rng).capitalize() if translation[:1].isupper() else invented(rng)
            apart = direction.there == "zh" and not HAN.match(translation) and translation != target[first:last]
            changes.append((first, last, f" {translation} " if apart else translation))
            terms.append(Term(start, end, translation))
        for first, last, translation in sorted(changes, reverse=True):
            target = target[:first] + translation + target[last:]
        yield (
            mark_terms(source, terms),
            re.sub(r"  +| (?=[，。？！、])", lambda found: " " * (len(found[0]) > 1), target).strip(),
        )


def shape(word: str) -> str:
    """Its last letters, and whether it is capitalised: most words of one shape have the same grammar."""
    return f"{word[:1].isupper()} {len(word) if HAN.match(word) else word[-2:]}"


def adjacent(source: str, target: str, links: list[Any]) -> list[Any]:
    """Two neighbouring words whose translations are neighbours, as one term."""
    for (start, end), (first, last) in links:
        for (next_start, next_end), (next_first, next_last) in links:
            gaps = source[end:next_start], target[last:next_first]
            if next_start >= end and next_first >= last and all(gap in ("", " ") for gap in gaps):
                return [((start, next_end), (first, next_last))]
    return []
