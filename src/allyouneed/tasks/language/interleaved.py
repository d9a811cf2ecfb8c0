"""Language modelling over texts with images and sounds among their tokens (KOSMOS-1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from allyouneed.config import ConfigError, parse, tree_of
from allyouneed.data.batches.encoding import Encoding
from allyouneed.data.batches.interleaved import InterleavedEncoding
from allyouneed.data.batches.items import StoredItems
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items
from allyouneed.data.batches.store import Store
from allyouneed.data.files.interleaved import InterleavedFiles
from allyouneed.data.files.readers import Files
from allyouneed.data.media.pieces import MARKS, AudioInput, ImageInput, MediaInputs
from allyouneed.data.media.sound import HOP, RATE
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.files.reading import read_json
from allyouneed.nn.batch import IGNORE, MEDIA, Media
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.embed.frames import STRIDE
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.interleaved import Interleaved
from allyouneed.tasks.task import Loss, Task, token_loss


class InterleavedLM(Task):
    """Each token of a text given the texts, images and sounds before it (Huang et al. 2023, 2.4); of an example with an
    `answer`, only the answer is learned."""

    files: ClassVar[type[Files]] = InterleavedFiles
    kinds: ClassVar[tuple[str, ...]] = ("interleaved",)
    fills_rows: ClassVar[bool] = True
    metrics: ClassVar[dict[str, bool]] = {"perplexity": False, "loss": False, "accuracy": True}
    decoding: ClassVar[dict[str, Any]] = {"method": "greedy", "extra": 64}
    kind: Literal["interleaved"] = "interleaved"
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing."""
    image: ImageInput | None = None
    """How images are read; default: resized to the size that the model reads, with values from 0 to 1."""
    audio: AudioInput | None = None
    """How sounds are read; default: as long as the model has positions for, or 30 seconds."""

    @property
    def media(self) -> MediaInputs:
        """How it reads images and sounds, by kind."""
        return {kind: reader for kind in MEDIA if (reader := getattr(self, kind)) is not None}

    def for_model(self, model: Mapping[str, Any]) -> Self:
        try:
            config = parse(Model, {**model, "vocab": 1}, "model")  # type: ignore[type-abstract]
        except ConfigError:
            return self  # reported when the model is built
        if not isinstance(config, Interleaved):
            return self
        found: dict[str, Any] = {kind: None for kind in MEDIA}
        for kind in MEDIA:
            given = getattr(self, kind)
            if kind not in config.towers:
                if given is not None:
                    raise ValueError(f"task.{kind}: the model has no tower for {kind}; remove it")
                continue
            tower, embed = config.towers[kind], config.towers[kind].encoder.embed
            tree = ({} if given is None else tree_of(given, full=False)) | {"slots": tower.resampler.slots}
            found[kind] = (_image if kind == "image" else _audio)(tree, embed)
        return self.model_copy(update=found)

    @classmethod
    def defaults_from(cls, start: Path) -> dict[str, Any]:
        task = read_json(start, "config.json", needed=False).get("task", {})
        return {kind: task[kind] for kind in MEDIA if task.get(kind)} if task.get("kind") == "interleaved" else {}

    def specials(self) -> tuple[str, ...]:
        return tuple(mark for kind in self.media for mark in MARKS[kind])

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        return InterleavedEncoding(vocabularies.target, self.media, max_tokens)

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        return InterleavedItems(store, vocabularies.target, self.media)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return token_loss(model.head, hidden, labels, self.smoothing)


def _image(tree: dict[str, Any], embed: Any) -> ImageInput:
    sides = embed.sides
    if "size" not in tree and "crop" not in tree:
        tree |= {"size": list(sides)}
    found = parse(ImageInput, tree | {"channels": embed.channels}, "task.image")
    if found.sides != sides:
        raise ValueError(f"task.image: images of {found.sides[0]}×{found.sides[1]} pixels, the model reads {sides}")
    return found


def _audio(tree: dict[str, Any], embed: Any) -> AudioInput:
    most = None if embed.limit is None else embed.limit * STRIDE * HOP / RATE
    if most is not None:
        tree = {"seconds": most} | tree
        if tree["seconds"] > most:
            raise ValueError(f"task.audio.seconds: {tree['seconds']:g}, the model has positions for {most:g}")
    return parse(AudioInput, tree | {"mels": embed.mels}, "task.audio")


class InterleavedItems(StoredItems):
    """All tokens of a text but the last; the label of each is the next one, where that is learned."""

    def __init__(self, store: Store, tokenizer: Tokenizer, inputs: MediaInputs) -> None:
        super().__init__(store, tokenizer)
        self.inputs = inputs

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self.store["text"].lengths - 1,)

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        columns: list[list[NDArray[Any]]] = [[], [], []]
        for number in members.tolist():
            ids = self.store["text"][number].astype(np.int64)
            labels = np.where(self.store["learned"][number][1:] == 1, ids[1:], IGNORE)
            for column, values in zip(columns, (ids[:-1], labels, self.store["slots"][number][:-1]), strict=True):
                column.append(values)
        inputs, labels, slots = (np.concatenate(column) for column in columns)
        media = {}
        for kind, reader in self.inputs.items():
            stored = np.concatenate([self.store[kind][number] for number in members.tolist()])
            media[kind] = reader.load(stored) if len(stored) else None
        side = FlatSide(inputs, {"slots": slots.astype(np.int64)})
        return FlatBatch((side,), labels, media=Media(**media))

    def show(self, number: int) -> dict[str, str]:
        return {"text": self.tokenizer.decode(self.store["text"][number].tolist(), specials=True)}
