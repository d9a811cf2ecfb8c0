"""Speed of a model against another one, both in this process, in turns: a busy moment of the machine hits both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from allyouneed.apps.translate.translator import Translator

ROUNDS = 5
ONE, BATCH, FILE = 8, 32, 400  # sentences of a round


def compare(
    new: Translator, old: Translator, texts: Sequence[str], here: str, there: str
) -> dict[str, dict[str, float]]:
    """Sentences per second of both, and their ratio (median over rounds)."""
    jobs: dict[str, tuple[int, Any]] = {
        "one by one": (ONE, lambda model, some: [model.translate(text, there, from_=here) for text in some]),
        "batch of 32": (BATCH, lambda model, some: model.translate(some, there, from_=here)),
        "file": (FILE, lambda model, some: list(model.translate_stream(some, there, from_=here))),
    }
    found = {}
    for name, (count, run) in jobs.items():
        seconds: dict[str, list[float]] = {"new": [], "old": []}
        rounds = ROUNDS if name != "file" else 3
        for number in range(rounds + 1):
            some = [texts[(number * count + n) % len(texts)] for n in range(count)]
            for side, model in (("new", new), ("old", old)) if number % 2 else (("old", old), ("new", new)):
                began = time.perf_counter()
                run(model, some)
                if number:  # the first round warms up
                    seconds[side].append(time.perf_counter() - began)
        ratios = [old_s / new_s for new_s, old_s in zip(seconds["new"], seconds["old"], strict=True)]
        found[name] = {
            "ratio": statistics.median(ratios),
            "new": count / statistics.median(seconds["new"]),
            "old": count / statistics.median(seconds["old"]),
        }
    return found
