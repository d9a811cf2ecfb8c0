"""Describe an image: an encoder reads its patches, a decoder writes a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from allyouneed.data.batches.media import CaptionedItems
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items, add_special_tokens
from allyouneed.data.batches.store import Store
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.task import Loss, token_loss
from allyouneed.tasks.vision.images import CaptionTask


class Captioning(CaptionTask):
    """Cross-entropy of the next token of an image's text (Vinyals et al. 2015, "Show and Tell", eq. 1–2, with the
    encoder-decoder of "Attention Is All You Need" over patches)."""

    kinds: ClassVar[tuple[str, ...]] = ("encoder-decoder",)
    reads: ClassVar[Mapping[str, str]] = {"source_embed": "images"}
    has_perplexity: ClassVar[bool] = True
    metrics: ClassVar[dict[str, bool]] = {"chrf": True, "bleu": True, "exact": True, "perplexity": False, "loss": False}
    kind: Literal["captioning"] = "captioning"
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing."""

    def items(self, store: Store, vocabularies: Any, capacities: tuple[int, ...], seed: int) -> Items:
        return DescribedItems(store, vocabularies.target, self.stored(store, seed))

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return token_loss(model.head, hidden, labels, self.smoothing)


class DescribedItems(CaptionedItems):
    """Images, and their texts to be written: the label of each token is the next one."""

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        column, tokenizer = self.store["text"], self.tokenizer
        ids, lengths = column.gather(members), column.lengths[members].astype(np.int64)
        side = FlatSide(add_special_tokens(ids, lengths, first=[tokenizer.bos]))
        labels = add_special_tokens(ids, lengths, last=[tokenizer.eos])
        return FlatBatch((side,), labels, signal=self.signal(epoch, members))

    def lengths(self, epoch: int) -> Any:
        return (self.store["text"].lengths + 1,)
