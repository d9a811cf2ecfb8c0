"""Translation by mask-predict: masked target tokens given the source and the other target tokens."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items, add_special_tokens, generator
from allyouneed.data.batches.store import Store
from allyouneed.data.tokenizers.base import MASK, Vocabularies
from allyouneed.nn.batch import IGNORE, Batch
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.heads.pooling import pool
from allyouneed.tasks.task import Loss, token_loss
from allyouneed.tasks.translation.translation import PairItems, PairTask


class MaskPredict(PairTask):
    """A conditional masked language model (Ghazvininejad et al. 2019, 2): of the N target tokens a number drawn
    uniformly from 1 to N is masked, and these are predicted; the number N is predicted from the source."""

    heads: ClassVar[tuple[str, ...]] = ("mask-predict",)
    loss_unit: ClassVar[str] = "masked tokens"
    kind: Literal["mask-predict"] = "mask-predict"
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Label smoothing of the tokens."""

    def specials(self) -> tuple[str, ...]:
        return (MASK,)

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        return MaskedTargets(store, vocabularies, seed)

    def loss(self, model: Any, batch: Batch) -> Loss:
        assert batch.labels is not None and batch.source is not None
        losses: list[Tensor] = []
        memory = model.encode(batch.source, losses=losses)
        hidden = model.decode(batch.rows, memory, losses=losses)
        found = self.objective(model, hidden, model.embed.layout(batch.rows), batch.labels).with_auxiliary(losses)
        scores = model.head.length_logits(memory).float()
        wanted = (target_lengths(model.embed.layout(batch.rows)) - 1).clamp(max=scores.shape[1] - 1)
        return found._replace(total=found.total + cross_entropy(scores, wanted, reduction="sum"))

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return token_loss(model.head, hidden, labels, self.smoothing)


def target_lengths(layout: TokenLayout) -> Tensor:
    """Tokens of each sentence, in the order of `pool`."""
    last = pool(layout.positions.expand(len(layout.positions), -1)[..., None], layout, "last")[:, 0]
    return last + 1


class MaskedTargets(PairItems):
    """Source: tokens and EOS. Target: its tokens alone, some of them masked; labels where they are."""

    def __init__(self, store: Store, vocabularies: Vocabularies, seed: int) -> None:
        super().__init__(store, vocabularies)
        self.seed, self.mask = seed, vocabularies.target.mask

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return super().lengths(epoch)[0], self.store["target"].lengths

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        source, target = self.store["source"], self.store["target"]
        sources, targets = source.gather(members).astype(np.int64), target.gather(members).astype(np.int64)
        counts = target.lengths[members].astype(np.int64)
        chosen = [
            choose(int(count), generator(self.seed, epoch, int(n))) for n, count in zip(members, counts, strict=True)
        ]
        masked = np.concatenate(chosen)
        affixes = self.vocabularies.source.source_affixes
        return FlatBatch(
            (
                FlatSide(add_special_tokens(sources, source.lengths[members].astype(np.int64), *affixes)),
                FlatSide(np.where(masked, self.mask, targets)),
            ),
            labels=np.where(masked, targets, IGNORE),
        )


def choose(count: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which of `count` tokens are masked: as many as a uniform draw from 1 to `count` says."""
    chosen = np.zeros(count, dtype=bool)
    if count:
        chosen[rng.permutation(count)[: rng.integers(1, count + 1)]] = True
    return chosen
