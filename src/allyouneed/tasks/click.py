"""Predict whether a user clicks an item, from the items before it: recommendation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt
from torch import Tensor, nn

from allyouneed.data.batches.encoding import Encoding
from allyouneed.data.batches.items import StoredItems
from allyouneed.data.batches.logs import ImpressionEncoding
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items
from allyouneed.data.batches.store import Store
from allyouneed.data.files.filters import Filters
from allyouneed.data.files.logs import LogFiles
from allyouneed.data.files.readers import Files, Report
from allyouneed.data.tokenizers.base import Tokenizer, TokenizerConfig, Vocabularies
from allyouneed.data.tokenizers.values import train_values
from allyouneed.errors import UserError
from allyouneed.nn.batch import IGNORE
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.task import Loss, Task


class ClickPrediction(Task):
    """Cross-entropy of a click (Chen et al. 2019, "Behavior Sequence Transformer", eq. 7)."""

    files: ClassVar[type[Files]] = LogFiles
    kinds: ClassVar[tuple[str, ...]] = ("encoder",)
    heads: ClassVar[tuple[str, ...]] = ("click",)
    loss_unit: ClassVar[str] = "impressions"
    has_perplexity: ClassVar[bool] = False
    metrics: ClassVar[dict[str, bool]] = {"auc": True, "loss": False}
    kind: Literal["click"] = "click"
    length: PositiveInt = 20
    """The last items of a user's sequence that are read."""

    def learn_vocabularies(self, config: TokenizerConfig, files: Sequence[Files], filters: Filters) -> Vocabularies:
        report = Report()  # for the error below; the store reads the same examples and reports them
        examples = filters.apply((example for entry in files for example in entry.read(report)), report)
        try:
            found = train_values(config, (value for example in examples for value in example.texts))
        except UserError as error:
            raise UserError(f"{error}\n{report.text()}" if report.dropped else str(error)) from None
        return Vocabularies(found, found)

    def complete(self, model: Mapping[str, Any], files: Sequence[Files]) -> dict[str, Any]:
        """The model with the numbers of columns of the data."""
        logs = [entry for entry in files if isinstance(entry, LogFiles)]
        if not logs:
            return dict(model)
        for entry in logs[1:]:
            if entry.names != logs[0].names:
                raise UserError("data.train: all files need the same columns ('sequence', 'times', 'features')")
        counts = {("embed", "sides"): len(logs[0].sequence) - 1, ("head", "features"): len(logs[0].features)}
        made = dict(model)
        for (slot, key), count in counts.items():
            part = made.get(slot, {})
            part = dict(part) if isinstance(part, Mapping) else {"kind": part}
            if part.get("kind") not in ("behavior", "click"):
                continue  # another embedding reads the items alone
            made[slot] = part | {key: count}
        return made

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        most = self.length if max_tokens is None else min(self.length, max_tokens - 1)
        return ImpressionEncoding(vocabularies.target, most)

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        return ImpressionItems(store, vocabularies.target)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        logits, real = model.head(hidden, layout).float(), labels != IGNORE
        each = nn.functional.binary_cross_entropy_with_logits(logits, labels.float().where(real, 0), reduction="none")
        total = each.where(real, 0).sum()
        return Loss(total, total.detach(), real.sum())


class ImpressionItems(StoredItems):
    """The items of a user's sequence, the one shown last."""

    columns = ("items",)

    def __init__(self, store: Store, tokenizer: Tokenizer) -> None:
        super().__init__(store, tokenizer)
        self._lengths = store["items"].lengths.astype(np.int64)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self._lengths,)

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        tokens = self.store["items"].gather(members)
        sides = self.store["sides"].gather(members).reshape(len(tokens), -1)  # (tokens, columns)
        features = self.store["features"].gather(members).reshape(len(members), -1)
        side = side_of(tokens, self.store["ages"].gather(members), sides, features, self._lengths[members])
        return FlatBatch((side,), answers=self.store["click"].gather(members))

    def show(self, number: int) -> dict[str, str]:
        items = self.tokenizer.tokens(self.store["items"][number].tolist())
        return {"items": " ".join(items[:-1]), "shown": items[-1], "click": str(int(self.store["click"][number][0]))}


def side_of(tokens: Ints, ages: Ints, sides: Ints, features: Ints, lengths: Ints) -> FlatSide:
    """Concatenated sequences of these lengths; the features of each sequence stand at its last item."""
    details = np.zeros((len(tokens), sides.shape[1] + features.shape[1]), np.int64)
    details[:, : sides.shape[1]] = sides
    details[np.cumsum(lengths) - 1, sides.shape[1] :] = features
    return FlatSide(tokens, {"ages": ages, "details": details})
