"""Every random state there is, taken and put back, so that a resumed run draws what it would have drawn."""

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
class Randomness:
    """Python's and numpy's as plain data, torch's as bytes by device."""

    plain: dict[str, Any]
    torch: dict[str, Tensor]

    @classmethod
    def now(cls) -> Randomness:
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

    def of(self, rank: int) -> Randomness | None:
        """That of one process, where those of all were kept together: of the first under their names, of others behind
        their number. None: there was no such process."""
        if not rank:
            return self
        own = {name.partition("/")[2]: t for name, t in self.torch.items() if name.startswith(f"{rank}/")}
        return Randomness(self.plain, own) if own else None

    def restore(self) -> None:
        version, numbers, gauss = self.plain["python"]
        random.setstate((version, tuple(numbers), gauss))
        kind, key, position, has_gauss, cached = self.plain["numpy"]
        np.random.set_state((kind, np.array(key, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(self.torch["cpu"])
        if "cuda" in self.torch and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.torch["cuda"])


def seed_all(seed: int, rank: int = 0, step: int = 0) -> None:
    """Each process of a run draws differently (dropout), and the same each time the run is made."""
    if rank:
        seed = int(np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint64)[0] >> 1)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def untouched() -> Iterator[None]:
    """Whatever is drawn inside was never drawn."""
    before = Randomness.now()
    try:
        yield
    finally:
        before.restore()
