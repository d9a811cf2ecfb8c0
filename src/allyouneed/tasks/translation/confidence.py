"""How probable it is that a translation is acceptable: logistic regression over what decoding knows, stored in the
model folder. `recipes/translator/calibrate.py` fits it; docs/translator.md shows how well it is calibrated.

A sentence is *acceptable* if its chrF against a reference reaches `level` of its target language; a word, if the
reference has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from allyouneed.config import Config

LOW = 0.1  # below, a sentence is noted
Number = Annotated[float, Field(allow_inf_nan=False)]
# mean and least log-probability of its tokens (nats); share of tokens below -1.5; how far the ratio of lengths is from
# the usual one (nats); 1 if the numbers differ; log of the number of tokens; 1 if it is unfinished
FEATURES = ("mean", "least", "doubtful", "length", "numbers", "size", "unfinished")
DOUBTFUL = -1.5


@dataclass(frozen=True)
class Evidence:
    """What is known of a translated sentence. `log_probs`: of each token, end mark included; `source`, `target`: number
    of characters."""

    log_probs: Sequence[float]
    source: int
    target: int
    numbers_differ: bool = False
    finished: bool = True

    @property
    def log_ratio(self) -> float:
        return math.log((self.target + 5) / (self.source + 5))

    def features(self, usual_ratio: float) -> list[float]:
        """The features, in the order of `FEATURES`."""
        count = max(1, len(self.log_probs))
        return [
            sum(self.log_probs) / count,
            min(self.log_probs, default=0.0),
            sum(one < DOUBTFUL for one in self.log_probs) / count,
            abs(self.log_ratio - usual_ratio),
            float(self.numbers_differ),
            math.log(count),
            float(not self.finished),
        ]


class Confidence(Config):
    """A fitted calibration. Keys of the dictionaries are directions, `en-de`."""

    weights: Annotated[list[Number], Field(min_length=len(FEATURES), max_length=len(FEATURES))]
    bias: dict[str, Number]  # of each direction
    length: dict[str, Number]  # usual log ratio of the lengths
    word: tuple[Number, Number, Number]  # weights of its least log-probability and its sentence's log odds; bias
    level: dict[str, Number]  # chrF of an acceptable sentence, by target language
    fitted: str = ""  # on what

    def sentence(self, evidence: Evidence, direction: str) -> float:
        """The probability that a sentence is acceptable."""
        features = evidence.features(_of(self.length, direction))
        logit = sum(w * x for w, x in zip(self.weights, features, strict=True)) + _of(self.bias, direction)
        return round(_sigmoid(logit), 4)

    def text(self, sentences: Sequence[Evidence], direction: str) -> float:
        """The confidence of several sentences: the mean, weighted by their lengths."""
        sizes = [one.target + 1 for one in sentences]
        found = (size * self.sentence(one, direction) for size, one in zip(sizes, sentences, strict=True))
        return round(sum(found) / sum(sizes), 4)

    def of_word(self, log_prob: float, sentence: float) -> float:
        """The probability that a word is right. `log_prob`: the least of its tokens; `sentence`: the confidence of its
        sentence."""
        return round(_sigmoid(self.word[0] * log_prob + self.word[1] * log_odds(sentence) + self.word[2]), 4)


def log_odds(probability: float) -> float:
    kept = min(max(probability, 0.001), 0.999)
    return math.log(kept / (1 - kept))


def _of(table: dict[str, float], direction: str) -> float:
    """The value of a direction; of an unknown one, the mean of those into the same language, or of all."""
    if direction in table:
        return table[direction]
    target = direction.rpartition("-")[2]
    some = [value for name, value in table.items() if name.rpartition("-")[2] == target] or list(table.values())
    return sum(some) / len(some) if some else 0.0


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -30 else 0.0
