"""Training pairs that teach the translator what running text seldom shows: numbers, names, code, glossaries, typos.

    python recipes/translator/augment.py --data runs/translator --output runs/translator [--show 5]

Reads what prepare.py wrote and writes XX-YY.copy.tsv.gz (source, target) for each of the six directions, the same bytes
every time. Needs Babel (`pip install babel`: CLDR's dates and names). The kinds are the functions in KINDS, with the
number of pairs of each; `--show` prints some of every kind. Glossary terms are marked as `mark_terms` of
allyouneed.apps.translate.spans.term_marks does, which inference uses as well: <U+0002>term<U+0003>translation<U+0004>.
The folder of a model trained on these files has `marked_terms: true`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from augmentation.copied import at_edges, cities, named, real_spans, tagged
from augmentation.corpus import SAMPLE, Direction, Language
from augmentation.templated import bare_values, greetings, noun_templates, number_templates, real_numbers
from augmentation.terms import glossary, phrases, words
from augmentation.varied import cased, joined, noisy
from pairs import Pair, write

DIRECTIONS = [("en", "de"), ("de", "en"), ("en", "fr"), ("fr", "en"), ("en", "zh"), ("zh", "en")]

KINDS: dict[str, tuple[Callable[[Direction, random.Random], Iterator[Pair]], int]] = {
    "number_templates": (number_templates, 13_000),
    "bare_values": (bare_values, 2_500),
    "real_numbers": (real_numbers, 9_000),
    "noun_templates": (noun_templates, 4_500),
    "real_spans": (real_spans, 4_000),
    "named": (named, 5_000),
    "cities": (cities, 1_500),
    "tagged": (tagged, 3_500),
    "at_edges": (at_edges, 2_500),
    "cased": (cased, 6_000),
    "noisy": (noisy, 6_000),
    "joined": (joined, 5_000),
    "greetings": (greetings, 1_000),
    "words": (words, 8_000),
    "phrases": (phrases, 2_000),
    "glossary": (glossary, 10_000),
}


def take(kind: str, direction: Direction) -> list[Pair]:
    """The pairs of a kind, each once; fewer where there are no more."""
    make, most = KINDS[kind]
    found: dict[Pair, None] = {}
    for tries, pair in enumerate(make(direction, random.Random(f"{kind} {direction.here} {direction.there}"))):
        if all(text.strip() and "\t" not in text and "\n" not in text for text in pair):
            found[pair] = None
        if len(found) >= most or tries > 3 * most:
            break
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--show", type=int, default=0, help="print this many pairs of every kind")
    parser.add_argument("--only", action="append", metavar="XX-YY", help="a direction; default: all six")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    languages = {name: Language(name, given.data) for name in SAMPLE}
    for here, there in DIRECTIONS:
        if given.only and f"{here}-{there}" not in given.only:
            continue
        direction = Direction(here, there, languages[there if here == "en" else here])
        found: list[Pair] = []
        for kind in KINDS:
            pairs = take(kind, direction)
            print(f"{here}-{there} {kind}: {len(pairs)}", flush=True)
            for source, target in random.Random(0).sample(pairs, min(given.show, len(pairs))):
                print(f"    {source}  |||  {target}")
            found += pairs
        random.Random(0).shuffle(found)
        write(given.output / f"{here}-{there}.copy.tsv.gz", found)


if __name__ == "__main__":
    main()
