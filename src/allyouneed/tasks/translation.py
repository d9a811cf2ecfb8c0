"""Translation, and everything else that turns one sequence into another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from allyouneed.data.batches.encoding import Encoding, Texts
from allyouneed.data.batches.packing import Filled, Ints, Items, Side, marked
from allyouneed.data.batches.store import Store
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.files.readers import Files
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.errors import UserError
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.task import Loss, Task, token_loss


class Translation(Task):
    """Each target token given the source and the target before it, with label smoothing (the paper, 5.4)."""

    files: ClassVar[type[Files]] = PairFiles
    kinds: ClassVar[tuple[str, ...]] = ("encoder-decoder",)
    sides: ClassVar[int] = 2
    two_vocabularies: ClassVar[bool] = True
    counted: ClassVar[str] = "target tokens"
    supports_weights: ClassVar[bool] = True
    metrics: ClassVar[dict[str, bool]] = {"bleu": True, "chrf": True, "exact": True, "loss": False}
    kind: Literal["translation"] = "translation"
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        if vocabularies.source.template.language is not None:
            raise UserError("data: a model that hears which language a text is in cannot be trained further here yet")
        return pair_encoding(vocabularies, max_tokens, max(1, sum(map(len, vocabularies.source.source_affixes))))

    def items(self, store: Store, vocabularies: Vocabularies, room: tuple[int, ...], seed: int) -> Items:
        return PairItems(store, vocabularies)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return token_loss(model.head, hidden, labels, self.smoothing)


def pair_encoding(vocabularies: Vocabularies, max_tokens: int | None, marks: int = 1) -> Texts:
    return Texts({"source": vocabularies.source, "target": vocabularies.target}, max_tokens, marks)


class PairItems(Items):
    """A source sentence is its tokens and an end mark. A target sentence is read as begin mark and tokens, and predicts
    tokens and end mark."""

    def __init__(self, store: Store, vocabularies: Vocabularies) -> None:
        self.store, self.vocabularies = store, vocabularies
        store.check(source=vocabularies.source, target=vocabularies.target)
        self.pads = vocabularies.source.pad, vocabularies.target.pad
        self.weights = store.weights

    def __len__(self) -> int:
        return len(self.store)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        marks = sum(map(len, self.vocabularies.source.source_affixes))
        return self.store["source"].lengths + marks, self.store["target"].lengths + 1

    def fill(self, epoch: int, members: Ints) -> Filled:
        source, target = self.store["source"], self.store["target"]
        heard, said = source.gather(members), target.gather(members)
        here, there = source.lengths[members].astype(np.int64), target.lengths[members].astype(np.int64)
        reads, writes = self.vocabularies.source, self.vocabularies.target
        return Filled(
            (Side(marked(heard, here, *reads.source_affixes)), Side(marked(said, there, first=[writes.bos]))),
            labels=marked(said, there, last=[writes.eos]),
        )

    def show(self, number: int) -> dict[str, str]:
        return {
            "source": self.vocabularies.source.decode(self.store["source"][number].tolist()),
            "target": self.vocabularies.target.decode(self.store["target"][number].tolist()),
        }
