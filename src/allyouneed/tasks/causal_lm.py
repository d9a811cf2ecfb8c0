"""The next token, given all before it: GPT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from allyouneed.config import ConfigError, parse
from allyouneed.data.batches.documents import Pieces
from allyouneed.data.batches.encoding import Encoding, Texts
from allyouneed.data.batches.packing import Batches, Filled, Ints, Items, Side
from allyouneed.data.batches.segments import SegmentBatches
from allyouneed.data.batches.store import Store
from allyouneed.data.files.readers import Files
from allyouneed.data.files.texts import TextFiles
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.models.base import Model
from allyouneed.tasks.endless import endless_problems
from allyouneed.tasks.task import Loss, Task, token_loss


class CausalLM(Task):
    """Each token of a document given those before it (Radford et al. 2018, eq. 1).

    `memory`: documents are read end to end, a row of a batch going on where it ended in the batch before, over what the
    model remembers of that (Dai et al. 2019, 3.2). How far back it sees is said by its patterns.
    """

    files: ClassVar[type[Files]] = TextFiles
    kinds: ClassVar[tuple[str, ...]] = ("decoder", "decoder-decoder", "retro")
    metrics: ClassVar[dict[str, bool]] = {"perplexity": False, "loss": False}
    decoding: ClassVar[dict[str, Any]] = {"method": "sample", "top_p": 0.9}
    kind: Literal["causal-lm"] = "causal-lm"
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    memory: bool = False

    @property
    def carries(self) -> bool:
        return self.memory

    def head(self, model: dict[str, Any], labels: Sequence[str] | None) -> Any:
        if self.memory:
            config = parse(Model, model, "model")  # type: ignore[type-abstract]
            if problems := list(endless_problems(config, "decoder")):
                raise ConfigError(problems, "model")
        return super().head(model, labels)

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        return Texts({"text": vocabularies.target}, None)

    def items(self, store: Store, vocabularies: Vocabularies, room: tuple[int, ...], seed: int) -> Items:
        return DocumentItems(store, vocabularies, room[-1])

    def batches(self, items: Items, room: tuple[int, ...], rows: int, seed: int) -> Batches:
        if self.memory and isinstance(items, DocumentItems):
            return SegmentBatches(items, items.pieces.documents, rows, room[-1], seed)
        return super().batches(items, room, rows, seed)

    def validation_batches(self, items: Items, longest: int) -> Batches:
        if self.memory and isinstance(items, DocumentItems):
            return SegmentBatches(items, items.pieces.documents, 1, longest)
        return super().validation_batches(items, longest)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return token_loss(model.head, hidden, labels, self.smoothing)


class DocumentItems(Items):
    """A document is read as begin mark and tokens and predicts tokens and end mark, in pieces of at most `room` places:
    every token is read once and predicted once."""

    def __init__(self, store: Store, vocabularies: Vocabularies, room: int) -> None:
        self.store, self.tokenizer = store, vocabularies.target
        store.check(text=self.tokenizer)
        self.pads = (self.tokenizer.pad,)
        self.pieces = Pieces.of(store["text"].lengths.astype(np.int64) + 1, room)

    def __len__(self) -> int:
        return len(self.pieces)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self.pieces.lengths,)

    def fill(self, epoch: int, members: Ints) -> Filled:
        pieces = [self.piece(int(number)) for number in members]
        said, labels = (np.concatenate(side) for side in zip(*pieces, strict=True))
        return Filled((Side(said),), labels)

    def piece(self, number: int) -> tuple[Ints, Ints]:
        """What is read, and what is to be said."""
        pieces = self.pieces
        ids = self.store["text"][int(pieces.documents[number])]
        begin, end = int(pieces.begins[number]), int(pieces.begins[number] + pieces.lengths[number])
        marks = self.tokenizer.bos, self.tokenizer.eos
        said = ids[begin - 1 : end - 1] if begin else np.concatenate([[marks[0]], ids[: end - 1]])
        labels = ids[begin:end] if end <= len(ids) else np.concatenate([ids[begin:], [marks[1]]])
        return said.astype(np.int64), labels.astype(np.int64)

    def show(self, number: int) -> dict[str, str]:
        return {"text": self.tokenizer.decode(self.piece(number)[1].tolist())}
