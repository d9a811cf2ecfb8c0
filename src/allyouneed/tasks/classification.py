"""Classify a text, or two texts together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor, nn

from allyouneed.data.batches.encoding import Encoding, LabelledTextEncoding
from allyouneed.data.batches.items import StoredItems
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items
from allyouneed.data.batches.store import Store
from allyouneed.data.files.labels import LabelledFiles, classes
from allyouneed.data.files.readers import Files
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.nn.batch import IGNORE, count_labels
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.task import Loss, Task, class_loss, set_label_count


class Classification(Task):
    """Cross-entropy of the classes (Devlin et al. 2019, 4.1). With `several`, a text may have any number of them, and
    the cross-entropies of each, a probability of its own, are averaged."""

    files: ClassVar[type[Files]] = LabelledFiles
    kinds: ClassVar[tuple[str, ...]] = ("encoder", "decoder")
    heads: ClassVar[tuple[str, ...]] = ("classes",)
    has_perplexity: ClassVar[bool] = False
    loss_unit: ClassVar[str] = "texts"
    metrics: ClassVar[dict[str, bool]] = {"accuracy": True, "macro-f1": True, "micro-f1": True, "loss": False}
    kind: Literal["classification"] = "classification"
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing."""
    several: bool = False
    """A text may have any number of labels, or none; in files, `between` stands between them: |."""
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """With `several`: labels of at least this probability are given."""
    free_keys: ClassVar[tuple[str, ...]] = ("threshold",)

    @model_validator(mode="after")
    def _one_kind_of_labels(self) -> Self:
        if self.several and self.smoothing:
            raise ValueError("smoothing: only where a text has one label; remove it, or several")
        return self

    def entry_defaults(self) -> dict[str, Any]:
        return {"between": "|"} if self.several else {}

    def labels(self, files: Sequence[Files]) -> list[str]:
        found = classes([entry for entry in files if isinstance(entry, LabelledFiles)])
        if len(found) < 2:
            what = f"only one label, {found[0]!r}" if found else "no labels"
            raise UserError(f"data.train: {what}; check which column is the label ('columns')")
        return found

    def head(self, model: dict[str, Any], labels: Sequence[str] | None) -> Any:
        return set_label_count(super().head(model, labels), labels)

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        texts = {"text": vocabularies.target, "second": vocabularies.target}
        template = vocabularies.target.template
        return LabelledTextEncoding(texts, max_tokens, template.count(), len(template.between), labels=labels)

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        several = len(store.spec["labels"]) if self.several else None
        return LabelledItems(store, vocabularies.target, several)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        if self.several:
            logits, real = model.head(hidden, layout).float(), labels != IGNORE
            each = nn.functional.binary_cross_entropy_with_logits(logits, labels.where(real, 0), reduction="none")
            total = each.where(real, 0).mean(-1).sum()
            return Loss(total, total.detach(), count_labels(labels))
        return class_loss(model.head(hidden, layout), labels, self.smoothing)


class LabelledItems(StoredItems):
    """A text with its special tokens; a second text follows a separator, with type id 1. `several`: how many labels
    there are, of which a text has any number."""

    def __init__(self, store: Store, tokenizer: Tokenizer, several: int | None = None) -> None:
        super().__init__(store, tokenizer)
        self.several = several
        self.second = bool(store["second"].lengths.any())
        template = tokenizer.template
        more = template.count() + np.where(store["second"].lengths > 0, len(template.between), 0)
        self._lengths = store["text"].lengths.astype(np.int64) + store["second"].lengths + more

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self._lengths,)

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        rows = [
            text_row([self.store["text"][n].tolist(), self.store["second"][n].tolist()], self.tokenizer)
            for n in members.tolist()
        ]
        tokens = np.array([number for row, _ in rows for number in row], dtype=np.int64)
        types = np.array([number for _, row in rows for number in row], dtype=np.int64)
        side = FlatSide(tokens, {"types": types} if self.second else {})
        answers: NDArray[Any] = self.store["label"].gather(members)
        if self.several is not None:
            counts = self.store["label"].lengths[members]
            hot = np.zeros((len(members), self.several), np.float32)
            hot[np.repeat(np.arange(len(members)), counts), answers] = 1
            answers = hot
        return FlatBatch((side,), answers=answers)

    def show(self, number: int) -> dict[str, str]:
        texts = {name: self.tokenizer.decode(self.store[name][number].tolist()) for name in ("text", "second")}
        return texts if self.second else {"text": texts["text"]}


def text_row(texts: Sequence[list[int]], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """One or two texts with special tokens, and the type id of each token."""
    return tokenizer.frame(texts[0], texts[1] if len(texts) > 1 and texts[1] else None)
