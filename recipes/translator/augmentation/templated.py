"""Pairs made of templates, and real pairs with other numbers."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pairs import Pair

from augmentation.amounts import LANGUAGES, SEPARATORS, Texts, decimal, integer, number, same
from augmentation.corpus import Direction
from augmentation.nouns import STAND_INS
from augmentation.values import DRAW

TEMPLATES, GREETINGS = (Path(__file__).with_name(name) for name in ("templates.tsv", "greetings.tsv"))
SLOT = re.compile(r"\{(\w+)(?:\.(\d))?(?::(\w+))?\}")


def fill(
    template: tuple[str, str, str, str], direction: Direction, rng: random.Random, stand_ins: bool = False
) -> Pair:
    """A template with values in its slots. `stand_ins`: what inference puts in place of protected nouns."""
    drawn: dict[tuple[str, str | None], Texts] = {}
    free = rng.sample(sorted(STAND_INS), len(STAND_INS))
    texts = []
    for language in (direction.here, direction.there):

        def value(found: re.Match[str], language: str = language) -> str:
            key = found[1].lower(), found[2]
            if key not in drawn:
                if stand_ins and key[0] in ("noun", "placeholder"):
                    name = free.pop()
                    drawn[key] = same(name) | ({"zh": STAND_INS[name]} if direction.there == "zh" else {})
                else:
                    drawn[key] = DRAW[key[0]](rng)
            text = drawn[key][f"{language}:{found[3]}" if found[3] else language]
            return text[:1].upper() + text[1:] if found[1][0].isupper() else text

        text = SLOT.sub(value, template[LANGUAGES.index(language)])
        text = tight(text) if stand_ins and language == direction.there == "zh" else text
        texts.append(re.sub(r"\b(millions?|milliards?) de (?=[aeiouéhà])", r"\1 d'", text))
    return texts[0], texts[1]


def tight(text: str) -> str:
    """Without spaces between Chinese letters."""
    return re.sub(r"(?<=[\u3000-\u303f\u4e00-\u9fff]) (?=[\u3000-\u303f\u4e00-\u9fff])", "", text)


def read_rows(path: Path) -> list[list[str]]:
    """A file with a column for each of LANGUAGES."""
    return [line.split("\t") for line in path.read_text("utf-8").splitlines()[1:]]


def templates(nouns: bool) -> list[tuple[str, str, str, str]]:
    return [
        (a, b, c, d) for a, b, c, d in read_rows(TEMPLATES) if bool(re.search(r"\{(?:noun|placeholder)", a)) == nouns
    ]


def number_templates(direction: Direction, rng: random.Random) -> Iterator[Pair]:
    rows = templates(False)
    while True:
        yield fill(rng.choice(rows), direction, rng)


UNCLEAR = {"noun", "placeholder", "company", "code", "flight", "ordinal", "century", "score"}  # without a sentence


def bare_values(direction: Direction, rng: random.Random) -> Iterator[Pair]:
    """A number, date or name alone, as in a table."""
    kinds = [kind for kind in DRAW if kind not in UNCLEAR]
    while True:
        drawn = DRAW[rng.choice(kinds)](rng)
        yield drawn[direction.here], drawn[direction.there]


def noun_templates(direction: Direction, rng: random.Random) -> Iterator[Pair]:
    rows = templates(True)
    while True:
        yield fill(rng.choice(rows), direction, rng, stand_ins=rng.random() < 0.3)


NUMBER = re.compile(
    r"(?<![A-Za-zÀ-ÿ0-9_.,:/%$€£+\-–—'’#&=])(?<!\d )\d+(?:[.,]\d+)*(?![A-Za-zÀ-ÿ0-9_:/\-–—'’]|[.,]\d| \d)"
)


def other_number(text: str, language: str, rng: random.Random) -> str | None:
    """Digits with a point and without separators, of another number of the same kind; None if it is none of ours."""
    thousands, point = SEPARATORS[language]
    if re.fullmatch(rf"\d{{1,3}}(?:{re.escape(thousands)}\d{{3}})+", text):
        return "," + str(integer(rng, rng.randint(4, 7)))
    if re.fullmatch(rf"\d+{re.escape(point)}\d{{1,2}}", text):
        return decimal(rng)
    if not text.isdigit() or int(text) < 2:
        return None
    value = int(text)
    if value <= 31:
        return str(rng.randint(2, 12) if value <= 12 else rng.randint(13, 31))
    if 1000 <= value <= 2100:
        return str(rng.randint(1100, 2040))
    return str(integer(rng, len(text) if rng.random() < 0.6 else rng.randint(3, 5)))


def real_numbers(direction: Direction, rng: random.Random) -> Iterator[Pair]:
    """Real pairs with other numbers, where both sides have the same."""
    candidates = [
        pair
        for pair in [*direction.language.pairs, *direction.language.domains["manual"][:40_000]]
        if re.search(r"\d", pair[0]) and re.search(r"\d", pair[1])
    ]
    while True:
        source, target = direction.turn(rng.choice(candidates))
        found = [one[0] for one in NUMBER.finditer(source)]
        there = Counter(one[0] for one in NUMBER.finditer(target))
        changes, answers = {}, {}
        for text in dict.fromkeys(found):
            new = other_number(text, direction.here, rng)
            if new is None:
                continue
            grouped, digits = new.startswith(","), new.lstrip(",")
            old = text
            if not text.isdigit():
                plain = text.replace(
                    SEPARATORS[direction.here][0] if grouped else SEPARATORS[direction.here][1],
                    "" if grouped else ".",
                )
                old = number(plain, grouped, direction.there)
            if there[old] != found.count(text):
                continue
            if text.isdigit() and len(digits) > 4 and rng.random() < 0.6:
                grouped = True
            changes[text] = number(digits, grouped, direction.here)
            answers[old] = number(digits, grouped, direction.there)
        if changes:
            yield (
                NUMBER.sub(lambda one, table=changes: table.get(one[0], one[0]), source),
                NUMBER.sub(lambda one, table=answers: table.get(one[0], one[0]), target),
            )


def greetings(direction: Direction, rng: random.Random) -> Iterator[Pair]:
    for row in read_rows(GREETINGS):
        texts = dict(zip(LANGUAGES, row, strict=True))
        source, target = texts[direction.here], texts[direction.there]
        yield source, target
        yield source.rstrip("!.。！ "), target.rstrip("!.。！ ")
        if direction.here != "zh":
            yield source.lower(), target
