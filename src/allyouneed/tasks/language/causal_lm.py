"""Causal language modelling: predict each token from those before it (GPT)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from allyouneed.config import ConfigError, parse
from allyouneed.data.batches.documents import DocumentPieces
from allyouneed.data.batches.encoding import Encoding, TextEncoding
from allyouneed.data.batches.items import StoredItems
from allyouneed.data.batches.packing import Batches, FlatBatch, FlatSide, Ints, Items
from allyouneed.data.batches.segments import SegmentBatches
from allyouneed.data.batches.store import Store
from allyouneed.data.files.readers import Files
from allyouneed.data.files.texts import TextFiles
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.models.base import Model
from allyouneed.tasks.language.bounded_state import unbounded_state_problems
from allyouneed.tasks.task import Loss, Task, token_loss


class CausalLM(Task):
    """Each token of a document given those before it (Radford et al. 2018, eq. 1).

    `memory`: documents are concatenated, a row continues where it ended in the previous batch, and the model attends to
    its segment memory (Dai et al. 2019, 3.2). How far back is set by its patterns.
    """

    files: ClassVar[type[Files]] = TextFiles
    kinds: ClassVar[tuple[str, ...]] = ("decoder", "decoder-decoder", "recurrent-memory", "retro")
    metrics: ClassVar[dict[str, bool]] = {"perplexity": False, "loss": False}
    decoding: ClassVar[dict[str, Any]] = {"method": "sample", "top_p": 0.9}
    kind: Literal["causal-lm"] = "causal-lm"
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing."""
    memory: bool = False
    """Continue each row where it ended in the previous batch, with segment memory (Transformer-XL)."""

    @property
    def has_memory(self) -> bool:
        return self.memory

    def head(self, model: dict[str, Any], labels: Sequence[str] | None) -> Any:
        if self.memory:
            config = parse(Model, model, "model")  # type: ignore[type-abstract]
            if problems := list(unbounded_state_problems(config, "decoder")):
                raise ConfigError(problems, "model")
        return super().head(model, labels)

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        return TextEncoding({"text": vocabularies.target}, None)

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        return DocumentItems(store, vocabularies, capacities[-1])

    def batches(self, items: Items, capacities: tuple[int, ...], rows: int, seed: int) -> Batches:
        if self.memory and isinstance(items, DocumentItems):
            return SegmentBatches(items, items.pieces.documents, rows, capacities[-1], seed)
        return super().batches(items, capacities, rows, seed)

    def validation_batches(self, items: Items, longest: int) -> Batches:
        if self.memory and isinstance(items, DocumentItems):
            return SegmentBatches(items, items.pieces.documents, 1, longest)
        return super().validation_batches(items, longest)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return token_loss(model.head, hidden, labels, self.smoothing)


class DocumentItems(StoredItems):
    """Inputs are BOS and tokens, labels are tokens and EOS, in pieces of at most `max_length` tokens: every token is
    read once and predicted once."""

    def __init__(self, store: Store, vocabularies: Vocabularies, max_length: int) -> None:
        super().__init__(store, vocabularies.target)
        self.pieces = DocumentPieces.split(store["text"].lengths.astype(np.int64) + 1, max_length)

    def __len__(self) -> int:
        return len(self.pieces)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self.pieces.lengths,)

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        pieces = [self.piece(int(number)) for number in members]
        inputs, labels = (np.concatenate(side) for side in zip(*pieces, strict=True))
        return FlatBatch((FlatSide(inputs),), labels)

    def piece(self, number: int) -> tuple[Ints, Ints]:
        """Inputs and labels."""
        pieces = self.pieces
        ids = self.store["text"][int(pieces.documents[number])]
        begin, end = int(pieces.begins[number]), int(pieces.begins[number] + pieces.lengths[number])
        bos, eos = self.tokenizer.bos, self.tokenizer.eos
        inputs = ids[begin - 1 : end - 1] if begin else np.concatenate([[bos], ids[: end - 1]])
        labels = ids[begin:end] if end <= len(ids) else np.concatenate([ids[begin:], [eos]])
        return inputs.astype(np.int64), labels.astype(np.int64)

    def show(self, number: int) -> dict[str, str]:
        return {"text": self.tokenizer.decode(self.piece(number)[1].tolist())}
