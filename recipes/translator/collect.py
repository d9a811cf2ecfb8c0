"""Text from public repositories and packages: sentences of one language, translated pages, names in two languages.

    python recipes/translator/collect.py --snapshots FOLDER --packages FOLDER --data FOLDER --corpora FOLDER
        --output runs/translator [--show 5]

What is collected are the rows of sources.tsv with the use `monolingual`, `names` or `collected`; a row that is deleted
is left out. Read:

    --snapshots  OWNER+NAME, a bare clone of each repository that the rows name, with the commit that they name
    --packages   the packages that the rows name, as downloaded: NAME-VERSION.tgz of npm, NAME_VERSION_all.deb of Debian
    --data       mt/*/*.{test,valid}*.tsv.gz, the test sets; a text that contains a sentence of theirs is dropped
    --corpora    {de,fr,zh}/ud-pud.tsv.zst, a test set as well; the parts of sources that are collected whole

Written, the same bytes every time:

    {en,de,fr,zh}.mono.txt.gz   a sentence a line, at most 400,000, which distill.py translates
    en-{de,fr,zh}.DOMAIN.tsv.gz  pairs that prepare.py would keep (English, the other language), by the domain of their
                                 row; DOMAIN-more where prepare.py writes this domain too
    en-{de,fr,zh}.names.tsv.gz   names
    collected.json               how many of each source
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path
from typing import TypeVar

from collecting.held_out import HeldOut
from collecting.lexicons import BOOKS, FOOD
from collecting.monolingual import MONOLINGUAL, MOST
from collecting.names import FROM_PACKAGES, FROM_REPOSITORIES, LANGUAGES, Packages
from collecting.parallel import EXTRA
from collecting.parliament import CONTINUES, DEBATES
from collecting.repositories import Repository
from collecting.sentences import simplified
from pairs import HAN, SOURCES, Pair, letters_and_digits, normalize, read_corpus, read_sources, write
from prepare import DOMAINS, reason_to_drop

from allyouneed.errors import UserError

Item = TypeVar("Item", str, Pair)
KNOWN = {
    "monolingual": [*MONOLINGUAL],
    "names": [*FROM_PACKAGES, *FROM_REPOSITORIES],
    "collected": [*EXTRA, *DEBATES, *FOOD, *BOOKS],
}
PACKED = FROM_PACKAGES | BOOKS
CLONED = FROM_REPOSITORIES | EXTRA | DEBATES | FOOD


@dataclass
class Inputs:
    """Where the files of each source are."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    packages: dict[str, Packages] = field(default_factory=dict)
    domains: dict[str, str] = field(default_factory=dict)

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
        name, kind = row["source"], row["use"]
        if kind not in KNOWN:
            return  # prepare.py or another script reads it
        if name not in KNOWN[kind]:
            raise UserError(f"unknown source {name!r} (allowed as {kind}: {', '.join(KNOWN[kind])})")
        if kind != "monolingual":
            self.domains[name] = "names" if kind == "names" else row["domain"]
        if name in PACKED:
            self.packages[name] = Packages(packages, PACKED[name][1])
            self.packages[name].check()
        else:
            self.repositories[name] = Repository.parse(row["origin"], snapshots)
            self.repositories[name].check()

    def pairs(self, language: str, domain: str) -> Iterator[tuple[str, Iterator[Pair]]]:
        """Sources of the pairs of a domain, or of names."""
        for name in [*KNOWN["collected"], *KNOWN["names"]]:
            if self.domains.get(name) != domain:
                continue
            if name in self.packages:
                found = PACKED[name][0](self.packages[name], language)
            else:
                found = CLONED[name](self.repositories[name], language)
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


def collect_pairs(
    inputs: Inputs, language: str, domain: str, held_out: HeldOut, corpora: Path
) -> dict[str, list[Pair]]:
    """By source, each once, and none that the corpora have of this source."""
    seen: set[bytes] = set()
    found: dict[str, list[Pair]] = {}
    words = domain == "dictionary"
    for name, pairs in inputs.pairs(language, domain):
        part = corpora / language / f"{CONTINUES.get(name, name)}.tsv.zst"
        if part.is_file():
            seen.update(key for pair in read_corpus(part) if (key := identity(pair)))
        kept = found[name] = []
        for english, other in (tuple(map(normalize, pair)) for pair in pairs):
            key = identity((english, other))
            if key is None or key in seen:
                continue
            if domain != "names" and reason_to_drop(english, other, language, domain) is not None:
                continue
            if not held_out.within(english, words) and not held_out.within(other, words):
                seen.add(key)
                kept.append((english, other))
    return found


def identity(pair: Pair) -> bytes | None:
    """The same for pairs that differ in case, spaces and punctuation only; None if a side has nothing else."""
    ours, theirs = map(letters_and_digits, pair)
    return hashlib.blake2b(f"{ours}\t{theirs}".encode(), digest_size=8).digest() if ours and theirs else None


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
    for language, domain in product(LANGUAGES, dict.fromkeys(inputs.domains.values())):
        pairs = collect_pairs(inputs, language, domain, held_out, given.corpora)
        if any(pairs.values()):
            name = f"en-{language}.{domain}{'-more' if domain in DOMAINS else ''}.tsv.gz"
            report[name] = describe(name, pairs, given.show)
            write(given.output / name, shuffled(chain(*pairs.values())))
    (given.output / "collected.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
