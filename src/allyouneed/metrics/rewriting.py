"""Metrics of texts that are written from other texts, each from 0 to 100: exact matches, ROUGE, chrF and BLEU (higher
is better), and the error rates of characters and words (lower is better)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from allyouneed.data.tokenizers.base import EAST_ASIAN_CHARACTER
from allyouneed.errors import UserError
from allyouneed.metrics.translation import evaluate
from allyouneed.metrics.words import error_rate

EAST_ASIAN = EAST_ASIAN_CHARACTER.pattern
WORD = re.compile(rf"{EAST_ASIAN}|(?:(?!{EAST_ASIAN})[^\W_])+")


def words(text: str) -> list[str]:
    """Runs of letters and digits in lower case, as rouge-score splits English; each Chinese or Japanese character is a
    word."""
    return WORD.findall(text.lower())


def rouge_n(found: str, expected: str, n: int) -> float:
    """F1 of the n-grams that both texts have (Lin 2004, section 2), 0 to 1."""
    ours, theirs = (Counter(zip(*(words(text)[k:] for k in range(n)), strict=False)) for text in (found, expected))
    return _f1((ours & theirs).total(), ours.total(), theirs.total())


def rouge_l(found: str, expected: str) -> float:
    """F1 of the longest common subsequence of words (Lin 2004, section 3), 0 to 1."""
    ours, theirs = words(found), words(expected)
    return _f1(common_subsequence(ours, theirs), len(ours), len(theirs))


def _f1(hits: int, found: int, expected: int) -> float:
    return 2 * hits / (found + expected) if hits else 0.0


def common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest common subsequence. A row of the table at a time: its values never fall from left to
    right, so a running maximum replaces the look to the left."""
    numbers = {word: number for number, word in enumerate(dict.fromkeys(other))}
    columns = np.array([numbers[word] for word in other], np.int64)
    row = np.zeros(len(other) + 1, np.int64)
    for word in one:
        row[1:] = np.maximum.accumulate(np.maximum(row[1:], row[:-1] + (columns == numbers.get(word, -1))))
    return int(row[-1])


def _mean(score: Callable[[str, str], float]) -> Callable[[Sequence[str], Sequence[str]], float]:
    return lambda found, expected: 100 * float(np.mean([score(f, e) for f, e in zip(found, expected, strict=True)]))


# what they compute from texts and their references
METRICS: dict[str, Callable[[Sequence[str], Sequence[str]], float]] = {
    "exact": _mean(lambda found, expected: float(found.strip() == expected.strip())),
    "rouge-1": _mean(lambda found, expected: rouge_n(found, expected, 1)),
    "rouge-2": _mean(lambda found, expected: rouge_n(found, expected, 2)),
    "rouge-l": _mean(rouge_l),
    "cer": lambda found, expected: error_rate(found, expected, list),
    "wer": lambda found, expected: error_rate(found, expected, str.split),
}


def rewriting_figures(
    found: Sequence[str], expected: Sequence[str], resamples: int = 0
) -> tuple[dict[str, float], str]:
    """All of them by name, and as text. BLEU counts the characters of references that are mostly Chinese or Japanese,
    and words otherwise; its signature says which."""
    if not expected:
        raise UserError("nothing to evaluate: no examples")
    written = "".join(expected)
    east_asian = 2 * len(EAST_ASIAN_CHARACTER.findall(written)) > len("".join(written.split()))
    scores = evaluate(found, expected, "zh" if east_asian else None, resamples=resamples)
    figures = {name: metric(found, expected) for name, metric in METRICS.items()}
    lines = [
        f"{name:<7} {value:5.1f}{' %' if name in ('exact', 'cer', 'wer') else ''}" for name, value in figures.items()
    ]
    kept = scores.text().splitlines()[:2]  # BLEU and chrF with their signatures; the last line repeats `exact`
    return figures | {"chrf": scores.chrf, "bleu": scores.bleu}, "\n".join([*lines, *kept, f"of {len(found):,} texts"])
