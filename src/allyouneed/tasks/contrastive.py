"""Contrastive learning: paired texts get similar vectors, all other pairs of the batch dissimilar ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.data.batches.encoding import Encoding
from allyouneed.data.batches.packing import Items
from allyouneed.data.batches.store import Store
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.files.readers import Files
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.errors import UserError
from allyouneed.tasks.similarity import TwoTextItems, TwoTextTask, two_text_encoding
from allyouneed.tasks.task import Loss


class Contrastive(TwoTextTask):
    """InfoNCE over the batch in both directions (van den Oord et al. 2018, eq. 4; Radford et al. 2021, figure 3):
    identify each first text's own second text among all of the batch by cosine over `temperature`, and vice versa. More
    pairs per batch (`batch.rows`, `batch.row`) are more negatives."""

    files: ClassVar[type[Files]] = PairFiles
    kinds: ClassVar[tuple[str, ...]] = ("encoder", "decoder")
    compares_batch: ClassVar[bool] = True
    metrics: ClassVar[dict[str, bool]] = {"recall@1": True, "loss": False}
    kind: Literal["contrastive"] = "contrastive"
    temperature: Annotated[float, Field(gt=0)] = 0.05
    """Divides the cosines."""

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        return two_text_encoding(vocabularies.target, max_tokens)

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        if len(store) < 2:
            raise UserError("data: only one pair; contrastive needs at least two")
        return TwoTextItems(store, vocabularies.target)

    def compare(self, first: Tensor, second: Tensor, answers: Tensor) -> Loss:
        return info_nce(
            nn.functional.normalize(first, dim=-1) @ nn.functional.normalize(second, dim=-1).T / self.temperature
        )


def info_nce(scores: Tensor) -> Loss:
    """scores (firsts, seconds) with matching pairs on the diagonal: the mean of the losses of both directions."""
    own = torch.arange(len(scores), device=scores.device)
    both = [nn.functional.cross_entropy(logits, own, reduction="sum") for logits in (scores, scores.T)]
    total = (both[0] + both[1]) / 2
    return Loss(total, total.detach(), torch.tensor(len(scores), device=scores.device))
