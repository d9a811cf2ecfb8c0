"""The vectors with the largest inner product: exact, in blocks, so that neither all scores nor all vectors are in
memory at once. Faster than faiss's exact search (bench/check/nearest.py), and its results are the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

QUERIES = 1024  # compared at a time
SCORES = 1 << 24  # of a block

Hide = Callable[[int], NDArray[np.bool_]]  # of a query, which vectors it must not find


def nearest(
    queries: Tensor, vectors: Tensor | NDArray[np.float32], top: int, hide: Hide | None = None
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(queries, top) scores and numbers of vectors, the best first; of equal ones, that with the smaller number."""
    count, top = len(vectors), min(top, len(vectors))
    best = np.full((len(queries), top), -np.inf, np.float32)
    numbers = np.full((len(queries), top), count, np.int64)  # of none yet
    for first in range(0, len(queries), QUERIES):
        some = queries[first : first + QUERIES].float()
        masks = None if hide is None else np.stack([hide(first + row) for row in range(len(some))])
        size = max(top, SCORES // max(1, len(some)))
        for begin in range(0, count, size):
            scores = some @ torch.as_tensor(vectors[begin : begin + size]).T
            if masks is not None:
                scores.masked_fill_(torch.from_numpy(masks[:, begin : begin + size]), -torch.inf)
            kept, found = scores.topk(min(top, scores.shape[1]), 1)
            values = np.concatenate([best[first : first + len(some)], kept.numpy()], 1)
            places = np.concatenate([numbers[first : first + len(some)], found.numpy() + begin], 1)
            order = np.lexsort((places, -values), axis=1)[:, :top]
            best[first : first + len(some)] = np.take_along_axis(values, order, 1)
            numbers[first : first + len(some)] = np.take_along_axis(places, order, 1)
    return best, numbers
