"""Real pairs with parts that a translation copies: URLs, code, placeholders, names, tags, emoji, quotation marks."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from pairs import Pair

from allyouneed.apps.translate.spans.carry import read
from allyouneed.apps.translate.spans.spans import protect
from augmentation.corpus import Direction
from augmentation.nouns import EMOJI, NOUNS, STAND_INS, invented, person, url
from augmentation.nouns import cities as known_cities
from augmentation.templated import tight

QUOTES = {"en": ('"', '"'), "de": ("„", "“"), "fr": ("« ", " »"), "zh": ("“", "”")}
SPECIAL = re.compile(r"[/@{}%<`_#\\$]|\w\.\w")


def real_spans(direction: Direction, rng: random.Random) -> Iterator[Pair]:
    """Real pairs with URLs, code or placeholders: with stand-ins, as inference sends them, or with other spans."""
    language = direction.language
    candidates = [
        pair
        for domain in ("general", "stories", "interface", "manual")
        for pair in language.domains[domain][:60_000]
        if len(pair[0]) < 250 and SPECIAL.search(pair[0]) and SPECIAL.search(pair[1])
    ]
    rng.shuffle(candidates)
    while True:
        for pair in candidates:
            source, target = direction.turn(pair)
            found = protect(source)
            nouns = {
                symbol: span
                for symbol, span in found.spans.items()
                if span.kind.role == "noun" and symbol in found.template
            }
            if (
                not nouns
                or len(nouns) > 4
                or any(source.count(span.text) != 1 or target.count(span.text) != 1 for span in nouns.values())
            ):
                continue
            if rng.random() < 0.5:
                reading = read(found.template, found.spans)
                if reading is None or reading.marks:
                    continue
                if any(target.count(found.spans[symbol].text) != 1 for symbol in reading.forms):
                    continue
                for symbol, forms in reading.forms.items():
                    name = STAND_INS.get(forms[0], forms[0]) if direction.there == "zh" else forms[0]
                    target = target.replace(found.spans[symbol].text, name)
                yield reading.text, tight(target) if direction.there == "zh" else target
            else:
                for span in nouns.values():
                    new = rng.choice(NOUNS)(rng)
                    source, target = source.replace(span.text, new), target.replace(span.text, new)
                yield source, target


def named(direction: Direction, rng: random.Random) -> Iterator[Pair]:
    """Everyday pairs about Tom, with another name, a stand-in or a span that is copied."""
    chinese = direction.language.name == "zh"
    tom = re.compile(r"\bTom\b(?!['’])")
    other_tom = re.compile(r"Tom(?![A-Za-z])|汤姆") if chinese else tom
    candidates = [
        pair
        for pair in direction.language.domains["everyday"]
        if pair[0].count("Tom") == 1
        and tom.search(pair[0])
        and len(other_tom.findall(pair[1])) == 1
        and not (direction.language.name == "fr" and re.search(r"\b(?:de|que|lorsque|puisque) Tom", pair[1]))
    ]
    while True:
        english, other = rng.choice(candidates)
        kind = rng.random()
        if kind < 0.4:
            name = person(rng)["en"]
            names = name, name
        elif kind < 0.65:
            name = rng.choice([one for one in STAND_INS if one != "Tom"])
            into_chinese = chinese and direction.there == "zh"
            names = name, STAND_INS[name] if into_chinese else name
        else:
            name = rng.choice(NOUNS)(rng)
            names = name, f" {name} " if chinese else name
        english, other = tom.sub(lambda _, n=names: n[0], english), other_tom.sub(lambda _, n=names: n[1], other)
        yield direction.turn((english, re.sub(r" +(?=[，。？！])|^ | $|(?<= ) ", "", other)))


def cities(direction: Direction, rng: random.Random) -> Iterator[Pair]:
    """Everyday pairs about Boston, with another city."""
    own = "波士顿" if direction.language.name == "zh" else "Boston"
    candidates = [
        pair
        for pair in direction.language.domains["everyday"]
        if pair[0].count("Boston") == 1
        and pair[1].count(own) == 1
        and "Boston'" not in pair[0]
        and "Bostons" not in pair[1]
        and not re.search(r"\b(?:de|que) Boston", pair[1])
    ]
    while True:
        english, other = rng.choice(candidates)
        city = rng.choice(known_cities())
        yield direction.turn((english.replace("Boston", city["en"]), other.replace(own, city[direction.language.name])))


def tagged(direction: Direction, rng: random.Random) -> Iterator[Pair]:
    """Tags, emphasis, links, quotation marks or an emoji around or after words that translate each other."""
    while True:
        one = rng.choice(direction.language.linked)
        here, there = direction.turn((one.english, one.other))
        links = [direction.turn(link) for link in one.links]
        link = rng.choice(links)
        name = rng.choice(("b", "i", "em", "strong", "u", "span", "a", "g"))
        opening = (
            f"<{name}>"
            if name not in ("a", "g")
            else f'<a href="{url(rng)}">'
            if name == "a"
            else f'<g id="{rng.randrange(20)}">'
        )
        kind = rng.random()
        if kind < 0.45:
            marks = (opening, f"</{name}>"), (opening, f"</{name}>")
        elif kind < 0.6:
            mark = rng.choice(("**", "*", "_", "~~"))
            marks = (mark, mark), (mark, mark)
        elif kind < 0.8:
            loose = (
                ('"', '"')
                if rng.random() < 0.4
                else QUOTES[direction.here]
                if direction.here != "en" or rng.random() < 0.5
                else ("“", "”")
            )
            marks = loose, QUOTES[direction.there]
        else:
            emoji = rng.choice(EMOJI)
            marks = ("", " " + emoji), ("", " " + emoji)
        if any(sign in here + there for sign in ('"', "„", "“", "«", "<", "*", "`")):
            continue
        texts = [
            text[: at[0]] + mark[0] + text[at[0] : at[1]] + mark[1] + text[at[1] :]
            for text, at, mark in zip((here, there), link, marks, strict=True)
        ]
        yield texts[0], texts[1]


def at_edges(direction: Direction, rng: random.Random) -> Iterator[Pair]:
    """An emoji, hashtag, list mark or quotation marks at the edges of a sentence."""
    while True:
        source, target = direction.turn(rng.choice(direction.language.everyday))
        if any(sign in source + target for sign in ('"', "„", "“", "«")):
            continue
        kind = rng.random()
        if kind < 0.4:
            emoji = "".join(rng.choice(EMOJI) for _ in range(rng.choice((1, 1, 1, 2, 3))))
            yield (
                (f"{emoji} {source}", f"{emoji} {target}")
                if rng.random() < 0.3
                else (f"{source} {emoji}", f"{target} {emoji}")
            )
        elif kind < 0.55:
            tags = " ".join("#" + invented(rng) for _ in range(rng.choice((1, 2))))
            yield f"{source} {tags}", f"{target} {tags}"
        elif kind < 0.7:
            mark = rng.choice(
                (
                    "- ",
                    "* ",
                    "• ",
                    f"{rng.randint(1, 20)}. ",
                    f"{rng.choice('abc')}) ",
                    f"({rng.randint(1, 9)}) ",
                    "> ",
                    "## ",
                )
            )
            yield mark + source, mark + target
        else:
            own = QUOTES[direction.here] if rng.random() < 0.6 else ('"', '"')
            there = QUOTES[direction.there]
            yield own[0] + source + own[1], there[0] + target + there[1]
