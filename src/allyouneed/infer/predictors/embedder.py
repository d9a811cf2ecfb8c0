"""Text embeddings and similarity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from allyouneed.data.files.labels import Scored
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import EvaluationResult, Predictor, check_texts, evenly_spaced, run_in_batches
from allyouneed.metrics.answers import pearson, recall_at_1, spearman
from allyouneed.nn.batch import Batch
from allyouneed.nn.heads.sentence import PooledHeadModule
from allyouneed.runtime.process import ignore_warnings

if TYPE_CHECKING:
    from allyouneed.infer.predictors.reranker import Reranker
    from allyouneed.infer.retrieval.text_index import FoundText, Row, TextIndex

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

    def index(
        self,
        texts: Iterable[str | Row],
        folder: Path | str | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Embedder:
        """Save the vectors of these texts in a folder with this model, for `search`: in a new one, or added to its own.
        A text may come with other columns, `("text", {"title": …})`; what is in the index already is left out."""
        from allyouneed.infer.retrieval.text_index import TextIndex, fingerprint

        path = self.folder.path if folder is None else Path(folder)
        if path is None:
            raise UserError("the model has not been saved; name a folder for the index")
        target = self
        if TextIndex.is_in(path):
            target = self if path == self.folder.path else type(self)(Folder.load(path, self.device))
            found = TextIndex.open(target.folder)
            found.check(self.folder)
        elif path == self.folder.path:
            raise UserError(f"{path}: has no index; name a new folder for it")
        else:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise UserError(f"{path}: exists and is not an index; name another folder")
            target = type(self)(replace(self.folder))
            target.save(path)
            models = [fingerprint(target.folder)]
            models += [fingerprint(self.folder)] if self.folder.path is not None else []
            found = TextIndex(path, self.embed([""]).shape[1], models)
        with ignore_warnings():  # long texts are truncated
            rows = ((one, {}) if isinstance(one, str) else one for one in texts)
            found.add(rows, target.embed, progress)
        target.__dict__["texts"] = found
        return target

    @cached_property
    def texts(self) -> TextIndex:
        """The index in its folder."""
        from allyouneed.infer.retrieval.text_index import TextIndex

        return TextIndex.open(self.folder)

    def search(
        self, query: str | Sequence[str], top: int = 10, rerank: Reranker | None = None, candidates: int = 50
    ) -> Any:
        """The texts of the index that are most similar to a query, the best first; of a list of queries, a list of
        such lists. `rerank`: a cross-encoder that ranks the first `candidates` anew."""
        if isinstance(query, str):
            return self.search([query], top, rerank, candidates)[0]
        found = self.texts.search(self.embed(query), top if rerank is None else max(top, candidates))
        if rerank is None:
            return found
        return [_ranked(rerank, *one)[:top] for one in zip(query, found, strict=True)]

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        with ignore_warnings():
            first, second = (self.embed([example.texts[side] for example in examples]) for side in (0, 1))
        if isinstance(examples[0], Scored):
            return _evaluate_scores(examples, nn.functional.cosine_similarity(first, second).tolist(), show)
        return _evaluate_matches(examples, first, second, show)


def _ranked(reranker: Reranker, query: str, found: list[FoundText]) -> list[FoundText]:
    ranked = reranker.rerank(query, [one.text for one in found])
    return [replace(found[one.index], score=one.score) for one in ranked]


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
