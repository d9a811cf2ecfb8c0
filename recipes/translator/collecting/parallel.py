"""Pages and their translations, from the repositories of sources.tsv with the domain `extra`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise

from pairs import Pair, letters_and_digits

from collecting.markdown import Block, blocks, plain
from collecting.repositories import Repository
from collecting.sentences import MARKUP, split

FREE = re.compile(r"CC BY|CC0|GPL|[Pp]ublic [Dd]omain")
NOT_FREE = re.compile(r"\b(NC|ND)\b")


def nextstrain(repository: Repository, language: str) -> Iterator[Pair]:
    """Pages NAME.md and NAME_LL.md, or NAME_DATE.md and NAME_LL_DATE.md."""
    pages = dict(repository.texts(r"^[\w.-]+\.md$"))
    for path, page in pages.items():
        found = re.fullmatch(rf"(.*)_{language}(_20\d\d-\d\d-\d\d)?\.md", path)
        english = pages.get(f"{found[1]}{found[2] or ''}.md") if found else None
        if english:
            yield from page_pairs(english, page, language)


def opensource_guide(repository: Repository, language: str) -> Iterator[Pair]:
    pages = dict(repository.texts(r"^_articles/.*\.md$"))
    folder = "zh-hans" if language == "zh" else language
    for path, page in pages.items():
        english = pages.get(path.replace(f"/{folder}/", "/"))
        if path.startswith(f"_articles/{folder}/") and english:
            yield from page_pairs(english, page, language)


def stellarium(repository: Repository, language: str) -> Iterator[Pair]:
    """Catalogs of the sky cultures whose texts have a free licence."""
    free = {path.split("/")[0] for path, text in repository.texts(r"/description\.md$") if is_free(text)}
    catalog = "zh_CN" if language == "zh" else language
    for path, text in repository.texts(rf"/po/{catalog}\.po$"):
        if path.split("/")[0] not in free:
            continue
        for english, other in messages(text):
            if "\n" in english or len(english) > 120:
                yield from page_pairs(english, other, language)
            else:
                yield from paragraph_pairs(plain(english), plain(other), language)


EXTRA: dict[str, Callable[[Repository, str], Iterator[Pair]]] = {
    "nextstrain": nextstrain,
    "opensource-guide": opensource_guide,
    "stellarium-skycultures": stellarium,
}


def is_free(description: str) -> bool:
    """Whether the section on the licence names free ones only."""
    found = re.search(r"^## Licen[cs]e\s*(.*?)(?=^## |\Z)", description, re.MULTILINE | re.DOTALL)
    return found is not None and FREE.search(found[1]) is not None and NOT_FREE.search(found[1]) is None


def messages(catalog: str) -> Iterator[Pair]:
    """Finished entries of a PO file, without plurals."""
    for entry in re.split(r"\n\s*\n", catalog):
        if re.search(r"^#,.*\bfuzzy\b|^#~|^msgid_plural", entry, re.MULTILINE):
            continue
        found = re.search(r"^msgid\s+(.*?)^msgstr\s+(.*)", entry, re.MULTILINE | re.DOTALL)
        if found is None:
            continue
        try:
            english, other = map(_unquoted, found.groups())
        except ValueError:  # an escape that JSON does not have
            continue
        if english and other:
            yield english, other


def _unquoted(strings: str) -> str:
    return "".join(json.loads(one) for one in re.findall(r'"(?:[^"\\]|\\.)*"', strings))


def page_pairs(english: str, other: str, language: str) -> Iterator[Pair]:
    """Paragraphs of two Markdown pages with the same sequence of blocks; else of their sections that have the same."""
    ours, theirs = blocks(english), blocks(other)
    parts = [(ours, theirs)] if _kinds(ours) == _kinds(theirs) else _sections(ours, theirs)
    for left, right in parts:
        if _kinds(left) == _kinds(right):
            for one, two in zip(left, right, strict=True):
                yield from paragraph_pairs(one.text, two.text, language)


def _kinds(some: list[Block]) -> list[str]:
    return [block.kind for block in some]


def _sections(ours: list[Block], theirs: list[Block]) -> list[tuple[list[Block], list[Block]]]:
    """From heading to heading; nothing if the pages have different numbers of them."""
    cut = []
    for some in (ours, theirs):
        starts = [0, *(n for n, block in enumerate(some) if block.kind == "heading" and n), len(some)]
        cut.append([some[start:end] for start, end in pairwise(starts)])
    return list(zip(*cut, strict=True)) if len(cut[0]) == len(cut[1]) else []


def paragraph_pairs(english: str, other: str, language: str) -> Iterator[Pair]:
    """By sentences where both have the same number of them; without what is not translated or of unlikely length."""
    if english == other or MARKUP.search(english + other):
        return
    ours, theirs = split(english, "en"), split(other, language)
    for one, two in zip(ours, theirs, strict=True) if len(ours) == len(theirs) > 1 else [(english, other)]:
        if letters_and_digits(one) == letters_and_digits(two) or len(one) > 700 or not re.search("[A-Za-z]", one):
            continue
        least, most = (0.12, 0.75) if language == "zh" else (0.6, 1.9)
        if len(one) <= 15 or least < len(two) / len(one) < most:
            yield one, two
