"""In-memory stores, for tests of examples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from allyouneed.data.batches.encoding import Dropped, Encoding
from allyouneed.data.batches.store import Column, Store
from allyouneed.data.tokenizers.base import MASK, TokenizerConfig, Vocabularies, sentinel, train

TEXT = ["the cat sees tomorrow's moon, 猫看见明天的月亮。 She said: (12) wonderful films!"] * 4


@cache
def vocabularies() -> Vocabularies:
    specials = (MASK, *(sentinel(n) for n in range(8)))
    both = train(TokenizerConfig(vocab=340, specials=specials), TEXT)
    return Vocabularies(both, both)


class MemoryStore(Store):
    def __init__(self, encoding: Encoding, examples: Sequence[Any]) -> None:
        self.folder, self.spec = Path("memory"), encoding.spec
        rows = [row for row in encoding.encode(examples) if not isinstance(row, Dropped)]
        self.columns = {}
        for number, (name, dtype) in enumerate(encoding.columns.items()):
            sizes = np.array([len(row[number]) for row in rows], dtype=np.int32)
            offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
            self.columns[name] = Column(np.array([n for r in rows for n in r[number]], dtype=dtype), offsets, sizes)
