"""Metrics of click probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from allyouneed.errors import UserError


def auc(scores: Sequence[float], clicks: Sequence[bool]) -> float:
    """Area under the ROC curve: how often a clicked example scores higher than one that was not, ties counting half
    (Mann, Whitney 1947). NaN if all or none were clicked."""
    found, clicked = np.asarray(scores, np.float64), np.asarray(clicks, bool)
    _check(found, clicked)
    positives, negatives = int(clicked.sum()), int((~clicked).sum())
    if not positives or not negatives:
        return float("nan")
    _, inverse, counts = np.unique(found, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # from 1; equal scores share their mean
    return float((ranks[clicked].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def log_loss(probabilities: Sequence[float], clicks: Sequence[bool]) -> float:
    """Mean cross-entropy in nats."""
    found, clicked = np.asarray(probabilities, np.float64), np.asarray(clicks, bool)
    _check(found, clicked)
    right = np.where(clicked, found, 1 - found)
    return float(-np.log(np.clip(right, 1e-15, None)).mean())


def _check(found: np.ndarray, clicked: np.ndarray) -> None:
    if found.shape != clicked.shape or not len(found):
        raise UserError(f"{len(found)} predictions for {len(clicked)} examples; the numbers must be equal, and not 0")


def ranking_figures(scores: Sequence[np.ndarray], relevant: Sequence[np.ndarray]) -> dict[str, float]:
    """Means over queries, 0 to 100: `mrr`, 1 over the rank of the first relevant text (Voorhees 1999), and `ndcg@10`
    with relevance 0 or 1 (Järvelin, Kekäläinen 2002, with the discount 1 / log₂(1 + rank)). Of equal scores, those of
    irrelevant texts rank first."""
    if not scores or len(scores) != len(relevant):
        raise UserError(f"{len(scores)} rankings for {len(relevant)} queries; the numbers must be equal, and not 0")
    reciprocal, gains = [], []
    discounts = 1 / np.log2(np.arange(2, 12))
    for found, right in zip(scores, relevant, strict=True):
        ranked = np.asarray(right, bool)[np.lexsort((right, -np.asarray(found, np.float64)))]
        reciprocal.append(1 / (1 + int(ranked.argmax())) if ranked.any() else 0.0)
        top, best = ranked[:10], min(int(ranked.sum()), 10)
        gains.append(float((top * discounts[: len(top)]).sum() / discounts[:best].sum()) if best else 0.0)
    return {"mrr": 100 * float(np.mean(reciprocal)), "ndcg@10": 100 * float(np.mean(gains))}
