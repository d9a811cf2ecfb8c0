"""Exact search, as `search` runs it, beside faiss's `knn`: the same vectors and threads, interleaved.

python -m bench.check.nearest
"""

from __future__ import annotations

import argparse
import time

import faiss
import numpy as np
import torch

from allyouneed.data.retrieval.nearest import nearest

ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    faiss.omp_set_num_threads(given.threads)
    dice = np.random.default_rng(0)
    vectors = dice.standard_normal((given.vectors, given.width), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    print(f"{given.vectors:,} vectors of {given.width} numbers, {given.threads} threads, torch {torch.__version__}")
    for count in (1, 16, 256):
        queries = vectors[:count] + 0.1 * dice.standard_normal((count, given.width), np.float32)
        ways = {
            "ours": lambda queries=queries: nearest(torch.from_numpy(queries), vectors, 10)[1],
            "faiss": lambda queries=queries: faiss.knn(queries, vectors, 10, metric=faiss.METRIC_INNER_PRODUCT)[1],
        }
        found = {name: way() for name, way in ways.items()}
        seconds = {name: list[float]() for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                begin = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - begin)
        best = {name: min(times) for name, times in seconds.items()}
        same = float((found["ours"] == found["faiss"]).mean())
        times = ", ".join(f"{name} {1000 * one:.1f} ms" for name, one in best.items())
        print(f"{count:4} queries: {times}, {best['faiss'] / best['ours']:.2f} times as fast, {same:.2%} the same")


if __name__ == "__main__":
    main()
