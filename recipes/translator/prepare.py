"""Training files of the translator: clean, filter, deduplicate, group by domain.

    python recipes/translator/prepare.py --corpora FOLDER --data FOLDER --output runs/translator [--workers 2]

`--corpora` holds {de,fr,zh}/SOURCE.tsv.zst (English first; sources of sources.tsv used as `parallel`), `--data` the
Tatoeba files mt/{zh-en,en-de,en-fr}/tatoeba.train.tsv.gz and all test sets mt/*/*.{test,valid}*.tsv.gz. A pair is
dropped if either side contains a sentence of theirs or of UD-PUD. Written: en-LL.DOMAIN.tsv.gz for every language and
domain, en-LL.valid.tsv.gz (UD-PUD: news and Wikipedia, never trained on), and report.json with what each rule removed.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import re
import unicodedata
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from collecting.held_out import HeldOut
from pairs import HAN, Pair, letters_and_digits, normalize, read_corpus, read_sources, write

TATOEBA = {"zh": ("zh-en", 0, 1), "de": ("en-de", 1, 0), "fr": ("en-fr", 1, 0)}  # folder, its column, English's column
LONGEST = 500  # characters of a side
TRANSLATIONS = 3  # of one English text, at most
MOST = {  # pairs of a domain, at most
    "manual": {"de": 350_000, "fr": 380_000, "zh": 480_000},
    "interface": {"de": 50_000, "fr": 50_000, "zh": 50_000},
}
# domains, in the order in which their sources are read
DOMAINS = (
    "validation",
    "general",
    "parliament",
    "stories",
    "law",
    "scripture",
    "dictionary",
    "manual",
    "interface",
)
EXAMPLE = "机器学习很有趣"  # of the README: must not be in the training data

URL = re.compile(r"(?:https?|ftp)://[^\s<>\"'，。、）)]+|www\.[^\s<>\"'，。、）)]+")
WORD = re.compile(r"[^\W\d_]+")
# frequent words that the other two languages do not have
WORDS = {
    "en": "the and of to is that it for with as was are this be by have from you not which will an",
    "de": "der die das und ist nicht sie ein eine mit den dem zu von auf für werden wird auch oder bei",
    "fr": "le la les de des et est un une que pour dans qui sur avec pas du au par sont vous être ou ce",
}
FREQUENT = {language: frozenset(words.split()) for language, words in WORDS.items()}


def digits(text: str) -> Counter[str]:
    return Counter(c for c in unicodedata.normalize("NFKC", text) if c in "0123456789")


def looks_like(text: str, language: str, expected: str = "en") -> bool:
    """Whether a text has more frequent words of this language than of the expected one."""
    words = WORD.findall(text.lower())
    return sum(word in FREQUENT[language] for word in words) > sum(word in FREQUENT[expected] for word in words)


def reason_to_drop(english: str, other: str, language: str, domain: str) -> str | None:
    """Why a pair is unusable; None if it is usable."""
    if not english or not other:
        return "empty"
    if max(len(english), len(other)) > LONGEST:
        return "too long"
    if "\ufffd" in english + other:
        return "broken characters"
    letters = [sum(map(str.isalpha, text)) for text in (english, other)]
    if min(letters) == 0 or letters[0] < 0.5 * len(english.replace(" ", "")):
        return "not prose"
    if other == english and len(WORD.findall(english)) > 2:
        return "not translated"
    if EXAMPLE in other:
        return "held out"
    size = len(other) * (2.9 if language == "zh" else 0.9)  # in English characters
    if not 1 / 2.6 < (size + 12) / (len(english) + 12) < 2.6:
        return "length ratio"
    if domain != "dictionary" and digits(english) != digits(other) and not (language == "zh" and domain == "general"):
        return "other numbers"
    if sorted(URL.findall(english)) != sorted(URL.findall(other)):
        return "other addresses"
    if language == "zh":
        han = len(HAN.findall(other))
        if han < 0.35 * letters[1] or HAN.search(english):
            return "other language"
    elif looks_like(english, language) or looks_like(other, "en", language):
        return "other language"
    return None


def read_tatoeba(data: Path, language: str, name: str) -> list[Pair]:
    folder, own, english = TATOEBA[language]
    with gzip.open(data / "mt" / folder / f"{name}.tsv.gz", "rt", encoding="utf-8", newline="\n") as file:
        rows = [line.rstrip("\r\n").split("\t") for line in file]
    return [(row[english], row[own]) for row in rows]


def write_cases(output: Path, language: str, pairs: list[Pair]) -> None:
    """One pair in 25 again, by direction: ALL CAPS and Title Case on both sides, or lower case and no full stop in the
    source only. German, whose nouns lose most, has one pair in three in lower case. Chinese has no case."""
    numbered = [(hashlib.md5("".join(pair).encode()).digest(), pair) for pair in pairs]
    chosen = [pair for number, pair in numbered if number[0] % 25 == 0]
    directions = [("en", language)] if language == "zh" else [("en", language), (language, "en")]
    for here, there in directions:
        found = []
        for number, pair in enumerate(chosen):
            source, target = pair if here == "en" else pair[::-1]
            variant = number % 5
            if variant < 2:
                found.append((source.upper(), target if there == "zh" else target.upper()))
            elif variant == 2:
                found.append((title(source), target if there == "zh" else title(target)))
            else:
                found.append((source.lower().rstrip(". "), target))
        if here == "de":
            german = [pair[::-1] for number, pair in numbered if number[1] % 3 == 0]
            found += [(source.lower(), target) for source, target in german]
        write(output / f"{here}-{there}.cases.tsv.gz", found)


def title(text: str) -> str:
    return " ".join(word[:1].upper() + word[1:] for word in text.split(" "))


def prepare_language(language: str, corpora: Path, data: Path, output: Path) -> dict[str, object]:
    held_out = HeldOut.load(data, corpora)
    domains: dict[str, list[Pair]] = {}
    report: dict[str, Counter[str]] = {}
    seen: set[bytes] = set()
    translations: Counter[bytes] = Counter()
    files = [("tatoeba", "everyday", iter(read_tatoeba(data, language, "tatoeba.train")))]
    paths = {row["source"]: corpora / language / f"{row['source']}.tsv.zst" for row in read_sources()}
    rows = [row for row in read_sources() if paths[row["source"]].is_file()]
    for row in sorted(rows, key=lambda row: DOMAINS.index(row["domain"])):
        files.append((row["source"], row["domain"], read_corpus(paths[row["source"]])))
    for source, domain, pairs in files:
        counts = report.setdefault(source, Counter())
        for pair in pairs:
            english, other = map(normalize, pair)
            reason = reason_to_drop(english, other, language, domain)
            plain = letters_and_digits(english), letters_and_digits(other)
            if reason is None and domain != "validation":
                words = domain == "dictionary"
                reason = "held out" if any(held_out.within(text, words) for text in (english, other)) else None
            if reason is None:
                key = hashlib.blake2b("\t".join(plain).encode(), digest_size=8).digest()
                same = hashlib.blake2b(plain[0].encode(), digest_size=8).digest()
                if key in seen:
                    reason = "duplicate"
                elif translations[same] >= TRANSLATIONS:
                    reason = "many translations"
                else:
                    seen.add(key)
                    translations[same] += 1
                    domains.setdefault(domain, []).append((english, other))
            counts[reason or "kept"] += 1
    write_cases(output, language, [pair for name in ("everyday", "general", "stories") for pair in domains[name]])
    for domain, kept in domains.items():
        if domain != "validation":
            random.Random(0).shuffle(kept)
        kept = kept[: MOST.get(domain, {}).get(language)]
        write(output / f"en-{language}.{'valid' if domain == 'validation' else domain}.tsv.gz", kept)
    return {"pairs": {domain: len(kept) for domain, kept in domains.items()}, "sources": report}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", required=True, type=Path)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(given.workers) as pool:
        work = {
            language: pool.submit(prepare_language, language, given.corpora, given.data, given.output)
            for language in TATOEBA
        }
        report = {language: result.result() for language, result in work.items()}
    (given.output / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")
    for language, found in report.items():
        print(f"en-{language}: {found['pairs']}")


if __name__ == "__main__":
    main()
