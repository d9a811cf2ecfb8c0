"""Real pairs in other forms: casing, typos, missing accents and punctuation, several sentences."""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Iterator

from pairs import Pair
from prepare import title

from augmentation.corpus import Direction

ACCENTS = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "Ä": "Ae", "Ö": "Oe", "Ü": "Ue", "ß": "ss"})
WIDE = {ord(char): ord(char) + 0xFEE0 for char in "0123456789"}
CODE = re.compile(r"[%{}<>@_\\/]")  # its letters and digits have no other form
NARROW = str.maketrans("，。？！：；（）", ",.?!:;()")


def cased(direction: Direction, rng: random.Random) -> Iterator[Pair]:
    """ALL CAPS and Title Case on both sides; lower case without final punctuation in the source only."""
    if direction.here == "zh":
        return
    while True:
        source, target = direction.turn(
            rng.choice(direction.language.everyday if rng.random() < 0.7 else direction.language.pairs)
        )
        if CODE.search(source):
            continue
        kind = rng.random()
        if kind < 0.4:
            yield source.upper(), target.upper()
        elif kind < 0.5:
            yield title(source), title(target)
        elif kind < 0.75:
            yield source.lower(), target
        else:
            yield source.lower().rstrip(".!? "), target


def mistyped(text: str, rng: random.Random) -> str:
    """One or two letters swapped, left out or doubled, inside of words."""
    for _ in range(rng.choice((1, 1, 2))):
        places = [one.start() for one in re.finditer(r"(?<=[a-zà-ÿ])[a-zà-ÿ](?=[a-zà-ÿ])", text)]
        if not places:
            return text
        at = rng.choice(places)
        kind = rng.randrange(3)
        if kind == 0:
            text = text[:at] + text[at + 1] + text[at] + text[at + 2 :]
        elif kind == 1:
            text = text[:at] + text[at + 1 :]
        else:
            text = text[:at] + text[at] + text[at:]
    return text


def plain_letters(text: str) -> str:
    return "".join(char for char in unicodedata.normalize("NFD", text) if not unicodedata.combining(char))


def noisy(direction: Direction, rng: random.Random) -> Iterator[Pair]:
    """Mistakes in the source only: typos, spaces, no accents, no punctuation, full-width digits."""
    while True:
        source, target = direction.turn(
            rng.choice(direction.language.everyday if rng.random() < 0.6 else direction.language.pairs)
        )
        kind, plain = rng.random(), source
        if direction.here == "zh":
            if kind < 0.25:
                source = re.sub("[，。？！；：、]", "", source)
            elif kind < 0.4:
                source = re.sub("[，。？！；：、]", " ", source).strip()
            elif kind < 0.55:
                source = source.translate(NARROW)
            elif kind < 0.75 and re.search(r"\d", source) and not CODE.search(source):
                source = source.translate(WIDE)
            elif kind < 0.9:
                source = source.rstrip("。！ ")
                target = target.rstrip(".! ")
            else:
                source = re.sub(r"(?<=[\u4e00-\u9fff]{4})(?=[\u4e00-\u9fff]{4})", " ", source, count=2)
        elif kind < 0.4 or (direction.here == "en" and kind < 0.65):
            source = mistyped(source, rng)
        elif kind < 0.65:
            source = (
                source.translate(ACCENTS)
                if direction.here == "de" and rng.random() < 0.5
                else plain_letters(source).replace("ß", "ss")
            )
        elif kind < 0.75:
            source = re.sub(r" ", lambda _: "  " if rng.random() < 0.3 else " ", source)
        elif kind < 0.85:
            source = re.sub(r"[,;:.!?]+(?= |$)", "", source)
        elif source.endswith("."):
            source, target = source.rstrip("."), target.rstrip(".。")
        else:
            source = source.rstrip("?! ")
        if source != plain and source.strip() and target.strip():
            yield source, target


def joined(direction: Direction, rng: random.Random) -> Iterator[Pair]:
    """Two or three sentences in a line."""
    while True:
        pool = direction.language.everyday if rng.random() < 0.5 else direction.language.pairs
        some = [direction.turn(rng.choice(pool)) for _ in range(rng.choice((2, 2, 3)))]
        if all(re.search(r"[.!?。！？]$", text) for pair in some for text in pair):
            source, target = (
                ("" if language == "zh" else " ").join(pair[side] for pair in some)
                for side, language in enumerate((direction.here, direction.there))
            )
            if max(len(source), len(target)) < 420 and not (direction.here == "zh" and len(source) > 150):
                yield source, target
