"""Whether a text answers a query: a cross-encoder reads both together."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from allyouneed.data.batches.encoding import Encoding, TextEncoding
from allyouneed.data.batches.items import StoredItems
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items, generator
from allyouneed.data.batches.store import Column, Store
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.files.readers import Files
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.task import Loss, Task, set_label_count

RELEVANT = "relevant"  # the only class


class Reranking(Task):
    """Cross-entropy of the relevance of a text, with one relevant text and `negatives` others for each query (Nogueira,
    Cho 2019, "Passage Re-ranking with BERT", 2, eq. 1). With `hard`, half of the others are among those that an
    embedder finds most similar to the query (Karpukhin et al. 2020, 3.2)."""

    files: ClassVar[type[Files]] = PairFiles
    kinds: ClassVar[tuple[str, ...]] = ("encoder", "decoder")
    heads: ClassVar[tuple[str, ...]] = ("classes",)
    loss_unit: ClassVar[str] = "pairs"
    has_perplexity: ClassVar[bool] = False
    metrics: ClassVar[dict[str, bool]] = {"mrr": True, "ndcg@10": True, "loss": False}
    kind: Literal["reranking"] = "reranking"
    negatives: PositiveInt = 4
    """Texts of other queries that are read with each query, drawn anew in every epoch."""
    hard: Path | None = None
    """A model folder that embeds texts, to find difficult ones; default: all are drawn at random."""
    candidates: Annotated[int, Field(gt=1)] = 20
    """Texts that are ranked for each query in validation: its own and others, the same in every run."""

    def labels(self, files: Sequence[Files]) -> list[str]:
        return [RELEVANT]

    def head(self, model: dict[str, Any], labels: Sequence[str] | None) -> Any:
        return set_label_count(super().head(model, labels), [RELEVANT])

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        texts = {"text": vocabularies.target, "second": vocabularies.target}
        template = vocabularies.target.template
        return TextEncoding(texts, max_tokens, template.count(), len(template.between))

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        return QueryItems(store, vocabularies.target, capacities[-1], self.negatives, seed)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        logits = model.head(hidden, layout).float()[:, 0]
        total = nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
        return Loss(total, total.detach(), labels.new_tensor(len(labels)))


class QueryItems(StoredItems):
    """A query and a text as two texts in a row: its own (1), or another one (0), truncated to fit."""

    columns = ("text", "second")

    def __init__(self, store: Store, tokenizer: Tokenizer, longest: int, negatives: int, seed: int) -> None:
        super().__init__(store, tokenizer)
        self.negatives, self.seed, self.each = negatives, seed, 1 + negatives
        self.room = longest - tokenizer.template.count(2)
        queries, texts = numbers_of(store["text"]), numbers_of(store["second"])
        self.texts, self.firsts = texts, np.unique(texts, return_index=True)[1]  # an example with each text
        if len(self.firsts) < 2:
            raise UserError("data: only one text; reranking needs at least two")
        self.queries, self.right = queries, np.unique(queries * len(self.firsts) + texts)
        self.hard: NDArray[np.int64] | None = None  # (examples, n): texts that are similar to the query
        self._drawn: tuple[int, Ints] | None = None

    def with_hard(self, texts: NDArray[np.int64]) -> Self:
        """The same with these similar texts for each example."""
        made = copy(self)
        made.hard, made._drawn = texts, None
        return made

    def __len__(self) -> int:
        return len(self.store) * self.each

    def is_right(self, queries: Ints, texts: Ints) -> NDArray[np.bool_]:
        """Whether these texts belong to these queries."""
        return np.isin(queries * len(self.firsts) + texts, self.right)

    def text_numbers(self, epoch: int) -> Ints:
        """(examples, 1 + negatives): the text of each item."""
        known = self._drawn  # batches are made in another thread than lengths are asked for
        if known is None or known[0] != epoch:
            known = self._drawn = epoch, self._draw(epoch)
        return known[1]

    def _draw(self, epoch: int) -> Ints:
        rng, shape = generator(self.seed, epoch), (len(self.store), self.negatives)
        others = rng.integers(len(self.firsts), size=shape)
        if self.hard is not None and self.hard.shape[1]:
            half = -(-self.negatives // 2)
            places = rng.integers(self.hard.shape[1], size=(len(self.store), half))
            others[:, :half] = np.take_along_axis(self.hard, places, 1)
        queries = np.broadcast_to(self.queries[:, None], shape)
        for _ in range(16):  # a query whose own texts are nearly all there are keeps one in the end
            wrong = self.is_right(queries, others)
            if not wrong.any():
                break
            others[wrong] = rng.integers(len(self.firsts), size=int(wrong.sum()))
        return np.concatenate([self.texts[:, None], others], 1)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        query = self.store["text"].lengths.astype(np.int64)[:, None]
        text = self.store["second"].lengths.astype(np.int64)[self.firsts[self.text_numbers(epoch)]]
        return ((np.minimum(query + text, self.room) + self.tokenizer.template.count(2)).flatten(),)

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        numbers = self.text_numbers(epoch).flatten()
        tokens, types = list[int](), list[int]()
        for number in members.tolist():
            query = self.store["text"][number // self.each].tolist()
            text = self.store["second"][int(self.firsts[numbers[number]])].tolist()
            row, kinds = self.tokenizer.frame(query, text[: self.room - len(query)])
            tokens, types = tokens + row, types + kinds
        answers = self.is_right(self.queries[members // self.each], numbers[members])
        side = FlatSide(np.array(tokens, np.int64), {"types": np.array(types, np.int64)})
        return FlatBatch((side,), answers=answers.astype(np.int64))

    def show(self, number: int) -> dict[str, str]:
        names = {"text": "query", "second": "text"}
        example = number // self.each
        return {shown: self.tokenizer.decode(self.store[name][example].tolist()) for name, shown in names.items()}


def numbers_of(column: Column) -> Ints:
    """A number for each text of a column; equal texts have the same."""
    known: dict[bytes, int] = {}
    found = (known.setdefault(column[number].tobytes(), len(known)) for number in range(len(column.lengths)))
    return np.fromiter(found, np.int64, len(column.lengths))
