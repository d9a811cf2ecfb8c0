"""Pairs of sentences: reading, writing, and what identifies a sentence."""

from __future__ import annotations

import csv
import gzip
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).with_name("sources.tsv")
SPACES = re.compile(r"\s+")
INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff\ufff9-\ufffc]")
HAN = re.compile(r"[\u3400-\u9fff]")
Pair = tuple[str, str]


def normalize(text: str) -> str:
    return SPACES.sub(" ", INVISIBLE.sub("", unicodedata.normalize("NFC", text))).strip()


def letters_and_digits(text: str) -> str:
    """The identity of a sentence: no case, punctuation or spaces."""
    return "".join(character for character in text.lower() if character.isalnum())


def read_sources(path: Path = SOURCES) -> list[dict[str, str]]:
    """Rows of `source`, `use` (parallel, collected, monolingual, names, words, augmentation), `domain`, `licence`,
    `origin`."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def read_corpus(path: Path) -> Iterator[Pair]:
    import zstandard

    with path.open("rb") as file:
        text = zstandard.ZstdDecompressor().stream_reader(file).read().decode("utf-8")
    for line in text.split("\n"):
        english, _, other = line.partition("\t")
        yield english, other


def write(path: Path, pairs: list[Pair]) -> None:
    text = "".join(f"{english}\t{other}\n" for english, other in pairs)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
