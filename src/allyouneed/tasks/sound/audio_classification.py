"""Classify a sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from allyouneed.data.files.readers import Files
from allyouneed.data.files.sounds import SoundFiles
from allyouneed.tasks.media import MediaClassification
from allyouneed.tasks.sound.sounds import SoundTask


class AudioClassification(SoundTask, MediaClassification):
    """Cross-entropy of the classes, with label smoothing (Szegedy et al. 2016, 7): an encoder of frames whose outputs
    are pooled (as Gong et al. 2021, "AST: Audio Spectrogram Transformer", 2.1, of patches)."""

    files: ClassVar[type[Files]] = SoundFiles
    reads: ClassVar[Mapping[str, str]] = {"embed": "audio"}
    loss_unit: ClassVar[str] = "sounds"
    metrics: ClassVar[dict[str, bool]] = {"accuracy": True, "top-5": True, "macro-f1": True, "loss": False}
    kind: Literal["audio-classification"] = "audio-classification"
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing."""
