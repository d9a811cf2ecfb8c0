"""Text from public repositories and packages: sentences of one language, translated pages, names in two languages.

    python recipes/translator/collect.py --snapshots FOLDER --packages FOLDER --data FOLDER --corpora FOLDER
        --output runs/translator [--show 5]

What is collected are the rows of sources.tsv with the use `monolingual` or `names`, or the domain `extra`; a row that
is deleted is left out. Read:

    --snapshots  OWNER+NAME, a bare clone of each repository that the rows name, with the commit that they name
    --packages   the packages that the rows name, as downloaded: NAME-VERSION.tgz of npm, NAME_VERSION_all.deb of Debian
    --data       mt/*/*.{test,valid}*.tsv.gz, the test sets; a text that contains a sentence of theirs is dropped
    --corpora    {de,fr,zh}/ud-pud.tsv.zst, a test set as well

Written, the same bytes every time:

    {en,de,fr,zh}.mono.txt.gz   a sentence a line, at most 400,000, which distill.py translates
    en-{de,fr,zh}.extra.tsv.gz  sentences of translated pages that prepare.py would keep (English, the other language)
    en-{de,fr,zh}.names.tsv.gz  names
    collected.json              how many of each source
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path
from typing import TypeVar

from collecting.held_out import HeldOut
from collecting.monolingual import MONOLINGUAL, MOST
from collecting.names import FROM_PACKAGES, FROM_REPOSITORIES, LANGUAGES, Packages
from collecting.parallel import EXTRA
from collecting.repositories import Repository
from collecting.sentences import simplified
from pairs import HAN, SOURCES, Pair, letters_and_digits, normalize, read_sources, write
from prepare import reason_to_drop

from allyouneed.errors import UserError

Item = TypeVar("Item", str, Pair)
KNOWN = {
    "monolingual": [*MONOLINGUAL],
    "names": [*FROM_PACKAGES, *FROM_REPOSITORIES],
    "extra": [*EXTRA],
}


@dataclass
class Inputs:
    """Where the files of each source are."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    packages: dict[str, Packages] = field(default_factory=dict)

    @classmethod
    def find(cls, rows: list[dict[str, str]], snapshots: Path, packages: Path) -> Inputs:
        """Reports everything that is missing at once."""
        found, problems = cls(), dict[str, None]()
        for row in rows:
            try:
                found.add(row, snapshots, packages)
            except UserError as error:
                problems[str(error)] = None
        if problems:
            raise UserError("\n".join(problems))
        return found

    def add(self, row: dict[str, str], snapshots: Path, packages: Path) -> None:
        name, kind = row["source"], "extra" if row["domain"] == "extra" else row["use"]
        if kind not in KNOWN:
            return  # prepare.py or another script reads it
        if name not in KNOWN[kind]:
            raise UserError(f"unknown source {name!r} (allowed as {kind}: {', '.join(KNOWN[kind])})")
        if name in FROM_PACKAGES:
            self.packages[name] = Packages(packages, FROM_PACKAGES[name][1])
            self.packages[name].check()
        else:
            self.repositories[name] = Repository.parse(row["origin"], snapshots)
            self.repositories[name].check()

    def pairs(self, language: str, kind: str) -> Iterator[tuple[str, Iterator[Pair]]]:
        """Sources of names or extra pairs."""
        for name in KNOWN[kind]:
            if name in self.packages:
                found = FROM_PACKAGES[name][0](self.packages[name], language)
            elif name in self.repositories:
                found = (FROM_REPOSITORIES | EXTRA)[name](self.repositories[name], language)
            else:
                continue
            if language == "zh":
                found = ((english, simplified(other)) for english, other in found if HAN.search(other))
            yield name, found

    def monolingual(self, language: str) -> Iterator[tuple[str, Iterable[str], int]]:
        """Sources of sentences, and how many to take."""
        for name, one in MONOLINGUAL.items():
            if one.language == language and name in self.repositories:
                yield name, one.read(self.repositories[name]), one.most


def collect_sentences(inputs: Inputs, language: str, held_out: HeldOut) -> dict[str, list[str]]:
    """By source, at random, each once."""
    seen: set[str] = set()
    found: dict[str, list[str]] = {}
    for name, sentences, most in inputs.monolingual(language):
        most = min(most, MOST - sum(map(len, found.values())))
        kept = found[name] = []
        for sentence in shuffled(dict.fromkeys(sentences)):
            if len(kept) >= most:
                break
            key = letters_and_digits(sentence)
            if key not in seen and not held_out.within(sentence):
                seen.add(key)
                kept.append(sentence)
    return found


def collect_pairs(inputs: Inputs, language: str, kind: str, held_out: HeldOut) -> dict[str, list[Pair]]:
    """By source, each once."""
    seen: set[Pair] = set()
    found: dict[str, list[Pair]] = {}
    for name, pairs in inputs.pairs(language, kind):
        kept = found[name] = []
        for english, other in (tuple(map(normalize, pair)) for pair in pairs):
            key = letters_and_digits(english), letters_and_digits(other)
            if not all(key) or key in seen or held_out.within(english) or held_out.within(other):
                continue
            if kind == "names" or reason_to_drop(english, other, language, "general") is None:
                seen.add(key)
                kept.append((english, other))
    return found


def shuffled(items: Iterable[Item]) -> list[Item]:
    found = list(items)
    random.Random(0).shuffle(found)
    return found


def describe(name: str, found: dict[str, list[Item]], show: int) -> dict[str, int]:
    """How many texts of each source; prints it, and `show` texts of each."""
    counts = {source: len(kept) for source, kept in found.items()}
    print(f"{name}: {counts}", flush=True)
    for source, kept in found.items():
        for one in kept[:show]:
            print(f"    {source}: {one if isinstance(one, str) else '  |||  '.join(one)}")
    return counts


def write_sentences(path: Path, sentences: list[str]) -> None:
    path.write_bytes(gzip.compress("".join(f"{one}\n" for one in sentences).encode(), mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("snapshots", "packages", "data", "corpora", "output"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    parser.add_argument("--sources", default=SOURCES, type=Path, help="another list of sources")
    parser.add_argument("--show", type=int, default=0, help="print this many texts of every source")
    given = parser.parse_args()
    try:
        collect(given)
    except UserError as error:
        parser.exit(2, f"{error}\n")


def collect(given: argparse.Namespace) -> None:
    inputs = Inputs.find(read_sources(given.sources), given.snapshots, given.packages)
    held_out = HeldOut.load(given.data, given.corpora)
    given.output.mkdir(parents=True, exist_ok=True)
    report = {}
    for language in ("en", *LANGUAGES):
        sentences = collect_sentences(inputs, language, held_out)
        if sentences:
            name = f"{language}.mono.txt.gz"
            report[name] = describe(name, sentences, given.show)
            write_sentences(given.output / name, shuffled(chain(*sentences.values())))
    for language, kind in product(LANGUAGES, ("extra", "names")):
        pairs = collect_pairs(inputs, language, kind, held_out)
        if pairs:
            name = f"en-{language}.{kind}.tsv.gz"
            report[name] = describe(name, pairs, given.show)
            write(given.output / name, shuffled(chain(*pairs.values())))
    (given.output / "collected.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
