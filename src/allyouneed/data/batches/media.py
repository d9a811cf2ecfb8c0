"""Encode images and sounds as what a model reads, and batches of them, augmented."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allyouneed.config import tree_of
from allyouneed.data.batches.encoding import Dropped, EncodedRow, Encoding, TextEncoding, drop_unseen_label
from allyouneed.data.batches.items import StoredItems
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items, add_special_tokens, generator
from allyouneed.data.batches.store import Store
from allyouneed.data.files.media import LabelledMedium
from allyouneed.data.media.augment import Augment, Pixels8, mixed
from allyouneed.data.media.augment_sound import SoundAugment
from allyouneed.data.media.sound import RATE
from allyouneed.data.media.sound_input import FULL, SoundInput
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError
from allyouneed.nn.batch import Signal


class Reader(Protocol):
    """How images or sounds become what is stored: `Pixels`, `SoundInput`. `dtype`: of the stored numbers."""

    medium: ClassVar[str]
    dtype: ClassVar[str]

    def stored(self, given: Any) -> NDArray[Any]:
        """What is stored of an image or a sound; an error if it cannot be read."""


class MediaEncoding(Encoding):
    """What is stored of an image or a sound, and the index of its label. Those that cannot be read are dropped and
    reported."""

    most: ClassVar[int] = 256
    max_tokens = None

    def __init__(self, reader: Any, labels: Sequence[str]) -> None:
        self.reader, self.name = reader, reader.medium.capitalize()
        self.numbers = {label: number for number, label in enumerate(labels)}
        self.columns = {reader.medium: reader.dtype, "label": "<u4"}
        self.spec = {reader.medium: tree_of(reader), "labels": list(labels)}

    def encode(self, chunk: Sequence[LabelledMedium]) -> Iterator[EncodedRow | Dropped]:
        for example, values in zip(chunk, read_all(self.reader, chunk), strict=True):
            number = self.numbers.get(example.label)
            if isinstance(values, Dropped):
                yield values
            else:
                yield drop_unseen_label(example.label) if number is None else [values.reshape(-1), [number]]


def read_all(reader: Reader, examples: Sequence[LabelledMedium]) -> Iterator[Any]:
    """What is stored of each image or sound, or why it cannot be read; decoded in threads."""

    def read(example: LabelledMedium) -> NDArray[Any] | Dropped:
        try:
            return reader.stored(example.content)
        except UserError as error:
            return Dropped(f"unreadable {reader.medium}", str(error))

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        yield from threads.map(read, examples)


class DescribedEncoding(TextEncoding):
    """The token ids of a text, and what is stored of its image or sound. Those that cannot be read are dropped and
    reported."""

    most: ClassVar[int] = 256

    def __init__(
        self, reader: Any, tokenizer: Tokenizer, max_tokens: int | None, special_count: int | None = None
    ) -> None:
        count = tokenizer.template.count() if special_count is None else special_count
        super().__init__({"text": tokenizer}, max_tokens, count)
        self.reader, self.name = reader, f"Captioned{reader.medium.capitalize()}"
        self.columns[reader.medium] = reader.dtype
        self.spec |= {reader.medium: tree_of(reader)}

    def encode(self, chunk: Sequence[Any]) -> Iterator[EncodedRow | Dropped]:
        for row, values in zip(super().encode(chunk), read_all(self.reader, chunk), strict=True):
            if isinstance(row, Dropped):
                yield row
            else:
                yield values if isinstance(values, Dropped) else [*row, values.reshape(-1)]


class StoredMedia:
    """The images or sounds of a store, augmented by choices that depend on seed, epoch and number alone."""

    def __init__(self, store: Store, reader: Any, augment: Sequence[Any], seed: int) -> None:
        self.store, self.reader, self.augment, self.seed = store, reader, augment, seed

    def augmented(self, epoch: int, number: int) -> tuple[Any, int, float]:
        """An image or sound of this epoch; the one that was mixed into it, and how much of the first is left."""
        return self.changed(number, generator(self.seed, epoch, number)), number, 1.0

    @abstractmethod
    def changed(self, number: int, rng: np.random.Generator) -> Any:
        """With the changes that need no other."""

    @property
    def mixes(self) -> Sequence[Any]:
        """The changes that mix two."""
        return ()

    @property
    def lengths(self) -> NDArray[np.integer]:
        """Positions of each; of images, which have equally many, one."""
        return np.ones(len(self.store), np.int64)

    def plain(self) -> Self:
        """The same without augmentation, for validation."""
        return type(self)(self.store, self.reader, (), 0)

    @abstractmethod
    def signal(self, made: Sequence[Any]) -> Signal:
        """A batch of them."""


class StoredImages(StoredMedia):
    """Images, some of them mixed with another."""

    @property
    def mixes(self) -> Sequence[Augment]:
        return [one for one in self.augment if one.mixes]

    def __getitem__(self, number: int) -> Pixels8:
        """(height, width, channels)"""
        return self.store["image"][number].reshape(*self.reader.sides, self.reader.channels)

    def augmented(self, epoch: int, number: int) -> tuple[NDArray[Any], int, float]:
        rng = generator(self.seed, epoch, number)
        image = self.changed(number, rng)
        if not self.mixes:
            return image, number, 1.0
        other = int(rng.integers(len(self.store)))
        mix = self.mixes[int(rng.integers(len(self.mixes)))]
        found, share = mixed(mix, image, lambda: self.changed(other, rng), rng)
        return found, other, share

    def changed(self, number: int, rng: np.random.Generator) -> Pixels8:
        image = self[number]
        for one in self.augment:
            image = image if one.mixes else one.change(image, rng)
        return image

    def signal(self, made: Sequence[NDArray[Any]]) -> Signal:
        return Signal(self.reader.scaled(np.stack(made)))


class StoredSounds(StoredMedia):
    """Sounds: changed as samples, then as frames."""

    augment: Sequence[SoundAugment]

    @property
    def lengths(self) -> NDArray[np.integer]:
        return np.maximum(1, self.store["sound"].lengths // self.reader.step)

    def __getitem__(self, number: int) -> Tensor:
        """(time,) samples."""
        return torch.from_numpy(self.store["sound"][number].astype(np.float32)) / FULL

    def changed(self, number: int, rng: np.random.Generator) -> Tensor:
        samples = self[number]
        for one in self.augment:
            samples = one.change(samples, rng)
        features = self.reader.features(samples[: round(self.reader.seconds * RATE)])
        for one in self.augment:
            features = one.mask(features, rng)
        return features

    def signal(self, made: Sequence[Tensor]) -> Signal:
        return SoundInput.signal(made)


class MediaItems(Items):
    """Labelled images or sounds; mixed ones have the probabilities of all classes."""

    pads = ()
    one_per_row = True

    def __init__(self, store: Store, media: StoredMedia, labels: Sequence[str]) -> None:
        self.store, self.media, self.labels = store, media, labels
        self._lengths = media.lengths

    def __len__(self) -> int:
        return len(self.store)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self._lengths,)

    def plain(self) -> Self:
        """The same without augmentation, for validation."""
        found = copy(self)
        found.media = self.media.plain()
        return found

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        made = [self.media.augmented(epoch, number) for number in members.tolist()]
        signal = self.media.signal([image for image, _, _ in made])
        own = self.store["label"].gather(members)
        if not self.media.mixes:
            return FlatBatch((), answers=own, signal=signal)
        answers, rows = np.zeros((len(members), len(self.labels)), np.float32), np.arange(len(members))
        shares = np.array([share for _, _, share in made], np.float32)
        answers[rows, own] += shares
        answers[rows, self.store["label"].gather(np.array([other for _, other, _ in made]))] += 1 - shares
        return FlatBatch((), answers=answers, signal=signal)

    def show(self, number: int) -> dict[str, str]:
        return {self.media.reader.medium: f"row {number}", "label": self.labels[int(self.store["label"][number][0])]}


class CaptionedItems(StoredItems):
    """Images or sounds with texts between begin and end token; the answer of a pair is its number in the batch."""

    one_per_row = True

    def __init__(self, store: Store, tokenizer: Tokenizer, media: StoredMedia) -> None:
        super().__init__(store, tokenizer)
        self.media = media

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self.store["text"].lengths + self.tokenizer.template.count(),)

    def plain(self) -> Self:
        """The same without augmentation, for validation."""
        found = copy(self)
        found.media = self.media.plain()
        return found

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        template, column = self.tokenizer.template, self.store["text"]
        lengths = column.lengths[members].astype(np.int64)
        side = FlatSide(add_special_tokens(column.gather(members), lengths, template.before, template.after))
        return FlatBatch((side,), answers=np.arange(len(members)), signal=self.signal(epoch, members))

    def signal(self, epoch: int, members: Ints) -> Signal:
        return self.media.signal([self.media.augmented(epoch, number)[0] for number in members.tolist()])

    def show(self, number: int) -> dict[str, str]:
        return {
            self.media.reader.medium: f"row {number}",
            "text": self.tokenizer.decode(self.store["text"][number].tolist()),
        }
