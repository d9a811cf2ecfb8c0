"""Where a text may be cut so that each part can be translated by itself. Parts joined are the text, to the character.

Three knives, from fine to blunt: between sentences, between clauses, and, if nothing else helps, between words or
characters. A part keeps the quotes and brackets that close it and the whitespace after it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

CLOSERS = r"""[\"'”’」』）】》〉〕\)\]\}»›]"""
OPENERS = "\"'“‘「『（【《〈〔([{«‹¿¡-–—•"
# Full-width stops end a sentence wherever they stand; the others only before whitespace, or before Chinese or Japanese.
STOP = re.compile("(?P<wide>[。｡！？；][。｡！？；!?…]*)|(?P<stop>[.!?…।॥؟۔።។။]+)")
TAIL = re.compile(rf"{CLOSERS}*\s*")
CLAUSE = re.compile(r"[，、：；](?:[”’」』）】》]*)\s*|[,;:–—]\s+|\s[–—-]\s+")
EAST_ASIAN = re.compile("[\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003134f]")
# Words that end in a stop without ending a sentence; single letters (J. S. Bach, z. B., p. m.) need no entry.
ABBREVIATIONS = re.compile(
    "mr mrs ms dr prof st sr jr rev gen col sgt capt lt hon gov sen rep pres vs etc cf al inc ltd co corp dept univ "
    "approx fig figs no nos vol pp ed eds jan feb mar apr jun jul aug sep sept oct nov dec ave blvd rd "
    "bzw usw ca nr str abs bd evtl ggf inkl zzgl vgl hr fr mme mlle art chap sra dra avda núm pág ing dott avv".replace(
        " ", "|"
    ),
    re.IGNORECASE,
)


class Part(NamedTuple):
    text: str
    cut: Literal["end", "sentence", "clause", "word"]  # what follows it: nothing, or where it was cut off


Spans = Callable[[str], list[tuple[int, int]]]  # for each token of a text, the characters it stands for


def sentences(text: str) -> list[str]:
    """The sentences of a text."""
    return list(_between(text, _sentence_ends(text)))


def clauses(text: str) -> list[str]:
    """What stands between commas, colons and dashes (not between digits: 1,000 stays whole)."""
    return list(_between(text, (match.end() for match in CLAUSE.finditer(text))))


def fit(text: str, budget: int, spans: Spans) -> list[Part]:
    """One part a sentence, each of at most `budget` tokens: a longer one is cut between clauses, as seldom as possible,
    and a clause that is still too long between words, or between characters where there are no words."""
    parts: list[Part] = []
    for sentence in sentences(text):
        if len(spans(sentence)) <= budget:
            parts.append(Part(sentence, "sentence"))
            continue
        packed = ""
        for clause in clauses(sentence):
            if packed and len(spans(packed + clause)) > budget:
                parts.extend(_chopped(packed, budget, spans))
                packed = ""
            packed += clause
        parts.extend(_chopped(packed, budget, spans))
        parts[-1] = parts[-1]._replace(cut="sentence")
    if parts:
        parts[-1] = parts[-1]._replace(cut="end")
    return parts


def join(left: str, space: str, right: str, cut: str = "sentence", source: str = "") -> str:
    """What belongs between two translated parts: the whitespace of the source, unless the script wants it otherwise.

    Chinese and Japanese put no space between sentences, others do. `source` holds the two characters around the cut: a
    word that was cut in two is put together again without a space.
    """
    if not left or not right:
        return space
    wide = bool(EAST_ASIAN.match(left[-1]) and EAST_ASIAN.match(right[0]))
    if wide:
        return "" if space == " " else space
    if space or (cut == "word" and not EAST_ASIAN.search(source)):
        return space
    return "" if EAST_ASIAN.match(left[-1]) else " "


def _between(text: str, ends: Iterator[int]) -> Iterator[str]:
    start = 0
    for end in ends:
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _sentence_ends(text: str) -> Iterator[int]:
    for match in STOP.finditer(text):
        tail = TAIL.match(text, match.end())
        assert tail is not None
        if tail.end() < len(text) and (match["wide"] or _is_end(text, match, tail)):
            yield tail.end()


def _is_end(text: str, match: re.Match[str], tail: re.Match[str]) -> bool:
    """Does a stop that may also stand inside a sentence end one here?"""
    before, after = text[max(0, match.start() - 1) : match.start()], text[tail.end()]
    if not tail[0][-1:].isspace():
        firm = match["stop"] != "…" * len(match["stop"]) and (match["stop"][0] != "." or EAST_ASIAN.match(before))
        return bool(firm and EAST_ASIAN.match(after))
    if after.islower() or (unicodedata.category(after)[0] == "P" and after not in OPENERS):
        return False
    if match["stop"] != ".":
        return True
    word = re.search(r"[\w.]*$", text[: match.start()][-30:])
    last = word[0].rpartition(".")[2] if word else ""
    if last.isdigit():
        return len(last) > 2  # am 3. Oktober, 1. First: an ordinal or a list; in 1999. Then: an end
    return not (len(last) == 1 and not EAST_ASIAN.match(last)) and not ABBREVIATIONS.fullmatch(last)


def _chopped(text: str, budget: int, spans: Spans) -> Iterator[Part]:
    """Parts of at most `budget` tokens, cut at whitespace in their second half, or anywhere between characters."""
    while len(places := spans(text)) > budget:
        end = max(1, places[budget - 1][1])
        while True:
            space = max((m.end() for m in re.finditer(r"\s+", text[:end]) if 2 * m.end() >= end), default=0)
            cut = space or _character_start(text, end)
            if cut <= 1 or len(spans(text[:cut])) <= budget:
                break
            end = min(end - 1, end * 9 // 10)  # a cut word may take more tokens than the whole did
        yield Part(text[:cut], "word")
        text = text[cut:]
    if text:
        yield Part(text, "clause")


def _character_start(text: str, place: int) -> int:
    """The last place up to this one that does not tear marks off their letter or an emoji apart."""
    start = place
    while start > 1 and (_joins(text[start : start + 1]) or text[start - 1] == "\u200d"):
        start -= 1
    return start if start > 1 else place


def _joins(char: str) -> bool:
    return bool(char) and (unicodedata.category(char) in ("Mn", "Mc", "Me") or char in "\u200d\ufe0f")
