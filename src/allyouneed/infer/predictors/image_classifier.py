"""Image classification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allyouneed.config import parse
from allyouneed.data.batches.encoding import Dropped
from allyouneed.data.batches.images import ImageEncoding, read_all
from allyouneed.data.files.images import LabelledImage
from allyouneed.data.media.image import Pixels
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import EvaluationResult, Predictor, evenly_spaced, run_in_batches, to_list
from allyouneed.metrics.answers import accuracy, confusion, confusion_text, macro_f1
from allyouneed.nn.batch import Batch, Signal

Image = Any  # a path, a PIL image, or pixels (height, width, channels) of 0 to 255
TOP = 5


@dataclass(frozen=True)
class ImageClass:
    """The class of an image, and the probabilities of the best classes, most likely first."""

    label: str
    scores: dict[str, float]


class ImageClassifier(Predictor):
    """Classifies images."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder)
        self.tokens = self.model.config.embed.token_count  # of an image

    @property
    def labels(self) -> list[str]:
        return list(self.folder.labels)

    def classify_image(self, images: Image | list[Image]) -> Any:
        """The class of an image, or of each image of a list."""
        many = images if isinstance(images, list) else [images]
        found = [full.label for full in self.classify_image_full(many, top=1)]
        return found if isinstance(images, list) else found[0]

    def classify_image_full(self, images: Sequence[Image], top: int = TOP) -> list[ImageClass]:
        """The same with the probabilities of the `top` classes."""
        if not isinstance(images, list | tuple):
            raise UserError("classify_image_full takes a list of images; use [image] for a single one")
        if top < 1:
            raise UserError(f"top={top}: must be at least 1")
        if not self.labels:
            raise UserError(f"{self.folder.path}: this model has no classification head")
        reader = pixels_of(self.folder)

        def answer(batch: list[int]) -> list[list[float]]:
            given = Signal(read_images(reader, [images[n] for n in batch])).to(self.device)
            given = given.each(lambda values: values.to(next(self.model.parameters()).dtype))
            return to_list(self.model.logits(Batch(given)).float().softmax(-1))

        found = []
        for scores in run_in_batches(self.model, [self.tokens] * len(images), answer):
            best = sorted(zip(self.labels, scores, strict=True), key=lambda both: -both[1])[:top]
            found.append(ImageClass(best[0][0], dict(best)))
        return found

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        """Labelled images; those that cannot be read are left out and noted."""
        examples, answers, notes = for_readable(
            examples, pixels_of(self.folder), lambda some: self.classify_image_full([one.image for one in some])
        )
        found = [answer.label for answer in answers]
        expected = [example.label for example in examples]
        best = [right if right in answer.scores else "" for answer, right in zip(answers, expected, strict=True)]
        figures = {"accuracy": accuracy(found, expected)}
        if len(self.labels) > TOP:
            figures["top-5"] = accuracy(best, expected)
        figures["macro-f1"] = macro_f1(found, expected)
        lines = [f"{name:<8} {value:5.1f} %  of {len(found):,} images" for name, value in figures.items()]
        lines.append(confusion_text(confusion(found, expected, self.labels), self.labels))
        samples = [
            {"image": example.name, "expected": example.label, "found": label}
            for example, label in evenly_spaced(list(zip(examples, found, strict=True)), show)
        ]
        return EvaluationResult(figures, "\n".join(lines), samples, notes)


def for_readable(
    examples: Sequence[LabelledImage], reader: Pixels, answer: Callable[[list[LabelledImage]], list[Any]]
) -> tuple[list[LabelledImage], list[Any], list[str]]:
    """The examples whose image can be read, the answers for them, some at a time, and a note on the others."""
    kept, answers, wrong = list[LabelledImage](), list[Any](), list[str]()
    for start in range(0, len(examples), ImageEncoding.most):
        some = examples[start : start + ImageEncoding.most]
        read = zip(some, read_all(reader, some), strict=True)
        found = [(one, one._replace(image=pixels)) for one, pixels in read if not isinstance(pixels, Dropped)]
        wrong += [one.name for one in some if not any(one is other for other, _ in found)]
        kept += [one for one, _ in found]
        answers += answer([one for _, one in found])
    if not kept:
        raise UserError(f"none of the {len(examples):,} images can be read")
    return kept, answers, [f"{len(wrong):,} unreadable images left out: {', '.join(wrong[:3])}"] if wrong else []


def pixels_of(folder: Folder) -> Pixels:
    """How the folder's model reads images: size, normalization."""
    settings = folder.task.get("image", {})
    if "lacks" in settings:
        raise UserError(f"{folder.path}: {settings['lacks']}; give it pixels: model.logits(pixels=…)")
    return parse(Pixels, settings, f"{folder.path}: task.image")


def read_images(reader: Pixels, images: Sequence[Image]) -> Tensor:
    """(images, channels, height, width)"""
    return torch.stack([reader.read(image) for image in images])
