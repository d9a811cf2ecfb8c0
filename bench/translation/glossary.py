"""Glossaries: how often a term gets its translation, and what that costs the rest of the sentence.

    python bench/translation/glossary.py --model FOLDER --pairs PAIRS.tsv[.gz] --terms TERMS.tsv[.gz] --from en --to de
        [--reverse] [--invented] [--limit 200] [--show 5]

`--pairs`: source and reference; `--terms`: a term and its translation in each line, such as a dictionary. `--reverse`:
the columns of both files the other way round. A sentence is used if it has a term, and its reference the translation.
`--invented`: made-up translations in place of the dictionary's, which no model would choose unprompted.

Four ways are compared: no glossary; a stand-in for every term; marked terms (the model alone); marked terms, and forced
decoding where a translation is missing (what `glossary=` does for a model that was trained with marked terms).
`rest`: BLEU and chrF without the terms, in translation and reference.
"""

from __future__ import annotations

import argparse
import gzip
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from allyouneed.apps.translate.glossary import Glossary, count_term
from allyouneed.apps.translate.spans.term_marks import mark_terms
from allyouneed.apps.translate.translator import Translator
from allyouneed.folder import Folder
from allyouneed.metrics.translation import evaluate
from allyouneed.models import shipped

SHORTEST = 4  # letters of a term; 2 in Chinese
MOST_TERMS = 3  # of a sentence
HAN = re.compile(r"[\u4e00-\u9fff]")


class Case(NamedTuple):
    """A sentence and its terms, as they are found in it."""

    source: str
    reference: str
    terms: dict[str, str]


class Figures(NamedTuple):
    """Hit rate in percent, BLEU and chrF of the whole and of the rest, sentences per second."""

    hits: float
    bleu: float
    chrf: float
    rest_bleu: float
    rest_chrf: float
    speed: float


def read_pairs(path: Path, reverse: bool) -> Iterator[tuple[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for line in file:
            first, _, second = line.rstrip("\n").partition("\t")
            yield (second, first) if reverse else (first, second)


def find_cases(pairs: list[tuple[str, str]], terms: list[tuple[str, str]], limit: int) -> list[Case]:
    """Sentences with terms whose translation is in the reference."""
    known: dict[str, list[str]] = {}
    for term, translation in terms:
        shortest = 2 if HAN.match(term) else SHORTEST
        if len(term) >= shortest and term.lower() != translation.lower():
            known.setdefault(term, []).append(translation)
    glossary = Glossary({term: term for term in known})
    cases = []
    for source, reference in pairs:
        found: dict[str, str] = {}
        for start, end, _ in glossary.find(source):
            term = source[start:end]
            fitting = [one for one in known.get(term, ()) if count_term(one, reference)]
            if fitting and len(found) < MOST_TERMS:
                found[term] = max(fitting, key=len)
        if found and all(count_term(term, source) == 1 for term in found):
            cases.append(Case(source, reference, found))
        if len(cases) == limit:
            break
    return cases


def invent(cases: list[Case]) -> list[Case]:
    """The same sentences with made-up translations, in the references too."""
    dice = random.Random(0)
    made = []
    for source, reference, terms in cases:
        others = {}
        for term, translation in terms.items():
            word = "".join(dice.choice(("bra", "dor", "kel", "mi", "nov", "sen", "ta", "vel")) for _ in range(3))
            others[term] = word.capitalize() if translation[:1].isupper() else word
            reference = reference.replace(translation, others[term])
        made.append(Case(source, reference, others))
    return made


def ways(translator: Translator, here: str, to: str) -> dict[str, Callable[[Case], str]]:
    """Each way to translate a sentence. A glossary is that of its sentence: words may have several translations."""
    options = {"to": to, "from_": here if translator.routes.detector is not None else None}

    def with_glossary(case: Case, marks: bool) -> str:
        trained = translator.marks_terms
        translator.marks_terms = marks
        try:
            return translator.translate(case.source, glossary=case.terms, **options)
        finally:
            translator.marks_terms = trained

    def with_marks(case: Case) -> str:
        marked = mark_terms(case.source, Glossary(case.terms).find(case.source))
        return translator.translate(marked, protect=False, **options)

    return {
        "no glossary": lambda case: translator.translate(case.source, **options),
        "stand-ins": lambda case: with_glossary(case, False),
        "marked terms": with_marks,
        "marked terms, forced": lambda case: with_glossary(case, True),
    }


def measure(translate: Callable[[Case], str], cases: list[Case], to: str) -> tuple[Figures, list[str]]:
    """The figures of one way, and its translations."""
    began = time.perf_counter()
    texts = [translate(case) for case in cases]
    seconds = time.perf_counter() - began
    wanted = [(term, text) for case, text in zip(cases, texts, strict=True) for term in case.terms.values()]
    hits = sum(count_term(term, text) > 0 for term, text in wanted)
    references = [case.reference for case in cases]
    rest = [[without(text, case) for text, case in zip(some, cases, strict=True)] for some in (texts, references)]
    whole, other = evaluate(texts, references, to), evaluate(rest[0], rest[1], to)
    speed = len(cases) / seconds
    return Figures(100 * hits / len(wanted), whole.bleu, whole.chrf, other.bleu, other.chrf, speed), texts


def without(text: str, case: Case) -> str:
    """A text without the translations of the terms."""
    for translation in case.terms.values():
        text = text.replace(translation, " ")
    return re.sub(r" +", " ", text).strip()


def table(translator: Translator, cases: list[Case], here: str, to: str, show: int = 0) -> str:
    count = sum(len(case.terms) for case in cases)
    lines = [f"{len(cases)} sentences, {count} terms", ""]
    lines += ["| | hit rate | BLEU | chrF | BLEU of the rest | chrF of the rest | sentences/s |", "|---|" + "---:|" * 6]
    found: dict[str, list[str]] = {}
    for name, way in ways(translator, here, to).items():
        figures, found[name] = measure(way, cases, to)
        numbers = " | ".join(f"{number:.1f}" for number in figures[1:])
        lines.append(f"| {name} | {figures.hits:.1f} % | {numbers} |")
    for number, case in enumerate(cases[:show]):
        lines += ["", f"{case.source}  {case.terms}", f"  reference: {case.reference}"]
        lines += [f"  {name}: {texts[number]}" for name, texts in found.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--terms", type=Path, required=True)
    parser.add_argument("--from", dest="here", required=True)
    parser.add_argument("--to", required=True)
    parser.add_argument("--reverse", action="store_true")
    parser.add_argument("--invented", action="store_true")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--show", type=int, default=0)
    given = parser.parse_args()
    translator = Translator(Folder.load(given.model or shipped()))
    pairs, terms = (list(read_pairs(path, given.reverse)) for path in (given.pairs, given.terms))
    cases = find_cases(pairs, terms, given.limit)
    if not cases:
        parser.error("no sentence has one of the terms, and its reference the translation")
    print(table(translator, invent(cases) if given.invented else cases, given.here, given.to, given.show))


if __name__ == "__main__":
    main()
