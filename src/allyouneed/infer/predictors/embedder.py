"""Text embeddings and similarity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from allyouneed.data.files.labels import Scored
from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import EvaluationResult, Predictor, check_texts, evenly_spaced, run_in_batches
from allyouneed.metrics.answers import pearson, recall_at_1, spearman
from allyouneed.nn.batch import Batch
from allyouneed.nn.heads.sentence import PooledHeadModule
from allyouneed.runtime.process import ignore_warnings

BLOCK = 1024  # rows of the similarity matrix computed at a time


class Embedder(Predictor):
    """One vector per text. Texts longer than the training length are truncated, with a warning."""

    def embed(self, texts: str | Sequence[str], raw: bool = False, width: int | None = None) -> Tensor:
        """The vector of a text (width,), or of each text of a list (texts, width). `raw`: not scaled to length 1, even
        if the head does that. `width`: the first numbers of each vector, scaled as the whole would be; for models
        trained with `widths`."""
        if isinstance(texts, str):
            return self.embed([texts], raw, width)[0]
        if width is not None:
            return self._cut(self.embed(texts, raw), width, raw)
        rows = [self.encode_truncated(text) for text in check_texts(texts, "embed")]
        if not rows:
            return torch.zeros(0, self.model.config.head.width or self.model.config.width)

        def answer(batch: list[int]) -> list[Tensor]:
            given = self.to_rows([rows[n] for n in batch])
            if raw and isinstance(head := self.model.head, PooledHeadModule):
                return list(head.pooled(*self.model.run(Batch(given), None)).float().cpu().clone())
            return list(self.model.logits(Batch(given)).float().cpu().clone())

        return torch.stack(run_in_batches(self.model, [len(row) for row, _ in rows], answer))

    def _cut(self, vectors: Tensor, width: int, raw: bool) -> Tensor:
        if not 0 < width <= vectors.shape[1]:
            raise UserError(f"width={width}: the vectors have {vectors.shape[1]} numbers")
        unit = getattr(self.model.head, "normalise", False) and not raw
        return nn.functional.normalize(vectors[:, :width], dim=-1) if unit else vectors[:, :width]

    def similarity(self, pairs: tuple[str, str] | Sequence[tuple[str, str]]) -> Any:
        """The cosine similarity of two texts, or of each pair of a list: -1 to 1."""
        one = isinstance(pairs, tuple) and len(pairs) == 2 and all(isinstance(text, str) for text in pairs)
        many: Any = [pairs] if one else pairs
        for pair in many:
            if isinstance(pair, str) or len(pair) != 2:
                raise UserError("expected pairs of texts: similarity([(one, other), …])")
        vectors = self.embed([text for pair in many for text in pair])
        found: list[float] = nn.functional.cosine_similarity(vectors[::2], vectors[1::2]).tolist()
        return found[0] if one else found

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        with ignore_warnings():
            first, second = (self.embed([example.texts[side] for example in examples]) for side in (0, 1))
        if isinstance(examples[0], Scored):
            return _evaluate_scores(examples, nn.functional.cosine_similarity(first, second).tolist(), show)
        return _evaluate_matches(examples, first, second, show)


def _evaluate_scores(examples: Sequence[Scored], found: list[float], show: int) -> EvaluationResult:
    expected = [example.score for example in examples]
    figures = {"spearman": spearman(found, expected), "pearson": pearson(found, expected)}
    text = f"Spearman {figures['spearman']:5.1f}\nPearson  {figures['pearson']:5.1f}  of {len(found)} pairs"
    samples = [
        {"texts": f"{example.first}  |  {example.second}", "score": f"{example.score:g}", "cosine": f"{cosine:.3f}"}
        for example, cosine in evenly_spaced(list(zip(examples, found, strict=True)), show)
    ]
    return EvaluationResult(figures, text, samples)


def _evaluate_matches(examples: Sequence[Any], first: Tensor, second: Tensor, show: int) -> EvaluationResult:
    """Recall@1 of each first text's partner among all second texts, and the other way round."""
    one, other = nn.functional.normalize(first, dim=-1), nn.functional.normalize(second, dim=-1)
    shares: list[tuple[int, float]] = []
    best: list[int] = []
    for here, there in ((one, other), (other, one)):
        for begin in range(0, len(here), BLOCK):
            scores = (here[begin : begin + BLOCK] @ there.T).numpy()
            own = np.arange(begin, begin + len(scores))
            shares.append((len(scores), recall_at_1(scores, own)))
            best += scores.argmax(1).tolist() if here is one else []
    recall = sum(count * share for count, share in shares) / sum(count for count, _ in shares)
    text = f"recall@1 {recall:5.1f} %  of {len(examples)} pairs, both ways"
    samples = [
        {"text": examples[n].texts[0], "partner": examples[n].texts[1], "nearest": examples[best[n]].texts[1]}
        for n in evenly_spaced(range(len(examples)), show)
    ]
    return EvaluationResult({"recall@1": recall}, text, samples)
