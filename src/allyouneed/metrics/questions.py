"""Exact match and F1 of answers to questions, by the rules of SQuAD; of Chinese and Japanese ones, by those of
CMRC 2018."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from allyouneed.data.tokenizers.base import EAST_ASIAN_CHARACTER
from allyouneed.errors import UserError

ARTICLES = re.compile(r"\b(a|an|the)\b")
CHINESE_MARKS = frozenset("-:_*^/\\~`+=，。：？！“”；’《》…·、「」（）－～『』")  # of the script of CMRC 2018
OTHER = rf"(?!{EAST_ASIAN_CHARACTER.pattern})\w"
PIECE = re.compile(rf"{EAST_ASIAN_CHARACTER.pattern}|(?:{OTHER})+(?:[.,](?:{OTHER})+)*|[^\w\s]")


def squad_words(text: str) -> list[str]:
    """Lower case without ASCII punctuation and articles (Rajpurkar et al. 2016, 6.1, and the authors' script)."""
    return ARTICLES.sub(" ", "".join(char for char in text.lower() if char not in string.punctuation)).split()


def chinese_pieces(text: str) -> list[str]:
    """Lower case without Chinese punctuation: characters of Chinese and Japanese, words and marks of other
    languages (Cui et al. 2019, "A Span-Extraction Dataset for Chinese Machine Reading Comprehension", and the authors'
    script)."""
    return PIECE.findall("".join(" " if char in CHINESE_MARKS else char for char in text.lower()))


def shared_words(one: Sequence[str], other: Sequence[str]) -> int:
    """Words of both, as often as both have them."""
    return (Counter(one) & Counter(other)).total()


def common_run(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest run of words that both have, as CMRC counts hits."""
    columns, best = np.array(list(other), dtype=object), 0
    row = np.zeros(len(other) + 1, np.int64)
    for word in one:
        row[1:] = np.where(columns == word, row[:-1] + 1, 0)
        best = max(best, int(row.max()))
    return best


def answer_scores(found: str, expected: Sequence[str]) -> tuple[float, float]:
    """Exact match and F1, 0 to 1, the best of all expected answers. Without any, the right answer is an empty text."""
    chinese = any(EAST_ASIAN_CHARACTER.search(text) for text in expected)
    split: Callable[[str], list[str]] = chinese_pieces if chinese else squad_words
    hits = common_run if chinese else shared_words
    ours = split(found)
    scores = []
    for text in expected or [""]:
        theirs = split(text)
        same = float(ours == theirs)
        shared = hits(ours, theirs) if ours and theirs else 0
        scores.append((same, 2 * shared / (len(ours) + len(theirs)) if shared else same * (not ours)))
    return max(same for same, _ in scores), max(f1 for _, f1 in scores)


def question_figures(found: Sequence[str], expected: Sequence[Sequence[str]]) -> tuple[dict[str, float], str]:
    """F1 and exact match, 0 to 100, by name and as text; apart for questions with and without an answer, if there are
    both."""
    if not expected:
        raise UserError("nothing to evaluate: no questions")
    scores = np.array([answer_scores(one, some) for one, some in zip(found, expected, strict=True)])
    exact, f1 = (100 * scores.mean(0)).tolist()
    lines = [f"F1    {f1:5.1f}", f"exact {exact:5.1f} %  of {len(found):,} questions"]
    answered = np.array([bool(some) for some in expected])
    if answered.any() and not answered.all():
        for name, chosen in (("with an answer", answered), ("without", ~answered)):
            exact_here, f1_here = (100 * scores[chosen].mean(0)).tolist()
            lines.append(f"{name}: F1 {f1_here:.1f}, exact {exact_here:.1f} %  of {int(chosen.sum()):,}")
    return {"f1": f1, "exact": exact}, "\n".join(lines)
