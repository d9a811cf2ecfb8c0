"""Texts that belong together get like vectors, and unlike ones to all others of the batch."""

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
from allyouneed.tasks.similarity import TwoTextItems, TwoTexts, two_texts
from allyouneed.tasks.task import Loss


class Contrastive(TwoTexts):
    """InfoNCE over the batch, both ways (van den Oord et al. 2018, eq. 4; Radford et al. 2021, figure 3): among all
    second texts of the batch the first one's own is to be told by cosine over `temperature`, and the other way round.
    More pairs in a batch (`batch.rows`, `batch.row`) are more to tell apart."""

    files: ClassVar[type[Files]] = PairFiles
    kinds: ClassVar[tuple[str, ...]] = ("encoder", "decoder")
    metrics: ClassVar[dict[str, bool]] = {"recall@1": True, "loss": False}
    kind: Literal["contrastive"] = "contrastive"
    temperature: Annotated[float, Field(gt=0)] = 0.05

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        return two_texts(vocabularies.target, max_tokens)

    def items(self, store: Store, vocabularies: Vocabularies, room: tuple[int, ...], seed: int) -> Items:
        if len(store) < 2:
            raise UserError("data: there is a single pair, and nothing to tell it from; contrastive needs two or more")
        return TwoTextItems(store, vocabularies.target)

    def compare(self, first: Tensor, second: Tensor, answers: Tensor) -> Loss:
        return info_nce(
            nn.functional.normalize(first, dim=-1) @ nn.functional.normalize(second, dim=-1).T / self.temperature
        )


def info_nce(scores: Tensor) -> Loss:
    """scores (firsts, seconds), those that belong together on the diagonal: the mean of both directions' losses."""
    own = torch.arange(len(scores), device=scores.device)
    both = [nn.functional.cross_entropy(way, own, reduction="sum") for way in (scores, scores.T)]
    total = (both[0] + both[1]) / 2
    return Loss(total, total.detach(), torch.tensor(len(scores), device=scores.device))
