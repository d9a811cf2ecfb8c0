"""Capture and restore all random states, so that a resumed run draws the same numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """Python's and numpy's state as plain data, torch's as bytes by device."""

    plain: dict[str, Any]
    torch: dict[str, Tensor]

    @classmethod
    def capture(cls) -> RandomState:
        version, numbers, gauss = random.getstate()
        kind, key, position, has_gauss, cached = np.random.get_state(legacy=True)
        plain = {
            "python": [version, list(numbers), gauss],
            "numpy": [str(kind), [int(n) for n in key], int(position), int(has_gauss), float(cached)],
        }
        states = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
        return cls(plain, states)

    def for_rank(self, rank: int) -> RandomState | None:
        """The state of one data rank: rank 0 under the plain names, others prefixed by `rank/`. None if the run had no
        such rank."""
        if not rank:
            return self
        own = {name.partition("/")[2]: t for name, t in self.torch.items() if name.startswith(f"{rank}/")}
        return RandomState(self.plain, own) if own else None

    def restore(self) -> None:
        version, numbers, gauss = self.plain["python"]
        random.setstate((version, tuple(numbers), gauss))
        kind, key, position, has_gauss, cached = self.plain["numpy"]
        np.random.set_state((kind, np.array(key, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(self.torch["cpu"])
        if "cuda" in self.torch and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.torch["cuda"])


def seed_all(seed: int, rank: int = 0, step: int = 0) -> None:
    """Each data rank draws different numbers (dropout), the same in every repetition of the run."""
    if rank:
        seed = int(np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint64)[0] >> 1)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Undo the effect of random draws inside."""
    before = RandomState.capture()
    try:
        yield
    finally:
        before.restore()
