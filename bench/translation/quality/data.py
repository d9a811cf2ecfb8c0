"""Test sets and word frequencies of a data folder: mt/LL-LL/NAME.tsv.gz, corpora/LL/NAME.tsv.zst (English first)."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

Direction = tuple[str, str]
T = TypeVar("T")
DIRECTIONS: tuple[Direction, ...] = (
    ("en", "de"), ("de", "en"), ("en", "fr"), ("fr", "en"), ("en", "zh"), ("zh", "en"),
)  # fmt: skip
PAIRS = {"de": "en-de", "fr": "en-fr", "zh": "zh-en"}  # the folder of a language; its name is the order of columns
WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
HAN = re.compile(r"[\u4e00-\u9fff]+")
COUNTED = ("tatoeba.train", "newstest2008-2012.train", "newstest2008-2011.train")


class TestSet(NamedTuple):
    """`languages`: the other language of each pair. `one_way`: the direction it was made for, if only that one is
    scored (the other side is translated text)."""

    name: str
    file: str
    languages: tuple[str, ...]
    one_way: Direction | None = None


SETS = (
    TestSet("tatoeba", "tatoeba.test", ("de", "fr", "zh")),
    TestSet("ud-pud", "ud-pud", ("de", "fr", "zh")),
    *(TestSet(f"newstest{year}", f"newstest{year}.test", ("de", "fr")) for year in (2013, 2014)),
    *(TestSet(f"newstest{year}", f"newstest{year}.test", ("de",)) for year in (2015, 2016)),
    *(TestSet(f"newstest{year}", f"newstest{year}.test", ("de", "zh")) for year in (2017, 2018)),
    TestSet("newstest2019", "newstest2019.test", ("zh",), ("zh", "en")),
    TestSet("newstest2019", "newstest2019-enzh.test", ("zh",), ("en", "zh")),
    TestSet("newsdiscuss2015", "newsdiscusstest2015.test", ("fr",)),
    TestSet("tico19", "tico19-test.test", ("fr",)),
    TestSet("tico19", "tico19.test", ("zh",)),
)


def read_pairs(data: Path, language: str, name: str) -> list[tuple[str, str]]:
    """English and the other language; empty if the folder has no such file."""
    path = data / "mt" / PAIRS[language] / f"{name}.tsv.gz"
    if path.is_file():
        rows = gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()
        english = PAIRS[language].split("-").index("en")
    else:
        path = data / "corpora" / language / f"{name}.tsv.zst"
        if not path.is_file():
            return []
        import zstandard

        with path.open("rb") as file:
            rows = zstandard.ZstdDecompressor().stream_reader(file).read().decode("utf-8").split("\n")
        english = 0
    columns = (row.split("\t") for row in rows if "\t" in row)
    return [(row[english], row[1 - english]) for row in columns]


def test_pairs(data: Path, one: TestSet, direction: Direction) -> list[tuple[str, str]]:
    """Source and reference; empty if the set has none in this direction."""
    here, there = direction
    other = there if here == "en" else here
    if other not in one.languages or one.one_way not in (None, direction):
        return []
    pairs = read_pairs(data, other, one.file)
    return pairs if here == "en" else [(right, left) for left, right in pairs]


def spread(items: Sequence[T], count: int | None) -> list[T]:
    """`count` items, evenly spaced: the same ones in every run."""
    if count is None or count >= len(items):
        return list(items)
    return [items[number * len(items) // count] for number in range(count)]


def frequencies(data: Path, language: str) -> Counter[str]:
    """How often each word occurs in the training files of everyday sentences and news; of Chinese: each run of Chinese
    characters (words.py splits them by the dictionary)."""
    counts: Counter[str] = Counter()
    for other in PAIRS if language == "en" else (language,):
        for name in COUNTED:
            for english, text in read_pairs(data, other, name):
                words = english if language == "en" else text
                counts.update(HAN.findall(words) if language == "zh" else WORD.findall(words))
    return counts
