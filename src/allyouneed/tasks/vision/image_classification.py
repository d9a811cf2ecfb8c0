"""Classify an image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from allyouneed.data.files.images import ImageFiles
from allyouneed.data.files.readers import Files
from allyouneed.tasks.media import MediaClassification
from allyouneed.tasks.vision.images import ImageTask


class ImageClassification(ImageTask, MediaClassification):
    """Cross-entropy of the classes (Dosovitskiy et al. 2021, 3.1), with label smoothing (Szegedy et al. 2016, 7) and
    the probabilities of mixed images."""

    files: ClassVar[type[Files]] = ImageFiles
    reads: ClassVar[Mapping[str, str]] = {"embed": "images"}
    loss_unit: ClassVar[str] = "images"
    metrics: ClassVar[dict[str, bool]] = {"accuracy": True, "top-5": True, "macro-f1": True, "loss": False}
    kind: Literal["image-classification"] = "image-classification"
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing."""
