"""Single words as training pairs: the most frequent ones, each with the translation that fits most often.

    python recipes/translator/words.py --dictionaries FOLDER --data runs/translator --output runs/translator

`--dictionaries`: see dictionaries.py. `--data`: en-LL.DOMAIN.tsv.gz as prepare.py writes them; they say how frequent a
word is, and which of its translations stands on the other side of its sentences most often. Written: en-LL.words.tsv.gz
and LL-en.words.tsv.gz, source first. (The dictionary files of the corpora are samples: most frequent words are not in
them.)
"""

from __future__ import annotations

import argparse
import gzip
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from dictionaries import OBJECT, Entries, judged, load

DOMAINS = {"everyday": 200_000, "general": 60_000, "parliament": 60_000, "stories": 40_000}  # pairs that are counted
FREQUENT = 8000  # words of each language
LONGEST = 4  # characters of a Chinese word
WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
HAN = re.compile(r"[\u4e00-\u9fff]+")


def read(data: Path, language: str) -> Iterator[tuple[str, str]]:
    for domain, most in DOMAINS.items():
        path = data / f"en-{language}.{domain}.tsv.gz"
        if path.is_file():
            with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
                for _, line in zip(range(most), file, strict=False):
                    english, _, other = line.rstrip("\n").partition("\t")
                    yield english, other


def words_of(text: str, language: str, known: set[str]) -> dict[str, str]:
    """The words of a sentence that the dictionary has: the form that `judged` gives, and the spelling. Chinese: longest
    first."""
    if language != "zh":
        return {word: found for found in WORD.findall(text) if (word := judged(found, language)) in known}
    found = {}
    for run in HAN.findall(text):
        at = 0
        while at < len(run):
            size = next((n for n in range(LONGEST, 1, -1) if run[at : at + n] in known), 1)
            word = run[at : at + size]
            if word in known:
                found[word] = word
            at += size
    return found


def single(entries: Entries, here: str, there: str) -> dict[str, dict[str, str]]:
    """Translations of each single word, by their comparison form; of several words only where there is no other."""
    found: dict[str, dict[str, str]] = {}
    longer: dict[str, dict[str, str]] = {}
    for word, translations in entries.items():
        plain = judged(word, here)
        if not plain or " " in plain:
            continue
        for one in translations:
            form = judged(one, there)
            if form and " " not in form:
                bare = one.split(" ")[-1] if " " in one else one
                found.setdefault(plain, {}).setdefault(form, bare)
            elif 1 <= form.count(" ") <= 2 and OBJECT.search(one) is None:
                longer.setdefault(plain, {}).setdefault(form, one)
    return longer | found


def choose(
    book: dict[str, dict[str, str]], counts: Counter[str], others: Counter[str], both: Counter[tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    """The best translation of each frequent word, and a second one if it is nearly as frequent."""
    for word, _ in counts.most_common(FREQUENT):
        scores = {form: both[word, form] / math.sqrt(others[form] + 1) for form in book[word]}
        best = sorted(scores, key=lambda form: (-scores[form], -others[form], form))[:2]
        for rank, form in enumerate(best):
            if rank == 0 or scores[form] > 0.6 * scores[best[0]] > 0:
                yield word, book[word][form]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dictionaries", required=True, type=Path)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    given = parser.parse_args()
    for language in ("de", "fr", "zh"):
        there, back = load(given.dictionaries, language)
        books = single(there, "en", language), single(back, language, "en")
        counts: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        both: Counter[tuple[str, str]] = Counter()
        spellings: dict[tuple[int, str], Counter[str]] = {}
        known = set(books[0]), set(books[1])
        for pair in read(given.data, language):
            found = words_of(pair[0], "en", known[0]), words_of(pair[1], language, known[1])
            counts[0].update(list(found[0]))
            counts[1].update(list(found[1]))
            for number, some in enumerate(found):
                for form, spelling in some.items():
                    spellings.setdefault((number, form), Counter())[spelling] += 1
            both.update((word, other) for word in found[0] for other in found[1] if other in books[0][word])
        for here, other, number in (("en", language, 0), (language, "en", 1)):
            table = both if number == 0 else Counter({(right, left): n for (left, right), n in both.items()})
            pairs = []
            for word, translation in choose(books[number], counts[number], counts[1 - number], table):
                usual = spellings[number, word].most_common(1)[0][0]
                pairs += dict.fromkeys((one, translation) for one in (usual, word))
                if here != "zh":
                    pairs.append((usual[:1].upper() + usual[1:], translation[:1].upper() + translation[1:]))
            text = "".join(f"{left}\t{right}\n" for left, right in pairs)
            (given.output / f"{here}-{other}.words.tsv.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
            print(f"{here}-{other}: {len(pairs):,} pairs")


if __name__ == "__main__":
    main()
