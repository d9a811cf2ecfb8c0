"""Translation and other sequence-to-sequence tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from allyouneed.config import Config, model_validator
from allyouneed.data.batches.context import BREAK, ContextEncoding
from allyouneed.data.batches.encoding import Encoding, TextEncoding
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items, add_special_tokens
from allyouneed.data.batches.store import Store
from allyouneed.data.files.pairs import MAX_CONTEXT, PairFiles
from allyouneed.data.files.readers import Files
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.errors import UserError
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.task import Loss, Task, token_loss


class PairTask(Task):
    """A task over pairs of a source and a target."""

    files: ClassVar[type[Files]] = PairFiles
    kinds: ClassVar[tuple[str, ...]] = ("encoder-decoder",)
    sides: ClassVar[int] = 2
    two_vocabularies: ClassVar[bool] = True
    loss_unit: ClassVar[str] = "target tokens"
    supports_weights: ClassVar[bool] = True
    metrics: ClassVar[dict[str, bool]] = {"bleu": True, "chrf": True, "exact": True, "loss": False}

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        if vocabularies.source.template.language is not None:
            raise UserError("data: fine-tuning a model that reads the source language is not supported yet")
        return pair_encoding(vocabularies, max_tokens, max(1, sum(map(len, vocabularies.source.source_affixes))))

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        return PairItems(store, vocabularies)


class DocumentContext(Config):
    """Sentences before a sentence that are read with it. `context: 2` is short for `{sentences: 2}`."""

    sentences: Annotated[int, Field(gt=0, le=MAX_CONTEXT)] = 1
    """How many sentences of the same document, at most."""
    target: bool = False
    """Their translations are written as well (k-to-k); default: the source is read with its context (k-to-1)."""

    @model_validator(mode="before")
    @classmethod
    def _parse_count(cls, tree: Any) -> Any:
        return {"sentences": tree} if isinstance(tree, int) else tree


class Translation(PairTask):
    """Each target token given the source and the target before it, with label smoothing (the paper, 5.4).

    With `context`, sentences are translated with those before them in their document, each followed by a break
    (Tiedemann, Scherrer 2017, "Neural Machine Translation with Extended Context"; Agrawal et al. 2018, "Contextual
    Handling in Neural Machine Translation").
    """

    kind: Literal["translation"] = "translation"
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Label smoothing (the paper, 5.4)."""
    marked_terms: bool = False
    """The training data marks terms with their translations: glossaries are offered to the model in this form."""
    context: DocumentContext | None = None
    """Sentences of the same document that are read with each sentence (docs/family/document.md); default: none."""

    free_keys: ClassVar[tuple[str, ...]] = ("marked_terms",)  # the data has the marks, or not

    def learnt(self, start: Mapping[str, Any]) -> dict[str, Any]:
        return {"marked_terms": True} if start.get("marked_terms") else {}

    def specials(self) -> tuple[str, ...]:
        return () if self.context is None else (BREAK,)

    def entry_defaults(self) -> dict[str, Any]:
        return {} if self.context is None else {"context": self.context.sentences}

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        plain = super().encoding(vocabularies, labels, max_tokens)
        if self.context is None:
            return plain
        assert isinstance(plain, TextEncoding)
        context = self.context
        return ContextEncoding(vocabularies, max_tokens, plain.special_count, context.sentences, context.target)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return token_loss(model.head, hidden, labels, self.smoothing)


def pair_encoding(vocabularies: Vocabularies, max_tokens: int | None, special_count: int = 1) -> TextEncoding:
    return TextEncoding({"source": vocabularies.source, "target": vocabularies.target}, max_tokens, special_count)


class PairItems(Items):
    """Source: tokens and EOS. Target inputs: BOS and tokens; labels: tokens and EOS."""

    def __init__(self, store: Store, vocabularies: Vocabularies) -> None:
        self.store, self.vocabularies = store, vocabularies
        store.check(source=vocabularies.source, target=vocabularies.target)
        self.pads = vocabularies.source.pad, vocabularies.target.pad
        self.weights = store.weights

    def __len__(self) -> int:
        return len(self.store)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        special_count = sum(map(len, self.vocabularies.source.source_affixes))
        return self.store["source"].lengths + special_count, self.store["target"].lengths + 1

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        source, target = self.store["source"], self.store["target"]
        sources, targets = source.gather(members), target.gather(members)
        here, there = source.lengths[members].astype(np.int64), target.lengths[members].astype(np.int64)
        reads, writes = self.vocabularies.source, self.vocabularies.target
        return FlatBatch(
            (
                FlatSide(add_special_tokens(sources, here, *reads.source_affixes)),
                FlatSide(add_special_tokens(targets, there, first=[writes.bos])),
            ),
            labels=add_special_tokens(targets, there, last=[writes.eos]),
        )

    def show(self, number: int) -> dict[str, str]:
        return {
            "source": self.vocabularies.source.decode(self.store["source"][number].tolist()),
            "target": self.vocabularies.target.decode(self.store["target"][number].tolist()),
        }
