"""Single words: the most frequent ones of each language, judged by the dictionaries."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from dictionaries import Entries, judged, load

from bench.translation.quality.data import Direction, frequencies

LONGEST = 4  # characters of a Chinese word
WORDS = 2000


class Question(NamedTuple):
    """A word and its translations, as the dictionary spells them."""

    word: str
    answers: set[str]


def questions(folder: Path, data: Path, language: str, count: int = WORDS) -> dict[Direction, list[Question]]:
    """The `count` most frequent words that the dictionaries of the language have, in both directions."""
    there, back = load(folder, language)
    return {
        ("en", language): _most_frequent(there, frequencies(data, "en"), "en", count),
        (language, "en"): _most_frequent(back, frequencies(data, language), language, count),
    }


def _most_frequent(entries: Entries, counts: Counter[str], language: str, count: int) -> list[Question]:
    book: dict[str, set[str]] = {}
    for word, answers in entries.items():
        form = judged(word, language)
        if form and " " not in form:
            book.setdefault(form, set()).update(answers)
    spellings: dict[str, Counter[str]] = {}
    for word, number in (_split(counts, set(book)) if language == "zh" else counts).items():
        form = judged(word, language)
        if form in book:
            spellings.setdefault(form, Counter())[word] += number
    most = sorted(spellings, key=lambda form: (-spellings[form].total(), form))[:count]
    return [Question(spellings[form].most_common(1)[0][0], book[form]) for form in most]


def _split(runs: Counter[str], known: set[str]) -> Counter[str]:
    """Runs of Chinese characters as words of the dictionary, longest first."""
    found: Counter[str] = Counter()
    for run, number in runs.items():
        at = 0
        while at < len(run):
            size = next((n for n in range(LONGEST, 1, -1) if run[at : at + n] in known), 1)
            found[run[at : at + size]] += number
            at += size
    return found


def judge(question: Question, answer: str, language: str) -> tuple[bool, bool]:
    """Whether the dictionary has this translation; and whether in this case, too."""
    good = judged(answer, language) in {judged(one, language) for one in question.answers}
    plain, known = judged(answer, language, False), {judged(one, language, False) for one in question.answers}
    if question.word[:1].isupper():  # a capitalised word may be answered by a capitalised one
        known |= {one[:1].upper() + one[1:] for one in known}
    return good, plain in known
