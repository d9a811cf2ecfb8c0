"""Classify an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from allyouneed.data.batches.encoding import Encoding
from allyouneed.data.batches.images import ImageEncoding, ImageItems
from allyouneed.data.batches.packing import Items
from allyouneed.data.batches.store import Store
from allyouneed.data.files.images import ImageFiles, label_names
from allyouneed.data.files.readers import Files
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.task import Loss, class_loss, set_label_count
from allyouneed.tasks.vision.images import ImageTask


class ImageClassification(ImageTask):
    """Cross-entropy of the classes (Dosovitskiy et al. 2021, 3.1), with label smoothing (Szegedy et al. 2016, 7) and
    the probabilities of mixed images."""

    files: ClassVar[type[Files]] = ImageFiles
    kinds: ClassVar[tuple[str, ...]] = ("encoder",)
    heads: ClassVar[tuple[str, ...]] = ("classes",)
    reads: ClassVar[Mapping[str, str]] = {"embed": "images"}
    has_texts: ClassVar[bool] = False
    fills_rows: ClassVar[bool] = True
    loss_unit: ClassVar[str] = "images"
    metrics: ClassVar[dict[str, bool]] = {"accuracy": True, "top-5": True, "macro-f1": True, "loss": False}
    unused_keys: ClassVar[tuple[str, ...]] = ("tokenizer",)
    kind: Literal["image-classification"] = "image-classification"
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing."""

    def labels(self, files: Sequence[Files]) -> list[str]:
        return label_names(entry for entry in files if isinstance(entry, ImageFiles))

    def head(self, model: dict[str, Any], labels: Sequence[str] | None) -> Any:
        return set_label_count(super().head(model, labels), labels)

    def with_vocabulary(self, model: Mapping[str, Any], size: Any) -> dict[str, Any]:
        return {**model, "vocab": None}

    def encoding(self, vocabularies: Any, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        return ImageEncoding(self.reader, labels)

    def items(self, store: Store, vocabularies: Any, capacities: tuple[int, ...], seed: int) -> Items:
        return ImageItems(store, self.images(store, seed), store.spec["labels"])

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return class_loss(model.head(hidden, layout), labels, self.smoothing)
