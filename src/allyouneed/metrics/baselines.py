"""What a model must beat: the scores of answers that need no model, on the same examples with the same metrics.

68.9 % of right answers are nothing where 68.9 % of the examples are of one class. Which baselines there are depends on
the kind of examples alone, so a new task on a known kind of files has them.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from allyouneed.data.files.images import CaptionedImage, LabelledImage
from allyouneed.data.files.labels import Labelled, Scored, Tagged
from allyouneed.data.files.media import LabelledMedium
from allyouneed.data.files.pairs import Pair
from allyouneed.data.files.sounds import LabelledSound, TranscribedSound
from allyouneed.data.files.texts import TextDocument
from allyouneed.data.languages import EAST_ASIAN
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.metrics.answers import accuracy, has_spans, macro_f1, pearson, span_f1, spearman
from allyouneed.metrics.translation import evaluate
from allyouneed.metrics.words import character_error_rate, word_error_rate

MOST_EXAMPLES = 50_000  # more would take longer than seconds
BUCKETS = 1 << 16  # of hashed n-grams
EPOCHS, BATCH, RATE, DECAY = 10, 64, 0.05, 1e-4
WORDS = re.compile(rf"{EAST_ASIAN.pattern}|[^\W_]+|[^\w\s]")


@dataclass(frozen=True)
class Baseline:
    """Scores by metric, and what gets them."""

    name: str
    figures: dict[str, float]

    @property
    def text(self) -> str:
        return f"{self.name}:  " + "  ".join(f"{metric} {value:.3f}" for metric, value in self.figures.items())

    def to_tree(self) -> dict[str, Any]:
        return asdict(self)


Found = Iterator[tuple[str, dict[str, float]]]


def baselines(train: Sequence[Any], held: Sequence[Any], tokenizer: Tokenizer | None) -> list[Baseline]:
    """The baselines of these examples, learnt from the training examples; none for a kind that has none."""
    measure = MEASURES.get(type(held[0])) if held and train else None
    return [] if measure is None else [Baseline(*found) for found in measure(train, held, tokenizer)]


def _classes(train: Sequence[Labelled], held: Sequence[Labelled], _: Tokenizer) -> Found:
    expected, labels = [example.label for example in held], sorted({example.label for example in train})
    usual = Counter(example.label for example in train).most_common(1)[0][0]
    linear = LinearClassifier(labels)
    linear.fit([example.texts for example in train], [example.label for example in train])
    answers = {f"always {usual!r}": [usual] * len(held)}
    answers["logistic regression on n-grams"] = linear.predict([example.texts for example in held])
    for name, found in answers.items():
        yield name, {"accuracy": accuracy(found, expected), "macro-f1": macro_f1(found, expected)}


def _media_classes(train: Sequence[LabelledMedium], held: Sequence[LabelledMedium], _: Tokenizer | None) -> Found:
    expected, usual = [example.label for example in held], _most_frequent(train)
    found = [usual] * len(held)
    yield f"always {usual!r}", {"accuracy": accuracy(found, expected), "macro-f1": macro_f1(found, expected)}


def _captions(train: Sequence[CaptionedImage], held: Sequence[CaptionedImage], _: Tokenizer | None) -> Found:
    usual = _most_frequent(train)
    scores = evaluate([usual] * len(held), [example.value for example in held], None)
    yield "always the most frequent text", {"bleu": scores.bleu, "chrf": scores.chrf, "exact": 100 * scores.exact}


def _transcripts(train: Sequence[TranscribedSound], held: Sequence[TranscribedSound], _: Tokenizer) -> Found:
    usual = _most_frequent(train)
    found, expected = [usual] * len(held), [example.value for example in held]
    figures = {"wer": word_error_rate(found, expected), "cer": character_error_rate(found, expected)}
    yield "always the most frequent transcript", figures


def _most_frequent(train: Sequence[LabelledMedium]) -> str:
    return Counter(example.value for example in train).most_common(1)[0][0]


def _tags(train: Sequence[Tagged], held: Sequence[Tagged], _: Tokenizer) -> Found:
    of_word: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for example in train:
        for word, tag in zip(example.words, example.tags, strict=True):
            of_word[word][tag] += 1
    usual = sum(of_word.values(), Counter[str]()).most_common(1)[0][0]
    best = {word: counts.most_common(1)[0][0] for word, counts in of_word.items()}
    expected = [list(example.tags) for example in held]
    flat = [tag for tags in expected for tag in tags]
    in_spans = has_spans([tag for example in train for tag in example.tags])
    answers = {f"always {usual!r}": [[usual for _ in example.words] for example in held]}
    answers["each word's most frequent tag"] = [[best.get(word, usual) for word in example.words] for example in held]
    for name, found in answers.items():
        each = [tag for tags in found for tag in tags]
        f1 = span_f1(found, expected) if in_spans else macro_f1(each, flat)
        yield name, {"f1": f1, "accuracy": accuracy(each, flat)}


def _scores(train: Sequence[Scored], held: Sequence[Scored], _: Tokenizer) -> Found:
    expected = [example.score for example in held]
    mean = sum(example.score for example in train) / len(train)
    shared = [_overlap(example.first, example.second) for example in held]
    for name, found in {f"always the mean, {mean:.3g}": [mean] * len(held), "share of common words": shared}.items():
        yield name, {"spearman": spearman(found, expected), "pearson": pearson(found, expected)}


def _overlap(one: str, other: str) -> float:
    """Jaccard 1912: of the words of both texts, the share that both have."""
    here, there = set(_words(one)), set(_words(other))
    return len(here & there) / max(1, len(here | there))


def _targets(train: Sequence[Pair], held: Sequence[Pair], _: Tokenizer) -> Found:
    expected = [pair.target for pair in held]
    for name, found in {"the source, unchanged": [pair.source for pair in held], "nothing": [""] * len(held)}.items():
        scores = evaluate(found, expected, None)
        yield name, {"bleu": scores.bleu, "chrf": scores.chrf, "exact": 100 * scores.exact}


def _tokens(train: Sequence[TextDocument], held: Sequence[TextDocument], tokenizer: Tokenizer) -> Found:
    """Every token as often as in the training data, whatever stands before it; add-one smoothing (Laplace)."""
    counts = Counter(token for ids in tokenizer.encode_batch([one.text for one in train]) for token in ids)
    total = sum(counts.values()) + tokenizer.size
    wanted = [token for ids in tokenizer.encode_batch([one.text for one in held]) for token in ids]
    loss = sum(math.log(total / (counts[token] + 1)) for token in wanted) / max(1, len(wanted))
    yield "frequencies of tokens (unigrams)", {"perplexity": math.exp(loss), "loss": loss}


Measure = Callable[[Any, Any, Any], Found]
MEASURES: dict[type, Measure] = {
    Labelled: _classes,
    Tagged: _tags,
    Scored: _scores,
    Pair: _targets,
    TextDocument: _tokens,
    LabelledImage: _media_classes,
    LabelledSound: _media_classes,
    TranscribedSound: _transcripts,
    CaptionedImage: _captions,
}


# --- logistic regression ----------------------------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    """Words and punctuation in lower case; East Asian characters are words."""
    return WORDS.findall(text.lower())


class LinearClassifier:
    """Multinomial logistic regression on tf-idf of words and pairs of words (Wang, Manning 2012), hashed into buckets
    (Weinberger et al. 2009). One linear layer, zero at the start; the same data gives the same weights."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = list(labels)
        self.rarity = torch.ones(BUCKETS)

    def fit(self, texts: Sequence[tuple[str, ...]], labels: Sequence[str]) -> None:
        rows = [self._buckets(text) for text in texts]
        known = Counter(bucket for row in rows for bucket in set(row))
        for bucket, count in known.items():
            self.rarity[bucket] = math.log((1 + len(rows)) / (1 + count)) + 1
        wanted = torch.tensor([self.labels.index(label) for label in labels])
        with torch.enable_grad():
            self.weight = torch.zeros(BUCKETS, len(self.labels), requires_grad=True)
            self.bias = torch.zeros(len(self.labels), requires_grad=True)
            adam = torch.optim.Adam([self.weight, self.bias], RATE)
            dice = np.random.default_rng(0)
            for _ in range(EPOCHS):
                for batch in np.array_split(dice.permutation(len(rows)), math.ceil(len(rows) / BATCH)):
                    logits = self._logits([rows[n] for n in batch])
                    loss = torch.nn.functional.cross_entropy(logits, wanted[torch.from_numpy(batch)])
                    adam.zero_grad()
                    (loss + DECAY * self.weight.square().sum()).backward()
                    adam.step()

    @torch.no_grad()
    def predict(self, texts: Sequence[tuple[str, ...]]) -> list[str]:
        found = self._logits([self._buckets(text) for text in texts]).argmax(-1)
        return [self.labels[int(number)] for number in found]

    def _logits(self, rows: Sequence[list[int]]) -> Tensor:
        """(rows, labels)"""
        flat = torch.tensor([bucket for row in rows for bucket in row])
        starts = torch.tensor([0, *np.cumsum([len(row) for row in rows])[:-1]])
        weights = self.rarity[flat]
        lengths = torch.zeros(len(rows)).index_add_(
            0, torch.repeat_interleave(torch.tensor([len(row) for row in rows])), weights**2
        )
        weights = weights / lengths.sqrt().repeat_interleave(torch.tensor([len(row) for row in rows]))
        summed = torch.nn.functional.embedding_bag(flat, self.weight, starts, mode="sum", per_sample_weights=weights)
        return summed + self.bias

    @staticmethod
    def _buckets(texts: tuple[str, ...]) -> list[int]:
        """Of every text in its place; never empty."""
        found = []
        for place, text in enumerate(texts):
            words = ["", *_words(text), ""]
            grams = [*words[1:-1], *(" ".join(pair) for pair in pairwise(words))]
            found += [crc32(f"{place} {gram}".encode("utf-8", "surrogatepass")) % BUCKETS for gram in grams]
        return found
