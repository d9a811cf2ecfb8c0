"""Every figure of a translator: quality, robustness, speed. One command, one table.

    python bench/translation/translator_quality.py --model FOLDER --data FOLDER [--old FOLDER] [--dictionaries FOLDER]
        [--encoder LL=FOLDER] [--only sets,numbers,…] [--limit N] [--json OUT] [--markdown OUT] [--texts OUT]

`--data` holds mt/{en-de,en-fr,zh-en}/*.tsv.gz and corpora/{de,fr,zh}/ud-pud.tsv.zst. `--dictionaries`: full books for
the single words (recipes/translator/dictionaries.py says which). `--old`: a model to compare the speed with.
`--encoder en=FOLDER`: a sentence encoder of a target language; the mean cosine between translation and reference.

Parts (`--only`): sets, numbers, spans, words, cases, traditional, speed. Everything is translated as a user gets it:
the folder's own decoding, protected spans. Without `--limit` a set has at most 300 sentences, evenly spaced (tatoeba
500, ud-pud 500), 10,000 numbers, 2,000 words of each language, 500 sentences in other cases: about 25 minutes of CPU
time for a model of 45 MB. BLEU and chrF are sacreBLEU's, with 95 % intervals (1,000 bootstrap resamples).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "recipes" / "translator"))

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from allyouneed.apps.translate.translator import Translator
from allyouneed.folder import Folder
from allyouneed.metrics.translation import TranslationScores, evaluate
from allyouneed.runtime.process import set_threads
from bench.translation import spans as span_sentences
from bench.translation.quality import checks, data, numbers, speed, tables, words

SENTENCES = {"tatoeba": 500, "ud-pud": 500}
OTHERS = 300
NUMBERS = 10_000
CASES = 500
Figures = dict[str, Any]


class Run:
    """One evaluation: the model, the data, what was found so far."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.model = Translator(Folder.load(given.model))
        self.directions = [one for one in data.DIRECTIONS if one in self.model.folder.directions]
        self.encoders: dict[str, Any] = {}
        for one in given.encoder or ():
            language, _, folder = one.partition("=")
            self.encoders[language] = load_encoder(folder)
        self.texts: list[tuple[str, ...]] = []

    def count(self, default: int) -> int:
        return default if self.given.limit is None else min(default, self.given.limit)

    def translate(self, texts: list[str], direction: data.Direction) -> list[str]:
        here, there = direction
        return self.model.translate(texts, there, from_=here)


def load_encoder(folder: str) -> Any:
    import allyouneed

    return allyouneed.load(folder)


def figures_of(scores: TranslationScores) -> Figures:
    assert scores.bleu_interval is not None and scores.chrf_interval is not None
    return {
        "sentences": scores.sentences,
        "bleu": round(scores.bleu, 3),
        "bleu_interval": [round(scores.bleu_interval.low, 3), round(scores.bleu_interval.high, 3)],
        "chrf": round(scores.chrf, 3),
        "chrf_interval": [round(scores.chrf_interval.low, 3), round(scores.chrf_interval.high, 3)],
        "bleu_signature": scores.bleu_signature,
        "chrf_signature": scores.chrf_signature,
    }


def sets(run: Run) -> Figures:
    """BLEU and chrF on every test set, and faults that need no reference."""
    found: Figures = {}
    faults: dict[str, Counter[str]] = {}
    for one in data.SETS:
        for direction in run.directions:
            pairs = data.test_pairs(run.given.data, one, direction)
            pairs = data.spread(pairs, run.count(SENTENCES.get(one.name, OTHERS)))
            if not pairs:
                continue
            sources, references = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            began = time.process_time()
            texts = run.translate(sources, direction)
            name = "-".join(direction)
            figures = figures_of(evaluate(texts, references, direction[1]))
            figures["cpu_seconds"] = round(time.process_time() - began, 1)
            if direction[1] in run.encoders:
                figures["cosine"] = round(cosine(run.encoders[direction[1]], texts, references), 4)
            found.setdefault(one.name, {})[name] = figures
            detector = run.model.routes.detector
            if detector is not None:
                faults.setdefault(name, Counter()).update(
                    checks.count(sources, texts, references, direction[1], detector)
                )
            run.texts += [(one.name, name, *row) for row in zip(sources, references, texts, strict=True)]
            print(f"{one.name} {name}: BLEU {figures['bleu']:.2f}, chrF {figures['chrf']:.2f}", file=sys.stderr)
    return {"sets": found, "faults": {name: dict(counts) for name, counts in faults.items()}}


def cosine(encoder: Any, texts: list[str], references: list[str]) -> float:
    import torch

    left, right = (torch.as_tensor(encoder.embed(some)) for some in (texts, references))
    return float(torch.nn.functional.cosine_similarity(left, right).mean())


def number_cases(run: Run) -> Figures:
    """Shares of numbers that come through: by value, and as the target language writes them."""
    every = list(numbers.cases(run.count(NUMBERS)))
    counts: dict[str, Counter[str]] = {}
    wrong: list[dict[str, str]] = []
    for direction in run.directions:
        some = [case for case in every if case.direction == direction]
        for case, text in zip(some, run.translate([case.source for case in some], direction), strict=True):
            value, local = case.judge(text)
            for name in (case.kind, "-".join(direction), "all"):
                counts.setdefault(name, Counter()).update(sentences=1, value=value, local=local)
            if not value:
                wrong.append({"kind": case.kind, "direction": "-".join(direction), "source": case.source, "text": text})
    print(f"numbers: {dict(counts['all'])}", file=sys.stderr)
    return {"numbers": {name: dict(count) for name, count in counts.items()}, "wrong_numbers": wrong[:200]}


def spans(run: Run) -> Figures:
    """Shares of URLs, code, placeholders, tags, emoji that come through (spans.py has the sentences)."""
    found = span_sentences.survival(run.model, run.given.limit, True)
    kinds = {kind: [round(found[kind], 3), int(found[f"{kind}, sentences"])] for kind in span_sentences.KINDS}
    return {"spans": kinds}


def single_words(run: Run) -> Figures:
    """Shares of the most frequent words whose translation is in the dictionary."""
    found, wrong = {}, {}
    for language in ("de", "fr", "zh"):
        asked = words.questions(run.given.dictionaries, run.given.data, language, run.count(words.WORDS))
        for direction, some in asked.items():
            answers = run.translate([one.word for one in some], direction)
            judged = [words.judge(one, text, direction[1]) for one, text in zip(some, answers, strict=True)]
            found["-".join(direction)] = {
                "words": len(some),
                "in the dictionary": sum(good for good, _ in judged),
                "same case": sum(exact for _, exact in judged),
            }
            wrong["-".join(direction)] = [
                [one.word, text] for one, text, (good, _) in zip(some, answers, judged, strict=True) if not good
            ][:200]
            print(f"words {direction}: {found['-'.join(direction)]}", file=sys.stderr)
    return {"words": found, "wrong_words": wrong}


def cases(run: Run) -> Figures:
    """BLEU (case-insensitive) of Tatoeba in ALL CAPS and all lower case, and what is lost against normal case."""
    found: Figures = {}
    for direction in run.directions:
        if direction[0] == "zh":
            continue
        pairs = data.spread(data.test_pairs(run.given.data, data.SETS[0], direction), run.count(CASES))
        references = [pair[1] for pair in pairs]
        row = {}
        for name, change in (("normal", str), ("upper", str.upper), ("lower", str.lower)):
            made: Callable[[str], str] = change
            texts = run.translate([made(pair[0]) for pair in pairs], direction)
            row[name] = round(evaluate(texts, references, direction[1], lowercase=True, resamples=0).bleu, 3)
        found["-".join(direction)] = row
        print(f"cases {direction}: {row}", file=sys.stderr)
    return {"cases": found}


def traditional(run: Run) -> Figures:
    """BLEU of Chinese in traditional characters, and what is lost against simplified ones."""
    from allyouneed.apps.translate.chinese_scripts import to_traditional

    found: Figures = {}
    for one in data.SETS[:2]:
        pairs = data.spread(data.test_pairs(run.given.data, one, ("zh", "en")), run.count(CASES))
        references = [pair[1] for pair in pairs]
        row = {}
        for name, sources in (
            ("simplified", [pair[0] for pair in pairs]),
            ("traditional", [to_traditional(pair[0]) for pair in pairs]),
        ):
            row[name] = round(evaluate(run.translate(sources, ("zh", "en")), references, "en", resamples=0).bleu, 3)
        found[one.name] = row
    print(f"traditional: {found}", file=sys.stderr)
    return {"traditional": found}


def speeds(run: Run) -> Figures:
    """Against `--old`, in turns in the same process, on two threads."""
    if run.given.old is None:
        return {}
    old = Translator(Folder.load(run.given.old))
    pairs = data.test_pairs(run.given.data, data.SETS[0], ("en", "de"))
    found = speed.compare(run.model, old, [pair[0] for pair in pairs], "en", "de")
    print(f"speed: {found}", file=sys.stderr)
    return {"speed": found}


PARTS: dict[str, Callable[[Run], Figures]] = {
    "sets": sets,
    "numbers": number_cases,
    "spans": spans,
    "words": single_words,
    "cases": cases,
    "traditional": traditional,
    "speed": speeds,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--dictionaries", type=Path)
    parser.add_argument("--encoder", action="append", metavar="LL=FOLDER")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--limit", type=int, help="sentences of each set and kind, at most")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    parser.add_argument("--texts", type=Path, help="write set, direction, source, reference, translation")
    given = parser.parse_args()
    chosen = given.only.split(",")
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"--only {unknown[0]}: unknown (allowed: {', '.join(PARTS)})")
    if "words" in chosen and given.dictionaries is None:
        print("no --dictionaries: the single words are left out", file=sys.stderr)
        chosen.remove("words")
    set_threads(given.threads)
    run = Run(given)
    found: Figures = {}
    if given.json is not None and given.json.is_file():
        found = json.loads(given.json.read_text(encoding="utf-8"))
    for name in chosen:
        began = time.process_time()
        found |= PARTS[name](run)
        found.setdefault("cpu_seconds", {})[name] = round(time.process_time() - began, 1)
        if given.json is not None:
            given.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if given.texts is not None:
        rows = ("\t".join(" ".join(cell.split()) for cell in row) for row in run.texts)
        given.texts.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    text = tables.markdown(found)
    if given.markdown is not None:
        given.markdown.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
