"""A decoder over texts with images and sounds among their tokens: KOSMOS-1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from allyouneed.config import Config, model_validator
from allyouneed.nn.batch import MEDIA, Batch, Media, Rows, Signal
from allyouneed.nn.common import Common
from allyouneed.nn.cost import Cost
from allyouneed.nn.embed.frames import STRIDE
from allyouneed.nn.models.base import Problem
from allyouneed.nn.models.decoder import DecoderModel, DecoderStack
from allyouneed.nn.models.encoder import Encoder
from allyouneed.nn.models.resampler import Resampler
from allyouneed.nn.observe import observe


class Tower(Config):
    """An encoder of images or sounds, and how its vectors become slots of a text."""

    encoder: Encoder
    """The encoder, with its own width; it needs no head."""
    resampler: Resampler
    """How its vectors become a few of the model's width."""
    normalize: bool = False
    """Divide the encoder's vectors by their lengths first (the authors' code)."""

    @model_validator(mode="before")
    @classmethod
    def _without_head(cls, tree: Any) -> Any:
        """The head of an encoder is that of a text by default."""
        encoder = tree.get("encoder") if isinstance(tree, Mapping) else None
        if not isinstance(encoder, Mapping):
            return tree
        return {**tree, "encoder": {"kind": "encoder", "head": "none", **encoder}}

    def problem(self, slots: int, shape: tuple[int, ...]) -> str:
        """Why an image or a sound of this shape does not fit into `slots` slots; empty if it does."""
        embed: Any = self.encoder.embed
        if slots != self.resampler.slots:
            return f"{slots} slots; the model has {self.resampler.slots}"
        if embed.kind == "patches":
            wanted: tuple[int, ...] = (embed.channels, *embed.sides)
            fits, text = shape == wanted, f"{'×'.join(map(str, wanted))} (channels × height × width)"
        else:
            most = None if embed.limit is None else embed.limit * STRIDE
            fits = len(shape) == 2 and shape[0] == embed.mels and 0 < shape[1] <= (most or shape[1])
            text = f"{embed.mels} mels × {'any number of' if most is None else f'at most {most}'} frames"
        return "" if fits else f"values of {'×'.join(map(str, shape))}; the model reads {text}"

    def problems(self, common: Common) -> Iterator[Problem]:
        if self.encoder.embed.reads is not Signal:
            yield ("encoder", "embed", "kind"), "a tower reads images or sounds: patches or frames"
        if self.encoder.head.kind != "none":  # type: ignore[attr-defined]
            yield ("encoder", "head"), "a tower needs no head; remove it"
        yield from ((("resampler", key), text) for key, text in self.resampler.problems(common))


class Interleaved(DecoderStack):
    """Huang et al. 2023, "Language Is Not All You Need: Aligning Perception with Language Models", 2.2: a text whose
    images and sounds stand among its tokens, each as `slots` vectors from its own encoder and resampler,

        x = [embed(tokens); resample(encode(image)); embed(tokens); …]

    and a causal decoder over all of them. Only tokens are predicted.
    """

    kind: Literal["interleaved"] = "interleaved"
    image: Tower | None = None
    """Encoder and resampler of images; default: none, the model reads no images."""
    audio: Tower | None = None
    """Encoder and resampler of sounds; default: none, the model reads no sounds."""

    @property
    def towers(self) -> dict[str, Tower]:
        """The towers by the kind of medium that they read."""
        return {name: tower for name in MEDIA if (tower := getattr(self, name)) is not None}

    def build(self) -> InterleavedModel:
        return InterleavedModel(self)

    def cost(self, length: int = 1024) -> Cost:
        """FLOPs and state of a token, whether of the text or in a slot; towers add their parameters only."""
        total = super().cost(length)
        for tower in self.towers.values():
            total += Cost(tower.encoder.cost(1).parameters)
            total += tower.resampler.cost(self, tower.encoder.width)
        return total

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if not self.towers:
            yield (), "no tower: set image or audio, or use kind: decoder"
        if self.embed.vector(self) != self.width:
            yield ("embed", "inner"), "slots have the model's width; remove it"
        for name, tower in self.towers.items():
            yield from (((name, *path), text) for path, text in tower.problems(self))
            wanted = "patches" if name == "image" else "frames"
            embed: Any = tower.encoder.embed
            if embed.reads is Signal and embed.kind != wanted:
                yield (name, "encoder", "embed", "kind"), f"expected {wanted}, which reads {name}"


class InterleavedModel(DecoderModel):
    """The source of a batch is its `Media`; `Rows.slots` of the target tells where they stand."""

    config: Interleaved
    may_skip_parameters = True  # texts without images do not use their tower

    steps_by_stack: ClassVar[bool] = True

    def __init__(self, config: Interleaved) -> None:
        super().__init__(config)
        self.towers = nn.ModuleDict({name: TowerModule(tower, config) for name, tower in config.towers.items()})

    def encode_media(self, name: str, values: Tensor) -> Tensor:
        """Images (count, channels, height, width) or log-mel frames (count, mels, time) -> (count, slots, width)"""
        vectors: Tensor = self.towers[name](values.to(self.embed.tokens.weight.dtype))
        return observe(self, f"{name}.slots", vectors)

    def fill_slots(self, rows: Rows, media: Media | None) -> Rows:
        """The same rows with the vectors of their slots, given all images and sounds in the order of the slots."""
        if rows.slots is None or rows.vectors is not None:
            return rows
        weight = self.embed.tokens.weight
        vectors = weight.new_zeros(*rows.tokens.shape, self.config.width)
        for number, name in enumerate(MEDIA, start=1):
            given = None if media is None else getattr(media, name)
            mask = rows.slots == number
            if given is None or not len(given):
                if mask.device.type == "cpu" and bool(mask.any()):
                    raise ValueError(f"the batch has slots of {name}, but no {name}")
                continue
            slots = self.encode_media(name, given)
            if mask.device.type == "cpu" and int(mask.sum()) != len(slots) * slots.shape[1]:
                each = f"{len(slots)} {name} with {slots.shape[1]} slots each"
                raise ValueError(f"the batch has {int(mask.sum())} slots, but {each}")
            vectors = vectors.masked_scatter(mask[..., None], slots.to(vectors.dtype))
        return replace(rows, vectors=vectors)

    def rows(self, batch: Batch) -> Rows:
        assert batch.source is None or isinstance(batch.source, Media), "the source of this model must be Media"
        return self.fill_slots(batch.rows, batch.source)


class TowerModule(nn.Module):
    def __init__(self, config: Tower, common: Common) -> None:
        super().__init__()
        self.encoder = config.encoder.build()
        self.resampler = config.resampler.build(common, config.encoder.width)
        common.init.start(self.resampler, common.width)
        self.normalize = config.normalize

    def forward(self, values: Tensor) -> Tensor:
        """(count, slots, width)"""
        hidden = self.encoder.encode(Signal(values)).hidden  # (count, time, width of the encoder)
        hidden = nn.functional.normalize(hidden, dim=-1) if self.normalize else hidden
        return self.resampler(hidden)


def slot_vectors(model: Any, media: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
    """The vectors (slots, width) of each medium, given as its kind and its values; those of one kind and size are
    encoded together."""
    groups: dict[tuple[str, torch.Size], list[int]] = {}
    for number, (kind, values) in enumerate(media):
        groups.setdefault((kind, values.shape), []).append(number)
    found: dict[int, Tensor] = {}
    for (kind, _), numbers in groups.items():
        values = torch.stack([media[n][1] for n in numbers]).to(model.embed.tokens.weight.device)
        found |= dict(zip(numbers, model.encode_media(kind, values), strict=True))
    return [found[n] for n in range(len(media))]
