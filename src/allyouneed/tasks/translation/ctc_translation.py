"""Translation by connectionist temporal classification: one pass of an encoder writes the whole target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn.functional import ctc_loss

from allyouneed.data.batches.encoding import Dropped, EncodedRow, Encoding, TextEncoding
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items, add_special_tokens
from allyouneed.data.batches.store import Store
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.errors import UserError
from allyouneed.nn.batch import IGNORE
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.task import Loss
from allyouneed.tasks.translation.translation import PairItems, PairTask

BLANK = 0  # the padding token of our tokenizers, which no target contains


class CtcTranslation(PairTask):
    """Each source token is repeated `upsample` times; every copy outputs a target token or the blank, and the target is
    what is left after merging repetitions and removing blanks. The loss sums over all such alignments (Graves et al.
    2006; Libovický and Helcl 2018, 3; with the source upsampled before one stack: Saharia et al. 2020, 2.2)."""

    kinds: ClassVar[tuple[str, ...]] = ("encoder",)
    sides: ClassVar[int] = 1
    two_vocabularies: ClassVar[bool] = False
    has_perplexity: ClassVar[bool] = False
    kind: Literal["ctc-translation"] = "ctc-translation"
    upsample: Annotated[int, Field(gt=0, le=16)] = 3
    """Copies of each source token: no target can have more tokens than the source has copies."""

    @property
    def copies(self) -> int:
        return self.upsample

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        both = {"source": vocabularies.source, "target": vocabularies.target}
        return AlignableEncoding(both, max_tokens, self.upsample, len(vocabularies.source.source_affixes[1]) or 1)

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        if vocabularies.source.pad != BLANK:
            raise UserError(f"task: ctc-translation needs a tokenizer whose padding token has id {BLANK}")
        return UpsampledItems(store, vocabularies, self.upsample)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return ctc_objective(model.head, hidden, layout, labels)


def ctc_objective(head: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
    """−log p(labels), summed over all alignments. `labels`: the tokens of each target, at the start of its row."""
    log_probs = head(hidden).float().log_softmax(-1).transpose(0, 1)  # (time, batch, vocab)
    time, batch, _ = log_probs.shape
    real = labels != IGNORE
    inputs = torch.full((batch,), time, device=labels.device) if layout.real is None else layout.real.sum(1)
    lengths = real.sum(1)
    total = ctc_loss(log_probs, labels.clamp(min=0), inputs, lengths, blank=BLANK, reduction="sum", zero_infinity=True)
    return Loss(total, total.detach(), real.sum())


class AlignableEncoding(TextEncoding):
    """Sources and targets; pairs whose upsampled source is too short for the target have no alignment: they are
    dropped."""

    name = "AlignableTexts"

    def __init__(self, tokenizers: Any, max_tokens: int | None, upsample: int, special_count: int) -> None:
        super().__init__(tokenizers, max_tokens, special_count)
        self.upsample = upsample
        self.spec = self.spec | {"upsample": upsample}

    def encode(self, chunk: Sequence[Any]) -> Iterator[EncodedRow | Dropped]:
        for row in super().encode(chunk):
            yield row if isinstance(row, Dropped) else self._alignable(row)

    def _alignable(self, row: EncodedRow) -> EncodedRow | Dropped:
        source, target = row[0], row[1]
        room = self.upsample * (len(source) + self.special_count)
        needed = len(target) + sum(a == b for a, b in pairwise(target))
        if needed <= room:
            return row
        return Dropped(
            "target too long", f"needs {needed} positions, the upsampled source has {room}; raise task.upsample"
        )


class UpsampledItems(PairItems):
    """Source: tokens and EOS, each repeated; labels: the target's tokens, in the first of its positions."""

    one_per_row = True

    def __init__(self, store: Store, vocabularies: Vocabularies, upsample: int) -> None:
        super().__init__(store, vocabularies)
        self.upsample = upsample
        self.pads = (vocabularies.source.pad,)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (super().lengths(epoch)[0] * self.upsample,)

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        source, target = self.store["source"], self.store["target"]
        sources, here = source.gather(members).astype(np.int64), source.lengths[members].astype(np.int64)
        tokens = np.repeat(add_special_tokens(sources, here, *self.vocabularies.source.source_affixes), self.upsample)
        lengths = self.lengths(epoch)[0][members].astype(np.int64)
        begins = np.cumsum(lengths) - lengths
        labels = np.full(len(tokens), IGNORE, dtype=np.int64)
        for begin, number in zip(begins, members, strict=True):
            labels[begin : begin + len(target[number])] = target[number]
        return FlatBatch((FlatSide(tokens),), labels=labels)
