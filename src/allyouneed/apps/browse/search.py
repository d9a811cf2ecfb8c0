"""Search among pages: by the words of a query (BM25), or by vectors of an index of chunks, as RETRO retrieves."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from allyouneed.apps.browse.pages import TextPage
from allyouneed.errors import UserError

Search = Callable[[str, int], list[int]]  # (query, count) -> numbers of pages, the best first

WORD = re.compile(r"\w+")
EAST_ASIAN = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
TITLE_WEIGHT = 3  # a word of the title counts as this many words of the text


def words(text: str) -> list[str]:
    """Words in lower case; Chinese, Japanese and Korean by single characters."""
    found: list[str] = []
    for word in WORD.findall(text.lower()):
        if EAST_ASIAN.search(word):
            found += re.findall(f"{EAST_ASIAN.pattern}|[^{EAST_ASIAN.pattern[1:-1]}]+", word)
        else:
            found.append(word)
    return found


class BM25:
    """Σ over the words of a query: idf · f (k + 1) / (f + k (1 − b + b · length / mean length)), f how often the page
    has the word (Robertson, Zaragoza 2009, eq. 3.15). Pages without any of the words are not found."""

    def __init__(self, pages: Sequence[TextPage], k: float = 1.2, b: float = 0.75) -> None:
        self.k, self.b = k, b
        counted = [Counter(words(page.title) * TITLE_WEIGHT + words(page.text)) for page in pages]
        self.lengths = [sum(counts.values()) for counts in counted]
        self.mean = max(sum(self.lengths) / max(len(self.lengths), 1), 1.0)
        self.postings: dict[str, list[tuple[int, int]]] = {}  # word -> (page, how often it has the word)
        for number, counts in enumerate(counted):
            for word, count in counts.items():
                self.postings.setdefault(word, []).append((number, count))

    def __call__(self, query: str, count: int) -> list[int]:
        scores: dict[int, float] = {}
        for word in dict.fromkeys(words(query)):
            found = self.postings.get(word, [])
            idf = math.log(1 + (len(self.lengths) - len(found) + 0.5) / (len(found) + 0.5))
            for number, times in found:
                norm = 1 - self.b + self.b * self.lengths[number] / self.mean
                scores[number] = scores.get(number, 0.0) + idf * times * (self.k + 1) / (times + self.k * norm)
        return sorted(scores, key=lambda number: (-scores[number], number))[:count]


class IndexSearch:
    """The pages of the chunks nearest to the query, by the vectors of an index (`allyouneed index PAGES/*.txt
    --document file`)."""

    def __init__(self, index: Path | str, pages: Sequence[TextPage], encoder: Path | str | None = None) -> None:
        from allyouneed.infer.retrieval.retriever import Retriever

        self.retriever = Retriever(index, encoder)
        found, tokenizer = self.retriever.index, self.retriever.index.tokenizer
        by_text = {_plain(page.text): number for number, page in enumerate(pages)}
        texts = [tokenizer.decode(found.document(number)) for number in range(len(found.bounds) - 1)]
        self.pages = [by_text.get(_plain(text), -1) for text in texts]  # of each document
        if all(number < 0 for number in self.pages):
            raise UserError(f"{index}: has none of the pages; build it from their files with --document file")

    def __call__(self, query: str, count: int) -> list[int]:
        index = self.retriever.index
        ids = index.tokenizer.encode(query)
        if not ids:
            return []
        # several chunks of a page may be near, so more are asked for
        (nearest,) = index.nearest(self.retriever.encoder([ids]), min(len(index), 4 * count))
        numbers = (self.pages[int(index.documents[chunk])] for chunk in nearest)
        return list(dict.fromkeys(number for number in numbers if number >= 0))[:count]


def _plain(text: str) -> str:
    return " ".join(text.split())
