"""Splits running text into sentences and keeps the well-formed ones."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from pairs import HAN

from allyouneed.apps.translate.splitting.sentences import sentences

CHINESE_SENTENCE = re.compile(r"[^。！？\n]*[。！？]+[”』」’）]*")  # not at ；, which joins clauses in running text
MARKUP = re.compile(r"formula_|https?:|www\.|[|{}<>=\[\]\\_*#^~•◆■→�]|&[a-z]+;|\.\.\.|ISBN")
BRACKETS = tuple(zip("(（「『《“„«〈", ")）」』》”“»〉", strict=True))
# an article about many things, or one of thousands of the same wording
STUB = re.compile(r"小行星|can refer to|may refer to|可以指|可能指|消歧义|steht für|bezeichnet:|peut désigner")

# traces of what the extraction of an article left out: numbers, formulas, foreign names
CHINESE_GAP = re.compile(
    r"[，、；：][，、；：。]|（[，、；：或]|[，、；：]）|「」|《》|“”|（）|\(\)|[约為为达長长宽高共]，"
    r"|[约达为](?:平方|公[里尺顷斤]|英[里尺亩]|米|人|年|%)|^[，、；：）」』”》%]|[一-龥] +[一-龥]"
)
LATIN_GAP = re.compile(r"\( |\([,;]| \)|,,| ,|[a-z] \.|, ,|\(;|; \)|\(or |\(oder |  |\(\)")
EMPTY_BRACKETS = re.compile(r"（[，、；：\s]*）|\s*\([,;:\s]*\)")

LATIN_START = re.compile(r"[«\"“„(']?(?:[A-ZÄÖÜÉÈÀÂÇÎÔŒÊ]|\d+\.? |(?<=[«\"“„('])\d)")
LATIN_END = re.compile(r"[.!?][\"”“»’')]*$")
OTHER_SCRIPTS = re.compile("[\u0370-\u06ff\u0900-\u0fff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
PAGE_FURNITURE = re.compile(
    r"\s[-–*]\s*$|^\W*(See also|Siehe auch|Voir aussi|References|External links|Weblinks|Literatur)\b"
)
MAINLAND = str.maketrans("「」『』牠", "“”‘’它")  # what OpenCC leaves


def split(text: str, language: str) -> list[str]:
    """Sentences of every line; of Chinese, those that end with a full stop."""
    if language == "zh":
        return [found.strip() for found in CHINESE_SENTENCE.findall(text)]
    return [found.strip() for line in text.split("\n") for found in sentences(line) if found.strip()]


def is_good(text: str, language: str) -> bool:
    """Whether a text is one whole sentence of prose."""
    if MARKUP.search(text) or not _is_balanced(text):
        return False
    return _is_good_chinese(text) if language == "zh" else _is_good_latin(text)


def good_sentences(texts: Iterable[str], language: str) -> Iterator[str]:
    for text in texts:
        plain = EMPTY_BRACKETS.sub("", re.sub("[\xa0\u202f]", " ", text.replace("\u3000", "")))
        yield from (sentence for sentence in split(plain, language) if is_good(sentence, language))


def from_articles(articles: Iterable[str], language: str, shortest: int, most: int) -> Iterator[str]:
    """At most `most` good sentences of every article of at least `shortest` characters, at random.

    The first line is the title; short lines are headings and list items.
    """
    rng = random.Random(0)
    read, line = (4000, 25) if language == "zh" else (10_000, 80)  # characters of an article, and of a paragraph
    for article in articles:
        if len(article) < shortest or STUB.search(article[:300]):
            continue
        title, _, rest = article[:read].strip("\n").partition("\n")
        paragraphs = (one for one in (rest or title).split("\n") if len(one) > line)
        found = list(good_sentences(paragraphs, language))
        rng.shuffle(found)
        yield from found[:most]


def simplified(text: str, configuration: str = "t2s") -> str:
    """Chinese as mainland China writes it. `configuration`: OpenCC's; tw2sp replaces the words of Taiwan too."""
    return str(_converter(configuration).convert(text)).translate(MAINLAND)


@cache
def _converter(configuration: str) -> Any:
    from opencc import OpenCC

    return OpenCC(configuration)


def _is_balanced(text: str) -> bool:
    for opening, closing in BRACKETS:
        if opening == "“" and "„" in text:
            continue  # German: „…“
        if opening == "„" and "„" not in text:
            continue
        if text.count(opening) != text.count(closing):
            return False
    return text.count('"') % 2 == 0


def _is_good_chinese(text: str) -> bool:
    if not 8 <= len(text) <= 120 or text[-1] not in "。！？”』」）" or CHINESE_GAP.search(text):
        return False
    characters = len(HAN.findall(text))
    if characters < 7 or characters / len(text) < 0.62:
        return False
    return text.count("、") <= 8 and text.count("：") <= 1 and text.count("·") <= 8


def _is_good_latin(text: str) -> bool:
    if not 20 <= len(text) <= 300 or not LATIN_START.match(text) or not LATIN_END.search(text):
        return False
    if LATIN_GAP.search(text) or OTHER_SCRIPTS.search(text) or PAGE_FURNITURE.search(text):
        return False
    if len(text.split()) < 4 or text.count(",") > 9 or text.count(";") > 2:
        return False
    return sum(map(str.islower, text)) / len(text) >= 0.6
