"""Items of a store: what most tasks learn from."""

from __future__ import annotations

from typing import ClassVar

from allyouneed.data.batches.packing import Items
from allyouneed.data.batches.store import Store
from allyouneed.data.tokenizers.base import Tokenizer


class StoredItems(Items):
    """The entries of a store, whose `columns` are texts of one tokenizer; `sides`: of an item."""

    columns: ClassVar[tuple[str, ...]] = ("text",)
    sides: ClassVar[int] = 1

    def __init__(self, store: Store, tokenizer: Tokenizer) -> None:
        self.store, self.tokenizer = store, tokenizer
        store.check(**dict.fromkeys(self.columns, tokenizer))
        self.pads = (tokenizer.pad,) * self.sides

    def __len__(self) -> int:
        return len(self.store)
