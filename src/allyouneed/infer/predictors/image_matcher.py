"""Matching images and texts by their embeddings in one space (CLIP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import EvaluationResult, Predictor, check_texts, evenly_spaced, run_in_batches
from allyouneed.infer.predictors.image_classifier import Image, for_readable, pixels_of, read_images
from allyouneed.metrics.answers import recall_at_1
from allyouneed.nn.batch import Signal


@dataclass(frozen=True)
class ImageMatch:
    """The best text for an image; the probability of each given text, most likely first; and its cosine similarity
    with the image, which does not depend on the other texts."""

    text: str
    scores: dict[str, float]
    cosines: dict[str, float]


class ImageMatcher(Predictor):
    """Matches images with texts."""

    def match_image(self, images: Image | list[Image], texts: Sequence[str]) -> Any:
        """The best text for an image, or for each image of a list."""
        many = images if isinstance(images, list) else [images]
        found = [full.text for full in self.match_image_full(many, texts)]
        return found if isinstance(images, list) else found[0]

    def match_image_full(self, images: Sequence[Image], texts: Sequence[str]) -> list[ImageMatch]:
        """The same with probabilities and cosine similarities."""
        if not isinstance(images, list | tuple):
            raise UserError("match_image_full takes a list of images; use [image] for a single one")
        texts = list(dict.fromkeys(check_texts(texts, "match_image")))
        if not texts:
            raise UserError("match_image requires texts")
        if not images:
            return []
        cosines = self.embed_images(images) @ self.embed_texts(texts).T
        probabilities = (float(self.model.scale.detach()) * cosines).softmax(-1)
        found = []
        for row, similar in zip(probabilities.tolist(), cosines.tolist(), strict=True):
            order = sorted(range(len(texts)), key=lambda n: -row[n])
            scores, by_text = ({texts[n]: values[n] for n in order} for values in (row, similar))
            found.append(ImageMatch(texts[order[0]], scores, by_text))
        return found

    def embed_images(self, images: Sequence[Image]) -> Tensor:
        """(images, width), unit vectors."""
        reader = pixels_of(self.folder)
        dtype = next(self.model.parameters()).dtype

        def answer(batch: list[int]) -> list[Tensor]:
            given = Signal(read_images(reader, [images[n] for n in batch]).to(self.device, dtype))
            return list(self.model.vectors("image", given).float().cpu())

        tokens = self.model.config.image.embed.token_count
        return self._stack(run_in_batches(self.model, [tokens] * len(images), answer))

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """(texts, width), unit vectors. Texts longer than the model's limit are truncated."""
        framed = [self.encode_truncated(text) for text in check_texts(texts, "embed_texts")]

        def answer(batch: list[int]) -> list[Tensor]:
            return list(self.model.vectors("text", self.to_rows([framed[n] for n in batch])).float().cpu())

        return self._stack(run_in_batches(self.model, [len(row[0]) for row in framed], answer))

    def _stack(self, vectors: list[Tensor]) -> Tensor:
        return torch.stack(vectors) if vectors else torch.zeros(0, self.model.config.width)

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        """Images with texts, each ranked among those of all examples; equal texts are one."""
        examples, vectors, notes = for_readable(
            examples, pixels_of(self.folder), lambda some: list(self.embed_images([one.content for one in some]))
        )
        texts = list(dict.fromkeys(example.value for example in examples))
        own = np.array([texts.index(example.value) for example in examples])
        cosines = (torch.stack(vectors) @ self.embed_texts(texts).T).double().numpy()  # (images, texts)
        ways = {
            "image to text": recall_at_1(cosines, own),
            "text to image": 100 * float(np.mean(own[cosines.argmax(0)] == np.arange(len(texts)))),
        }
        figures = {"recall@1": sum(ways.values()) / 2, **ways}
        text = "\n".join(f"{name:<14} {value:5.1f} %" for name, value in figures.items())
        text += f"  of {len(examples):,} images and {len(texts):,} texts"
        found = [texts[n] for n in cosines.argmax(1)]
        samples = [
            {"image": example.name, "expected": example.value, "found": best}
            for example, best in evenly_spaced(list(zip(examples, found, strict=True)), show)
        ]
        return EvaluationResult(
            figures, f"{text}  of {len(examples):,} images and {len(texts):,} texts", samples, notes
        )
