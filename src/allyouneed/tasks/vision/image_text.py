"""Match images and texts: each image gets a vector like that of its own text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.data.batches.media import CaptionedItems
from allyouneed.data.batches.packing import Items
from allyouneed.data.batches.store import Store
from allyouneed.data.files.readers import Files
from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.contrastive import info_nce
from allyouneed.tasks.task import Loss
from allyouneed.tasks.vision.images import CaptionTask

SIGLIP_BIAS, SIGLIP_TEMPERATURE = -10.0, 0.1  # initial values (Zhai et al. 2023, algorithm 1)


class ImageText(CaptionTask):
    """Which text of the batch belongs to which image (more pairs per batch, `batch.rows`, are more negatives).

    clip: cross-entropy over the batch in both directions (Radford et al. 2021, figure 3). siglip: each pair by itself,
    −log σ(z(t·cosine + b)) with z = 1 for matching pairs and −1 for all others (Zhai et al. 2023, "Sigmoid Loss for
    Language Image Pre-Training", eq. 1 and algorithm 1).
    """

    kinds: ClassVar[tuple[str, ...]] = ("two-towers",)
    heads: ClassVar[tuple[str, ...]] = ("pooled",)
    compares_batch: ClassVar[bool] = True
    loss_unit: ClassVar[str] = "pairs"
    metrics: ClassVar[dict[str, bool]] = {"recall@1": True, "loss": False}
    kind: Literal["image-text"] = "image-text"
    objective_: Annotated[Literal["clip", "siglip"], Field(alias="objective")] = "clip"
    """Cross-entropy over the batch, or each pair by itself."""

    def embed_tree(self, model: Mapping[str, Any]) -> Any:
        tower = model.get("image")
        return tower.get("embed") if isinstance(tower, Mapping) else None

    def head(self, model: dict[str, Any], labels: Sequence[str] | None) -> Any:
        return None  # each tower has its own

    def with_vocabulary(self, model: Mapping[str, Any], size: Any) -> dict[str, Any]:
        tower = model.get("text")
        return {**model, "text": {**tower, "vocab": size}} if isinstance(tower, Mapping) else dict(model)

    def complete(self, model: Mapping[str, Any], files: Sequence[Files]) -> Mapping[str, Any]:
        if self.objective_ == "clip" or model.get("bias") is not None:
            return model
        return {"temperature": SIGLIP_TEMPERATURE, **model, "bias": SIGLIP_BIAS}

    def items(self, store: Store, vocabularies: Any, capacities: tuple[int, ...], seed: int) -> Items:
        if len(store) < 2:
            raise UserError("data: only one pair; image-text needs at least two")
        return CaptionedItems(store, vocabularies.target, self.stored(store, seed))

    def loss(self, model: Any, batch: Batch) -> Loss:
        assert batch.source is not None
        images, texts = model.vectors("image", batch.source).float(), model.vectors("text", batch.target).float()
        scores = model.scores(images, texts)
        return info_nce(scores) if self.objective_ == "clip" else sigmoid_loss(scores)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        raise NotImplementedError("a pair has two hidden states")


def sigmoid_loss(scores: Tensor) -> Loss:
    """scores (images, texts) with matching pairs on the diagonal: −log σ(±score), summed over all pairs."""
    signs = 2 * torch.eye(len(scores), device=scores.device) - 1
    total = -nn.functional.logsigmoid(signs * scores).sum()
    return Loss(total, total.detach(), torch.tensor(len(scores), device=scores.device))
