"""Classification of images; what it shares with that of sounds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from allyouneed.config import parse
from allyouneed.data.batches.encoding import Dropped
from allyouneed.data.batches.media import MediaEncoding, read_all
from allyouneed.data.files.media import LabelledMedium
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


class MediaClassifier(Predictor):
    """Classifies images or sounds. `answer`: the class of a result."""

    answer: ClassVar[type]
    noun: ClassVar[str]

    @property
    def labels(self) -> list[str]:
        return list(self.folder.labels)

    @property
    @abstractmethod
    def reader(self) -> Any:
        """How images or sounds are read."""

    @abstractmethod
    def scores(self, contents: Sequence[Any]) -> list[list[float]]:
        """The probabilities of all classes."""

    def classes(self, contents: Sequence[Any], top: int) -> list[Any]:
        """The class of each, with the probabilities of the `top` classes."""
        if top < 1:
            raise UserError(f"top={top}: must be at least 1")
        if not self.labels:
            raise UserError(f"{self.folder.path}: this model has no classification head")
        found = []
        for scores in self.scores(contents):
            best = sorted(zip(self.labels, scores, strict=True), key=lambda both: -both[1])[:top]
            found.append(self.answer(best[0][0], dict(best)))
        return found

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        """Labelled examples; those that cannot be read are left out and noted."""
        examples, answers, notes = for_readable(
            examples, self.reader, lambda some: self.classes([one.content for one in some], TOP)
        )
        found = [answer.label for answer in answers]
        expected = [example.label for example in examples]
        best = [right if right in answer.scores else "" for answer, right in zip(answers, expected, strict=True)]
        figures = {"accuracy": accuracy(found, expected)}
        if len(self.labels) > TOP:
            figures["top-5"] = accuracy(best, expected)
        figures["macro-f1"] = macro_f1(found, expected)
        lines = [f"{name:<8} {value:5.1f} %  of {len(found):,} {self.noun}s" for name, value in figures.items()]
        lines.append(confusion_text(confusion(found, expected, self.labels), self.labels))
        samples = [
            {self.noun: example.name, "expected": example.label, "found": label}
            for example, label in evenly_spaced(list(zip(examples, found, strict=True)), show)
        ]
        return EvaluationResult(figures, "\n".join(lines), samples, notes)


class ImageClassifier(MediaClassifier):
    """Classifies images."""

    answer: ClassVar[type] = ImageClass
    noun: ClassVar[str] = "image"

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder)
        self.tokens = self.model.config.embed.token_count  # of an image

    @property
    def reader(self) -> Pixels:
        return pixels_of(self.folder)

    def classify_image(self, images: Image | list[Image]) -> Any:
        """The class of an image, or of each image of a list."""
        many = images if isinstance(images, list) else [images]
        found = [full.label for full in self.classify_image_full(many, top=1)]
        return found if isinstance(images, list) else found[0]

    def classify_image_full(self, images: Sequence[Image], top: int = TOP) -> list[ImageClass]:
        """The same with the probabilities of the `top` classes."""
        if not isinstance(images, list | tuple):
            raise UserError("classify_image_full takes a list of images; use [image] for a single one")
        found: list[ImageClass] = self.classes(images, top)
        return found

    def scores(self, contents: Sequence[Any]) -> list[list[float]]:
        reader = self.reader

        def answer(batch: list[int]) -> list[list[float]]:
            given = Signal(read_images(reader, [contents[n] for n in batch])).to(self.device)
            given = given.each(lambda values: values.to(next(self.model.parameters()).dtype))
            return to_list(self.model.logits(Batch(given)).float().softmax(-1))

        return run_in_batches(self.model, [self.tokens] * len(contents), answer)


def for_readable(
    examples: Sequence[LabelledMedium], reader: Any, answer: Callable[[list[LabelledMedium]], list[Any]]
) -> tuple[list[LabelledMedium], list[Any], list[str]]:
    """The examples whose image or sound can be read, the answers for them, some at a time, and a note on the others."""
    kept, answers, wrong = list[LabelledMedium](), list[Any](), list[str]()
    for start in range(0, len(examples), MediaEncoding.most):
        some = examples[start : start + MediaEncoding.most]
        read = zip(some, read_all(reader, some), strict=True)
        found = [
            (one, one._replace(content=reader.restored(values)))
            for one, values in read
            if not isinstance(values, Dropped)
        ]
        wrong += [one.name for one in some if not any(one is other for other, _ in found)]
        kept += [one for one, _ in found]
        answers += answer([one for _, one in found])
    if not kept:
        raise UserError(f"none of the {len(examples):,} {reader.medium}s can be read")
    return (
        kept,
        answers,
        [f"{len(wrong):,} unreadable {reader.medium}s left out: {', '.join(wrong[:3])}"] if wrong else [],
    )


def pixels_of(folder: Folder) -> Pixels:
    """How the folder's model reads images: size, normalization."""
    settings = folder.task.get("image", {})
    if "lacks" in settings:
        raise UserError(f"{folder.path}: {settings['lacks']}; give it pixels: model.logits(pixels=…)")
    return parse(Pixels, settings, f"{folder.path}: task.image")


def read_images(reader: Pixels, images: Sequence[Image]) -> Tensor:
    """(images, channels, height, width)"""
    return torch.stack([reader.read(image) for image in images])
