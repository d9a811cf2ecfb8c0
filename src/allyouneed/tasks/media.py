"""What tasks with images and sounds share: how they are read and augmented, batches of them, and their classes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from allyouneed.config import Config, ConfigError, parse
from allyouneed.data.batches.encoding import Encoding
from allyouneed.data.batches.media import CaptionedItems, MediaEncoding, MediaItems, StoredMedia
from allyouneed.data.batches.packing import Batches, Items, SizedBatches
from allyouneed.data.batches.store import Store
from allyouneed.data.files.media import MediaFiles, label_names
from allyouneed.data.files.readers import Files
from allyouneed.files.reading import read_json
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.embed.tokens import Embed
from allyouneed.tasks.task import Loss, Task, class_loss, set_label_count


class MediaTask(Task):
    """A task whose models read an image or a sound for each example; the field `medium` says how."""

    medium: ClassVar[str]
    media: ClassVar[type[StoredMedia]]
    usual_rows: ClassVar[int] = 64
    least_rows: ClassVar[int] = 16
    near: ClassVar[int] = 1  # batches of examples that are sorted by length together
    has_perplexity: ClassVar[bool] = False

    @property
    def reader(self) -> Any:
        """How images or sounds are read, once the model is known."""
        found = getattr(self, self.medium)
        assert found is not None
        return found

    def embed_tree(self, model: Mapping[str, Any]) -> Any:
        """The part of a model that reads images or sounds."""
        return model.get("source_embed") or model.get("embed")

    @abstractmethod
    def input_for(self, embed: Embed) -> Config | None:
        """How images or sounds become what this embedding reads; None if it reads something else; ValueError if what
        is given contradicts it."""

    def for_model(self, model: Mapping[str, Any]) -> Self:
        try:
            embed = parse(Embed, self.embed_tree(model), "model.embed")  # type: ignore[type-abstract]
        except ConfigError:
            return self  # reported when the model is built
        found = self.input_for(embed)
        return self if found is None else self.model_copy(update={self.medium: found})

    @classmethod
    def defaults_from(cls, start: Path) -> dict[str, Any]:
        task = read_json(start, "config.json", needed=False).get("task", {})
        found = task.get(cls.medium) if isinstance(task, Mapping) else None
        return {cls.medium: found} if isinstance(found, Mapping) and "lacks" not in found else {}

    def stored(self, store: Store, seed: int) -> StoredMedia:
        return self.media(store, self.reader, getattr(self, "augment", ()), seed)

    def batches(self, items: Items, capacities: tuple[int, ...], rows: int, seed: int) -> Batches:
        return SizedBatches(items, rows, seed, self.near)

    def validation_batches(self, items: Items, longest: int) -> Batches:
        assert isinstance(items, MediaItems | CaptionedItems)
        return SizedBatches(items.plain(), self.usual_rows)


class MediaClassification(MediaTask):
    """Cross-entropy of the classes."""

    kinds: ClassVar[tuple[str, ...]] = ("encoder",)
    heads: ClassVar[tuple[str, ...]] = ("classes",)
    has_texts: ClassVar[bool] = False
    fills_rows: ClassVar[bool] = True
    unused_keys: ClassVar[tuple[str, ...]] = ("tokenizer",)

    def labels(self, files: Sequence[Files]) -> list[str]:
        return label_names(entry for entry in files if isinstance(entry, MediaFiles))

    def head(self, model: dict[str, Any], labels: Sequence[str] | None) -> Any:
        return set_label_count(super().head(model, labels), labels)

    def with_vocabulary(self, model: Mapping[str, Any], size: Any) -> dict[str, Any]:
        return {**model, "vocab": None}

    def encoding(self, vocabularies: Any, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        return MediaEncoding(self.reader, labels)

    def items(self, store: Store, vocabularies: Any, capacities: tuple[int, ...], seed: int) -> Items:
        return MediaItems(store, self.stored(store, seed), store.spec["labels"])

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return class_loss(model.head(hidden, layout), labels, getattr(self, "smoothing", 0.0))
