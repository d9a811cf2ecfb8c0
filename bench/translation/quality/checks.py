"""What is wrong with a translation, without a reference: its language, loops, broken characters, missing parts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from allyouneed.data.language_detection import SURE, LanguageDetector

TIMES = 4  # a group of words this often in a row is a loop
LONGEST = 8  # words of a group
SHORT, LONG = 0.5, 2.0  # of the reference's length
LETTERS = 20  # characters of a reference whose length says something
WIDE = re.compile(r"([\u3400-\u9fff])")


def words(text: str) -> list[str]:
    return WIDE.sub(r" \1 ", text.casefold()).split()


def loops(text: str) -> bool:
    """Whether the same few words follow one another `TIMES` times."""
    found = words(text)
    for size in range(1, LONGEST + 1):
        for start in range(len(found) - size * TIMES + 1):
            if found[start : start + size] * TIMES == found[start : start + size * TIMES]:
                return True
    return False


def other_language(text: str, language: str, detector: LanguageDetector) -> str | None:
    """The language a text is in, if that is not the expected one; None if it is, or is too short to tell."""
    if detector.is_short(text):
        return None
    found, nats = detector.detect_odds(text)
    return found if found != language and nats >= SURE else None


def count(
    sources: Sequence[str], texts: Sequence[str], references: Sequence[str], language: str, detector: LanguageDetector
) -> Counter[str]:
    """Sentences with each fault, and `sentences`."""
    found: Counter[str] = Counter(sentences=len(texts))
    for source, text, reference in zip(sources, texts, references, strict=True):
        wrong = other_language(text, language, detector)
        found["other language"] += bool(wrong and not other_language(reference, language, detector))
        found["loops"] += loops(text) and not loops(source) and not loops(reference)
        found["broken characters"] += "\ufffd" in text
        found["empty"] += not text.strip() and bool(source.strip())
        found["untranslated"] += text.strip() == source.strip() and reference.strip() != source.strip()
        if len(reference) >= LETTERS * (0.4 if language == "zh" else 1):
            ratio = len(text) / len(reference)
            found["shorter than half"] += ratio < SHORT
            found["longer than twice"] += ratio > LONG
    return found
