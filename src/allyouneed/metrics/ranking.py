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
