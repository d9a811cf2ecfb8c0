"""What tasks with images share: how images are read and augmented, and batches of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator

from allyouneed.config import ConfigError, parse, tree_of
from allyouneed.data.batches.encoding import Encoding
from allyouneed.data.batches.images import CaptionedImageEncoding, CaptionedItems, ImageItems, StoredImages
from allyouneed.data.batches.packing import Batches, Items, SizedBatches
from allyouneed.data.batches.store import Store
from allyouneed.data.files.images import CaptionedImages
from allyouneed.data.files.readers import Files
from allyouneed.data.media.augment import Augment
from allyouneed.data.media.image import Pixels
from allyouneed.files.reading import read_json
from allyouneed.nn.embed.patches import PatchEmbed
from allyouneed.nn.embed.tokens import Embed
from allyouneed.tasks.task import Task

Augments = Annotated[
    tuple[Augment, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str | dict) else value)
]


class ImageTask(Task):
    """A task whose models read images, one for each example."""

    usual_rows: ClassVar[int] = 64
    least_rows: ClassVar[int] = 16
    has_perplexity: ClassVar[bool] = False
    image: Pixels | None = None
    """How images are read; default: the shorter side resized to that of the model's images, the middle cut out, values
    from −1 to 1; with `start`, as by that model."""
    augment: Augments = ()
    """Random changes of training images: crop, resized-crop, flip, randaugment, erasing, mixup, cutmix."""

    @property
    def reader(self) -> Pixels:
        """How images are read, once the model is known."""
        assert self.image is not None
        return self.image

    def embed_tree(self, model: Mapping[str, Any]) -> Any:
        """The part of a model that reads images."""
        return model.get("source_embed") or model.get("embed")

    def for_model(self, model: Mapping[str, Any]) -> Self:
        try:
            embed = parse(Embed, self.embed_tree(model), "model.embed")  # type: ignore[type-abstract]
        except ConfigError:
            return self  # reported when the model is built
        if not isinstance(embed, PatchEmbed):
            return self  # the same
        return self.model_copy(update={"image": image_input(self.image, embed)})

    @classmethod
    def defaults_from(cls, start: Path) -> dict[str, Any]:
        task = read_json(start, "config.json", needed=False).get("task", {})
        found = task.get("image") if isinstance(task, Mapping) else None
        return {"image": found} if isinstance(found, Mapping) and "lacks" not in found else {}

    def images(self, store: Store, seed: int) -> StoredImages:
        return StoredImages(store, self.reader, self.augment, seed)

    def batches(self, items: Items, capacities: tuple[int, ...], rows: int, seed: int) -> Batches:
        return SizedBatches(items, rows, seed)

    def validation_batches(self, items: Items, longest: int) -> Batches:
        assert isinstance(items, ImageItems | CaptionedItems)
        return SizedBatches(items.plain(), self.usual_rows)


class CaptionTask(ImageTask):
    """A task with an image and a text for each example."""

    files: ClassVar[type[Files]] = CaptionedImages
    usual_tokens: ClassVar[int] = 64

    def for_model(self, model: Mapping[str, Any]) -> Self:
        if mixing := [one for one in self.augment if one.mixes]:
            raise ValueError(f"task.augment: {tree_of(mixing[0])['kind']} mixes classes, and texts cannot be mixed")
        return super().for_model(model)

    def encoding(self, vocabularies: Any, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        return CaptionedImageEncoding(self.reader, vocabularies.target, max_tokens)


def image_input(given: Pixels | None, embed: PatchEmbed) -> Pixels:
    """How images become the pixels that this embedding reads; ValueError if what is given contradicts it."""
    height, width = embed.sides
    tree = {} if given is None else tree_of(given, full=False)
    if "size" not in tree and "crop" not in tree:
        tree |= {"size": height, "crop": [height, width]} if height == width else {"size": [height, width]}
    if "mean" not in tree and "std" not in tree:
        tree |= {"mean": [0.5] * embed.channels, "std": [0.5] * embed.channels}
    found = parse(Pixels, tree | {"channels": embed.channels}, "task.image")
    if found.sides != (height, width):
        made = "×".join(map(str, found.sides))
        raise ValueError(f"task.image: images of {made} pixels, the model reads {height}×{width}")
    return found
