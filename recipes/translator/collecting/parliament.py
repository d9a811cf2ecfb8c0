"""Debates of the European Parliament, aligned by sentences."""

from __future__ import annotations

import hashlib
import html
import re
from collections.abc import Iterable, Iterator
from xml.etree import ElementTree

from pairs import Pair
from prepare import FREQUENT, WORD

from collecting.parallel import paragraph_pairs
from collecting.repositories import Repository

SHORTEST, LONGEST = 4, 40  # words of a side
SHARE = {"fr": 0.31, "de": 0.58}  # of the text, from all years: 450,000 pairs that the corpora do not have
CHUNK = re.compile(r"<ParallelChunk\b.*?<en>(.*?)</en>\s*<fr>(.*?)</fr>", re.DOTALL)
LOST = re.compile(r"\b(?:vux|curs?|churs?|nuds?|bufs?|ufs?|rancur\w*|(?:man|dés)?uvr\w*)\b", re.IGNORECASE)
TAG = re.compile(r"<[^>]*>")


def discourse(repository: Repository, language: str) -> Iterator[Pair]:
    """Pairs of sentences as XML, with marks of discourse inside."""
    for _, text in repository.texts(r"^xml-files/.*\.xml$") if language == "fr" else ():
        for found in CHUNK.finditer(text):
            if _is_chosen(found[1], language):
                english, other = (html.unescape(TAG.sub("", one)) for one in found.groups())
                yield from _usable([(tidied(english, "en"), tidied(other, language))], language)


def tidied(text: str, language: str) -> str:
    """Without the spaces at marks, and with the French œ that Europarl lost."""
    plain = re.sub(r" (?=[,.])", "", " ".join(text.split()))
    if language == "en":
        return re.sub(r"(?<=\w)([’']) (?=s\b)", r"\1", plain)
    return LOST.sub(lambda word: word[0].replace("u", "œu", 1), re.sub(r"(?<=\w)([’']) (?=\w)", r"\1", plain))


def direct(repository: Repository, language: str) -> Iterator[Pair]:
    """Speeches with the same number in the files of a day; their paragraphs, where both have as many."""
    days: dict[str, dict[str, list[str]]] = {}  # speeches of the language that comes first, German
    for path, content in repository.files(r"^proceedings/xml/(?:de|en)/\d+\.\w+\.xml$") if language == "de" else ():
        day = path.rsplit("/", 1)[1].split(".")[0]
        if "/de/" in path:
            days[day] = _speeches(content)
            continue
        theirs = days.pop(day, {})
        for number, paragraphs in _speeches(content).items():
            if number in theirs and len(paragraphs) == len(theirs[number]):
                for one, two in zip(paragraphs, theirs[number], strict=True):
                    if _is_chosen(one, language):
                        yield from _usable(paragraph_pairs(one, two, language), language)


DEBATES = {"europarl-de": direct, "europarl-fr": discourse}
CONTINUES = dict.fromkeys(DEBATES, "europarl")  # what the corpora have a part of


def _is_chosen(text: str, language: str) -> bool:
    """Whether a text is in the random part; the same one every time."""
    number = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(number) < SHARE[language] * 2**32


def _usable(pairs: Iterable[Pair], language: str) -> Iterator[Pair]:
    """The pairs that have the length of sentences, and frequent words of both languages: many speeches were printed
    without a translation."""
    for pair in pairs:
        sides = zip(pair, ("en", language), strict=True)
        if all(SHORTEST <= len(text.split()) <= LONGEST and _is_in(text, code) for text, code in sides):
            yield pair


def _is_in(text: str, language: str) -> bool:
    return not FREQUENT[language].isdisjoint(WORD.findall(text.lower()))


def _speeches(content: bytes) -> dict[str, list[str]]:
    """Paragraphs of each speech by its number."""
    found = {}
    for speech in ElementTree.fromstring(content).iter("intervention"):
        found[speech.get("id", "")] = [" ".join("".join(one.itertext()).split()) for one in speech.iter("p")]
    return found
