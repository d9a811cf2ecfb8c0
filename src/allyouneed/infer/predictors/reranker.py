"""Texts in the order in which they answer a query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from allyouneed.data.batches.packing import generator
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import EvaluationResult, check_texts, evenly_spaced
from allyouneed.infer.predictors.classifier import Classifier
from allyouneed.metrics.ranking import ranking_figures
from allyouneed.runtime.process import ignore_warnings
from allyouneed.tasks.reranking import RELEVANT
from allyouneed.tasks.task import VALIDATION_SEED


@dataclass(frozen=True)
class RankedText:
    """Text `index` of those that were given, and the probability that it is relevant."""

    index: int
    text: str
    score: float


class Reranker(Classifier):
    """Ranks texts for a query; it reads both together. A pair that is too long is truncated, the longer text first."""

    def rerank(self, query: str, texts: Sequence[str], top: int | None = None) -> list[RankedText]:
        """The texts with their probabilities of being relevant, the best first."""
        many = check_texts(texts, "rerank")
        scores = self.relevance([(query, text) for text in many])
        order = sorted(range(len(many)), key=lambda index: -scores[index])
        return [RankedText(index, many[index], scores[index]) for index in order[:top]]

    def relevance(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """The probability that the second text of each pair is relevant for the first."""
        return [one.scores[RELEVANT] for one in self.classify_full(pairs)]

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        """Rank the texts of each query among others of the file, drawn by its number alone."""
        own: dict[str, list[str]] = {}
        for example in examples:
            own.setdefault(example.texts[0], []).append(example.texts[1])
        texts = list(dict.fromkeys(example.texts[1] for example in examples))
        most, pairs, ranked = int(self.folder.task.get("candidates", 20)), list[tuple[str, str]](), []
        for number, (query, right) in enumerate(own.items()):
            order = generator(VALIDATION_SEED, 0, number).permutation(len(texts)).tolist()
            others = (texts[n] for n in order if texts[n] not in right)
            some = [*dict.fromkeys(right), *others][: max(most, len(right) + 1)]
            ranked.append((query, some, len(dict.fromkeys(right))))
            pairs += [(query, text) for text in some]
        with ignore_warnings():
            scores = iter(self.relevance(pairs))
        orders = [np.array([next(scores) for _ in some]) for _, some, _ in ranked]
        figures = ranking_figures(orders, [np.arange(len(some)) < count for _, some, count in ranked])
        text = f"MRR     {figures['mrr']:5.1f}\nnDCG@10 {figures['ndcg@10']:5.1f}  of {len(ranked):,} queries"
        samples = [
            {"query": query, "relevant": some[0], "ranked first": some[int(found.argmax())]}
            for (query, some, _), found in evenly_spaced(list(zip(ranked, orders, strict=True)), show)
        ]
        return EvaluationResult(figures, f"{text}, each with up to {most} texts", samples)
