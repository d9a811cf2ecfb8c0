"""Which text belongs to an image: both as vectors in one space (CLIP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allyouneed.errors import UserError
from allyouneed.evaluate.answers import accuracy
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import Judged, Predictor, checked, in_batches, spread
from allyouneed.infer.predictors.image_classifier import Image, pixels_of, read_images
from allyouneed.nn.batch import Signal


@dataclass(frozen=True)
class ImageMatch:
    """The text that fits an image best; how likely each text is among those given, likeliest first; and the cosine of
    each with the image, which does not depend on the other texts."""

    text: str
    scores: dict[str, float]
    cosines: dict[str, float]


class ImageMatcher(Predictor):
    """Tells which of some texts fits an image best."""

    def match_image(self, images: Image | list[Image], texts: Sequence[str]) -> Any:
        """The text that fits an image best, or each image of a list."""
        many = images if isinstance(images, list) else [images]
        found = [full.text for full in self.match_image_full(many, texts)]
        return found if isinstance(images, list) else found[0]

    def match_image_full(self, images: Sequence[Image], texts: Sequence[str]) -> list[ImageMatch]:
        """The same with chances and cosines."""
        if not isinstance(images, list | tuple):
            raise UserError("match_image_full takes a list of images; write [image] for a single one")
        texts = list(dict.fromkeys(checked(texts, "match_image")))
        if not texts:
            raise UserError("match_image needs texts to choose from")
        if not images:
            return []
        cosines = self.embed_images(images) @ self.embed_texts(texts).T
        chances = (float(self.model.scale.detach()) * cosines).softmax(-1)
        found = []
        for row, near in zip(chances.tolist(), cosines.tolist(), strict=True):
            order = sorted(range(len(texts)), key=lambda n: -row[n])
            scores, alike = ({texts[n]: values[n] for n in order} for values in (row, near))
            found.append(ImageMatch(texts[order[0]], scores, alike))
        return found

    def embed_images(self, images: Sequence[Image]) -> Tensor:
        """(images, width), each of length 1."""
        reader = pixels_of(self.folder)
        kind = next(self.model.parameters()).dtype

        def answer(batch: list[int]) -> list[Tensor]:
            given = Signal(read_images(reader, [images[n] for n in batch]).to(self.device, kind))
            return list(self.model.vectors("image", given).float().cpu())

        places = self.model.config.image.embed.token_count
        return self._stacked(in_batches(self.model, [places] * len(images), answer))

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """(texts, width), each of length 1. Texts that are longer than the model can place are read up to there."""
        framed = [self.beginning(text) for text in checked(texts, "embed_texts")]

        def answer(batch: list[int]) -> list[Tensor]:
            return list(self.model.vectors("text", self.given([framed[n] for n in batch])).float().cpu())

        return self._stacked(in_batches(self.model, [len(row[0]) for row in framed], answer))

    def _stacked(self, vectors: list[Tensor]) -> Tensor:
        return torch.stack(vectors) if vectors else torch.zeros(0, self.model.config.width)

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> Judged:
        """Examples of `texts`: an image file and its text, which is looked for among those of all examples."""
        expected = [example.texts[1] for example in examples]
        found = self.match_image([example.texts[0] for example in examples], expected)
        figure = accuracy(found, expected)
        samples = [
            {"image": str(example.texts[0]), "expected": example.texts[1], "found": text}
            for example, text in spread(list(zip(examples, found, strict=True)), show)
        ]
        return Judged({"accuracy": figure}, f"accuracy {figure:5.1f} %  of {len(found)} images", samples)
