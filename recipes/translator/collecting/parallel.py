"""Pages and texts with their translations, from the repositories of sources.tsv that are used as `collected`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from xml.etree import ElementTree

from pairs import Pair, letters_and_digits

from collecting.markdown import Block, blocks, plain
from collecting.repositories import Repository
from collecting.sentences import MARKUP, split

FREE = re.compile(r"CC BY|CC0|GPL|[Pp]ublic [Dd]omain")
SIDE_BY_SIDE = re.compile(  # translation, source
    r'<span data-ttu-id="[^"]*">(.*?)</span><span class="sxs-lookup"><span data-stu-id="[^"]*">(.*?)</span></span>',
    re.DOTALL,
)
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


def course(repository: Repository, language: str) -> Iterator[Pair]:
    """Pages of a course, and those of the same path in translations/LL."""
    folders = {"zh": "zh-CN|zh|cn"}.get(language, language)
    translated = re.compile(rf"^translations/(?:{folders})/(.*\.md)$")
    pages = dict(repository.texts(rf"^(?!translat|\.)(.*\.md)$|{translated.pattern}"))
    for path, page in pages.items():
        found = translated.match(path)
        if found and found[1] in pages:
            yield from page_pairs(pages[found[1]], page, language)


def unciv(repository: Repository, language: str) -> Iterator[Pair]:
    """Lines `English = translation`, without those that have a placeholder."""
    name = {"de": "German", "fr": "French", "zh": "Simplified_Chinese"}[language]
    for _, text in repository.texts(rf"/translations/{name}\.properties$"):
        for line in text.splitlines():
            english, _, other = line.replace("\\n", "\n").partition(" = ")
            if other and not line.startswith("#"):
                yield from paragraph_pairs(english.strip(), other.strip(), language)


def lichess(repository: Repository, language: str) -> Iterator[Pair]:
    """Messages of the same name, without those that have a placeholder."""
    code = {"de": "de-DE", "fr": "fr-FR", "zh": "zh-CN"}[language]
    found = {
        path: _strings(text) for path, text in repository.files(rf"^translation/(source/\w+|dest/\w+/{code})\.xml$")
    }
    for path, texts in found.items():
        english = found.get(path.replace("/dest/", "/source/").replace(f"/{code}.xml", ".xml"), {})
        for name, other in texts.items() if "/dest/" in path else ():
            if name in english and "%" not in english[name]:
                yield from paragraph_pairs(english[name], other, language)


def novels(repository: Repository, language: str) -> Iterator[Pair]:
    """Chapters as HTML with the same number of headings and paragraphs."""
    chapters = {
        path.rsplit("/", 1)[1]: _paragraphs(page)
        for path, page in repository.files(r"^gutenberg/[^/]+/out/google/html/en/.*\.html$")
    }
    for path, page in repository.files(rf"^gutenberg/[^/]+/out/google/html/{language}/.*\.html$"):
        ours, theirs = chapters.get(path.rsplit("/", 1)[1], []), _paragraphs(page)
        for one, two in zip(ours, theirs, strict=True) if len(ours) == len(theirs) else ():
            if "Gutenberg" not in one:  # terms of use, in every book
                yield from paragraph_pairs(one, two, language)


def _paragraphs(page: bytes) -> list[str]:
    """Headings and paragraphs of a chapter, without the spaces that a translator left around marks."""
    elements = ElementTree.fromstring(re.sub(rb"<!DOCTYPE[^>]*>", b"", page)).iter()
    texts = (" ".join("".join(one.itertext()).split()) for one in elements if re.search(r"}(?:p|h\d)$", str(one.tag)))
    return [re.sub(r" (?=[,.])|(?<=\b[cdjlmnst]['’]) (?=\w)", "", text, flags=re.IGNORECASE) for text in texts]


def _strings(content: bytes) -> dict[str, str]:
    """Texts of a file as Android has them."""
    texts = {one.get("name", ""): one.text or "" for one in ElementTree.fromstring(content).iter("string")}
    return {name: re.sub(r"\\([\"'])", r"\1", text).replace("\\n", "\n") for name, text in texts.items()}


def side_by_side(repository: Repository, language: str) -> Iterator[Pair]:
    """Sentences of pages that show translation and source side by side, as far as people translated them."""
    locale = {"de": "de-de", "fr": "fr-fr", "zh": "zh-cn"}[language]
    for _, text in repository.texts(r"\.md$") if repository.name.lower().endswith(locale) else ():
        if "ms.translationtype: HT" in text:
            for other, english in SIDE_BY_SIDE.findall(text):
                yield from paragraph_pairs(plain(english), plain(other), language)


COURSES = ("ai", "ai-agents", "azure-developer", "data-science", "edge-ai", "iot", "security")
MANUALS = ("hololens", "mixed-reality", "office-js", "smb-de", "smb-fr")
EXTRA: dict[str, Callable[[Repository, str], Iterator[Pair]]] = {
    "nextstrain": nextstrain,
    "opensource-guide": opensource_guide,
    "stellarium-skycultures": stellarium,
    "unciv": unciv,
    "lichess": lichess,
    "unicode-novels": novels,
    **{f"ms-{name}": side_by_side for name in MANUALS},
    **{f"course-{name}": course for name in (*COURSES, "web-development")},
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
