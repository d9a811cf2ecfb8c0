"""Encode images as the pixels that a model reads, and batches of them, augmented."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from allyouneed.config import tree_of
from allyouneed.data.batches.encoding import Dropped, EncodedRow, Encoding, TextEncoding, drop_unseen_label
from allyouneed.data.batches.items import StoredItems
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items, add_special_tokens, generator
from allyouneed.data.batches.store import Store
from allyouneed.data.files.images import LabelledImage
from allyouneed.data.media.augment import Augment, Pixels8, mixed
from allyouneed.data.media.image import Pixels
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError
from allyouneed.nn.batch import Signal


class ImageEncoding(Encoding):
    """The pixels of an image, resized and cropped, and the index of its label. Images that cannot be read are dropped
    and reported."""

    name = "Image"
    most: ClassVar[int] = 256
    max_tokens = None

    def __init__(self, reader: Pixels, labels: Sequence[str]) -> None:
        self.reader = reader
        self.numbers = {label: number for number, label in enumerate(labels)}
        self.columns = {"image": "<u1", "label": "<u4"}
        self.spec = {"image": tree_of(reader), "labels": list(labels)}

    def encode(self, chunk: Sequence[LabelledImage]) -> Iterator[EncodedRow | Dropped]:
        for example, pixels in zip(chunk, read_all(self.reader, chunk), strict=True):
            number = self.numbers.get(example.label)
            if isinstance(pixels, Dropped):
                yield pixels
            else:
                yield drop_unseen_label(example.label) if number is None else [pixels.reshape(-1), [number]]


def read_all(reader: Pixels, examples: Sequence[LabelledImage]) -> Iterator[Any]:
    """The pixels of each image, (height, width, channels), or why they cannot be read; decoded in threads."""

    def read(example: LabelledImage) -> NDArray[np.uint8] | Dropped:
        try:
            return reader.resized(example.image)
        except UserError as error:
            return Dropped("unreadable image", str(error))

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        yield from threads.map(read, examples)


class CaptionedImageEncoding(TextEncoding):
    """The token ids of a text, and the pixels of its image. Images that cannot be read are dropped and reported."""

    name = "CaptionedImage"
    most: ClassVar[int] = 256

    def __init__(self, reader: Pixels, tokenizer: Tokenizer, max_tokens: int | None) -> None:
        super().__init__({"text": tokenizer}, max_tokens, tokenizer.template.count())
        self.reader = reader
        self.columns["image"] = "<u1"
        self.spec |= {"image": tree_of(reader)}

    def encode(self, chunk: Sequence[Any]) -> Iterator[EncodedRow | Dropped]:
        for row, pixels in zip(super().encode(chunk), read_all(self.reader, chunk), strict=True):
            if isinstance(row, Dropped):
                yield row
            else:
                yield pixels if isinstance(pixels, Dropped) else [*row, pixels.reshape(-1)]


class StoredImages:
    """The images of a store, augmented by choices that depend on seed, epoch and image alone."""

    def __init__(self, store: Store, reader: Pixels, augment: Sequence[Augment], seed: int) -> None:
        self.store, self.reader, self.seed = store, reader, seed
        self.single = [one for one in augment if not one.mixes]
        self.mixes = [one for one in augment if one.mixes]

    def __getitem__(self, number: int) -> Pixels8:
        """(height, width, channels)"""
        return self.store["image"][number].reshape(*self.reader.sides, self.reader.channels)

    def augmented(self, epoch: int, number: int) -> tuple[NDArray[Any], int, float]:
        """An image of this epoch; the image that was mixed into it, and how much of the first is left."""
        rng = generator(self.seed, epoch, number)
        image = self._changed(number, rng)
        if not self.mixes:
            return image, number, 1.0
        other = int(rng.integers(len(self.store)))
        mix = self.mixes[int(rng.integers(len(self.mixes)))]
        found, share = mixed(mix, image, lambda: self._changed(other, rng), rng)
        return found, other, share

    def _changed(self, number: int, rng: np.random.Generator) -> Pixels8:
        image = self[number]
        for one in self.single:
            image = one.change(image, rng)
        return image

    def plain(self) -> StoredImages:
        """The same without augmentation, for validation."""
        return StoredImages(self.store, self.reader, (), 0)

    def signal(self, images: Sequence[NDArray[Any]]) -> Signal:
        return Signal(self.reader.scaled(np.stack(images)))


class ImageItems(Items):
    """Labelled images; mixed ones have the probabilities of all classes."""

    pads = ()
    one_per_row = True

    def __init__(self, store: Store, images: StoredImages, labels: Sequence[str]) -> None:
        self.store, self.images, self.labels = store, images, labels
        self._lengths = np.ones(len(store), np.int64)

    def __len__(self) -> int:
        return len(self.store)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self._lengths,)

    def plain(self) -> Self:
        """The same without augmentation, for validation."""
        found = copy(self)
        found.images = self.images.plain()
        return found

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        made = [self.images.augmented(epoch, number) for number in members.tolist()]
        signal = self.images.signal([image for image, _, _ in made])
        own = self.store["label"].gather(members)
        if not self.images.mixes:
            return FlatBatch((), answers=own, signal=signal)
        answers, rows = np.zeros((len(members), len(self.labels)), np.float32), np.arange(len(members))
        shares = np.array([share for _, _, share in made], np.float32)
        answers[rows, own] += shares
        answers[rows, self.store["label"].gather(np.array([other for _, other, _ in made]))] += 1 - shares
        return FlatBatch((), answers=answers, signal=signal)

    def show(self, number: int) -> dict[str, str]:
        return {"image": f"row {number}", "label": self.labels[int(self.store["label"][number][0])]}


class CaptionedItems(StoredItems):
    """Images with texts between begin and end token; the answer of a pair is its number in the batch."""

    one_per_row = True

    def __init__(self, store: Store, tokenizer: Tokenizer, images: StoredImages) -> None:
        super().__init__(store, tokenizer)
        self.images = images

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self.store["text"].lengths + self.tokenizer.template.count(),)

    def plain(self) -> Self:
        """The same without augmentation, for validation."""
        found = copy(self)
        found.images = self.images.plain()
        return found

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        template, column = self.tokenizer.template, self.store["text"]
        lengths = column.lengths[members].astype(np.int64)
        side = FlatSide(add_special_tokens(column.gather(members), lengths, template.before, template.after))
        return FlatBatch((side,), answers=np.arange(len(members)), signal=self.signal(epoch, members))

    def signal(self, epoch: int, members: Ints) -> Signal:
        return self.images.signal([self.images.augmented(epoch, number)[0] for number in members.tolist()])

    def show(self, number: int) -> dict[str, str]:
        return {"image": f"row {number}", "text": self.tokenizer.decode(self.store["text"][number].tolist())}
