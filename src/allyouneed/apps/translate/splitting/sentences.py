"""Split a text into parts that can be translated separately. The parts joined are the text, character for character.

A text is split between sentences; long sentences between clauses; long clauses between words or characters. A part
keeps its closing quotes and brackets and the whitespace after it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from allyouneed.apps.translate.spans.spans import MARK
from allyouneed.data.languages import EAST_ASIAN

# a mark (a tag, an emoji; spans.py) after a stop belongs to the sentence before it, as closing quotes do
CLOSERS = rf"""(?:[\"'”’」』）】》〉〕\)\]\}}»›]|{MARK})"""
OPENERS = "\"'“‘「『（【《〈〔([{«‹¿¡-–—•"
# Full-width stops always end a sentence; the others only before whitespace, or before Chinese or Japanese.
STOP = re.compile("(?P<wide>[。｡！？；][。｡！？；!?…]*)|(?P<stop>[.!?…।॥؟۔።។။]+)")
TAIL = re.compile(rf"{CLOSERS}*\s*")
CLAUSE = re.compile(r"[，、：；](?:[”’」』）】》]*)\s*|[,;:–—]\s+|\s[–—-]\s+")
# Words whose stop does not end a sentence; single letters (J. S. Bach, z. B., p. m.) need no entry.
ABBREVIATIONS = re.compile(
    "mr mrs ms dr prof st sr jr rev gen col sgt capt lt hon gov sen rep pres vs etc cf al inc ltd co corp dept univ "
    "approx fig figs no nos vol pp ed eds jan feb mar apr jun jul aug sep sept oct nov dec ave blvd rd "
    "bzw usw ca nr str abs bd evtl ggf inkl zzgl vgl hr fr mme mlle art chap sra dra avda núm pág ing dott avv".replace(
        " ", "|"
    ),
    re.IGNORECASE,
)


class SentencePart(NamedTuple):
    text: str
    cut: Literal["end", "sentence", "clause", "word"]  # the boundary after it


Spans = Callable[[str], list[tuple[int, int]]]  # (begin, end) characters of each token of a text


def sentences(text: str) -> list[str]:
    """The sentences of a text."""
    return list(_between(text, _sentence_ends(text)))


def clauses(text: str) -> list[str]:
    """Split at commas, colons and dashes (not between digits: 1,000 stays whole)."""
    return list(_between(text, (match.end() for match in CLAUSE.finditer(text))))


def fit(text: str, budget: int, spans: Spans) -> list[SentencePart]:
    """One part per sentence, of at most `budget` tokens. A longer sentence is split between clauses, into as few parts
    as possible, and a longer clause between words, or between characters where there are no spaces."""
    parts: list[SentencePart] = []
    for sentence in sentences(text):
        if len(spans(sentence)) <= budget:
            parts.append(SentencePart(sentence, "sentence"))
            continue
        packed = ""
        for clause in clauses(sentence):
            if packed and len(spans(packed + clause)) > budget:
                parts.extend(_split_words(packed, budget, spans))
                packed = ""
            packed += clause
        parts.extend(_split_words(packed, budget, spans))
        parts[-1] = parts[-1]._replace(cut="sentence")
    if parts:
        parts[-1] = parts[-1]._replace(cut="end")
    return parts


def join(left: str, space: str, right: str, cut: str = "sentence", source: str = "") -> str:
    """The separator of two translated parts: the whitespace of the source, adapted to the target script.

    Chinese and Japanese have no space between sentences, other scripts do. `source`: the two characters around the
    cut; a word that was split is joined without a space.
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
    """Whether an ambiguous stop ends a sentence here."""
    before, after = text[max(0, match.start() - 1) : match.start()], text[tail.end()]
    if not tail[0][-1:].isspace():
        firm = match["stop"] != "…" * len(match["stop"]) and (match["stop"][0] != "." or EAST_ASIAN.match(before))
        return bool(firm and EAST_ASIAN.match(after))
    if after.islower() or (unicodedata.category(after)[0] == "P" and after not in OPENERS):
        return False
    if match["stop"] != ".":
        return True
    word = re.search(r"[\w.]*$", text[max(0, match.start() - 30) : match.start()])
    last = word[0].rpartition(".")[2] if word else ""
    if last.isdigit():
        return len(last) > 2  # "am 3. Oktober", "1. First": an ordinal or a list; "in 1999. Then": an end
    return not (len(last) == 1 and not EAST_ASIAN.match(last)) and not ABBREVIATIONS.fullmatch(last)


def _split_words(text: str, budget: int, spans: Spans) -> Iterator[SentencePart]:
    """Parts of at most `budget` tokens, split at whitespace in their second half, or else between characters."""
    start, size = 0, 4 * budget
    while True:
        # tokenize as far as the next part can reach: all of the rest for every part would take quadratic time
        window = text[start : start + size]
        characters = spans(window)
        rest = start + size < len(text)
        if rest and len(characters) <= 2 * budget:  # its last tokens may be cut off
            size *= 2
            continue
        if len(characters) <= budget:
            break
        end = max(1, characters[budget - 1][1])
        while True:
            space = max((m.end() for m in re.finditer(r"\s+", window[:end]) if 2 * m.end() >= end), default=0)
            cut = space or _character_start(window, end)
            if cut <= 1 or len(spans(window[:cut])) <= budget:
                break
            end = min(end - 1, end * 9 // 10)  # a split word may have more tokens than the whole
        yield SentencePart(window[:cut], "word")
        start += cut
    if window:
        yield SentencePart(window, "clause")


def _character_start(text: str, position: int) -> int:
    """The last position up to this one that does not split a combining sequence or an emoji."""
    start = position
    while start > 1 and (_is_combining(text[start : start + 1]) or text[start - 1] == "\u200d"):
        start -= 1
    return start if start > 1 else position


def _is_combining(char: str) -> bool:
    return bool(char) and (unicodedata.category(char) in ("Mn", "Mc", "Me") or char in "\u200d\ufe0f")
