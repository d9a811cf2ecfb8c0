"""What tasks with images share: how images are read and augmented."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator

from allyouneed.config import parse, tree_of
from allyouneed.data.batches.encoding import Encoding
from allyouneed.data.batches.media import DescribedEncoding, StoredImages, StoredMedia
from allyouneed.data.files.images import CaptionedImages
from allyouneed.data.files.readers import Files
from allyouneed.data.media.augment import Augment
from allyouneed.data.media.image import Pixels
from allyouneed.nn.embed.patches import PatchEmbed
from allyouneed.nn.embed.tokens import Embed
from allyouneed.tasks.media import MediaTask

Augments = Annotated[
    tuple[Augment, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str | dict) else value)
]


class ImageTask(MediaTask):
    """A task whose models read images, one for each example."""

    medium: ClassVar[str] = "image"
    media: ClassVar[type[StoredMedia]] = StoredImages
    image: Pixels | None = None
    """How images are read; default: the shorter side resized to that of the model's images, the middle cut out, values
    from −1 to 1; with `start`, as by that model."""
    augment: Augments = ()
    """Random changes of training images: crop, resized-crop, flip, randaugment, erasing, mixup, cutmix."""

    def input_for(self, embed: Embed) -> Pixels | None:
        return image_input(self.image, embed) if isinstance(embed, PatchEmbed) else None


class CaptionTask(ImageTask):
    """A task with an image and a text for each example."""

    files: ClassVar[type[Files]] = CaptionedImages
    usual_tokens: ClassVar[int] = 64

    def for_model(self, model: Mapping[str, Any]) -> Self:
        if mixing := [one for one in self.augment if one.mixes]:
            raise ValueError(f"task.augment: {tree_of(mixing[0])['kind']} mixes classes, and texts cannot be mixed")
        return super().for_model(model)

    def encoding(self, vocabularies: Any, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        return DescribedEncoding(self.reader, vocabularies.target, max_tokens)


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
