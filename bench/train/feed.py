"""Does prefetching keep a GPU busy? A clock simulates the GPU: an update takes `--update` milliseconds, and the host,
which may be ten updates ahead (training/loop.py), launches them in a row and then waits.

    python bench/train/feed.py --pairs pairs.tsv --update 32

Prints the fractions of time in which the simulated GPU was idle for lack of a batch, and in which the host
waited for one. `--launch`: milliseconds of Python per update on the host.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from allyouneed.data.batches.packing import PackedBatches
from allyouneed.data.batches.store import Store
from allyouneed.data.files.filters import Filters
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies
from allyouneed.tasks.translation.translation import PairItems, pair_encoding
from allyouneed.training.loop import LAG
from allyouneed.training.prefetch import QUEUE_BATCHES, DataPosition, Prefetcher, updates

ROW = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", required=True, help="sentence pairs: a TSV file, .gz and .zst too")
    parser.add_argument("--update", type=float, default=32.0, help="milliseconds on the GPU")
    parser.add_argument("--launch", type=float, default=1.5, help="milliseconds on the host")
    parser.add_argument("--tokens", type=int, default=24576, help="a batch, on each side")
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    torch.set_num_threads(1)
    QUEUE_BATCHES["cpu"] = QUEUE_BATCHES["cuda"]  # as many batches as a GPU gets
    with tempfile.TemporaryDirectory() as folder:
        files = [PairFiles(path=given.pairs)]
        vocabularies = Vocabularies.train(TokenizerConfig(vocab=32000), files)
        store = Store.build(Path(folder) / "store", files, Filters(), pair_encoding(vocabularies, max_tokens=ROW - 1))
        data = PackedBatches(PairItems(store, vocabularies), (ROW, ROW), given.tokens // ROW, seed=1)
        begin = time.perf_counter()
        steps = data.steps_per_epoch(0)
        packed = time.perf_counter()
        made = sum(1 for _, _ in zip(updates(data, DataPosition(0, 0), 1), range(min(steps, 50)), strict=False))
        each = (time.perf_counter() - packed) / made * 1e3
        print(f"{steps} batches an epoch, packed in {(packed - begin) * 1e3:.0f} ms; a batch is made in {each:.2f} ms")
        gpu, host = fed(data, given.steps, given.update / 1e3, given.launch / 1e3)
    print(f"the GPU waits for data {gpu:.2%} of the time, the host {host:.2%}")


def fed(data: PackedBatches, steps: int, update: float, launch: float) -> tuple[float, float]:
    gpu = host = 0.0
    with Prefetcher(data, DataPosition(0, 0), 1, torch.device("cpu")) as feed:
        next(feed)
        begin = idle = time.perf_counter()  # when the GPU has nothing left to do
        for step in range(1, steps + 1):
            asked = time.perf_counter()
            next(feed)
            got = time.perf_counter()
            host += got - asked
            gpu += max(0.0, got - max(asked, idle))
            while time.perf_counter() < got + launch:
                pass
            idle = max(idle, time.perf_counter()) + update
            if step % LAG == 0:
                time.sleep(max(0.0, idle - time.perf_counter()))
        total = max(idle, time.perf_counter()) - begin
    return gpu / total, host / total


if __name__ == "__main__":
    main()
