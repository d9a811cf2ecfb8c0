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

    def restore(self) -> None:
        version, numbers, gauss = self.plain["python"]
        random.setstate((version, tuple(numbers), gauss))
        kind, key, position, has_gauss, cached = self.plain["numpy"]
        np.random.set_state((kind, np.array(key, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(self.torch["cpu"])
        if "cuda" in self.torch and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.torch["cuda"])


def seed_all(seed: int) -> None:
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
