"""Classification of sounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from allyouneed.config import parse
from allyouneed.data.media.sound_input import SoundInput
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.predictors.base import run_in_batches, to_list
from allyouneed.infer.predictors.image_classifier import TOP, MediaClassifier
from allyouneed.nn.batch import Batch, Signal

Sound = Any  # a path, bytes of a file, samples at 16 kHz, or (samples, rate)
TOGETHER = 64  # sounds read at a time


@dataclass(frozen=True)
class SoundClass:
    """The class of a sound, and the probabilities of the best classes, most likely first."""

    label: str
    scores: dict[str, float]


class AudioClassifier(MediaClassifier):
    """Classifies sounds."""

    answer: ClassVar[type] = SoundClass
    noun: ClassVar[str] = "sound"

    @property
    def reader(self) -> SoundInput:
        return sound_input(self.folder)

    def classify_audio(self, sounds: Sound | list[Sound]) -> Any:
        """The class of a sound, or of each sound of a list."""
        many = sounds if isinstance(sounds, list) else [sounds]
        found = [full.label for full in self.classify_audio_full(many, top=1)]
        return found if isinstance(sounds, list) else found[0]

    def classify_audio_full(self, sounds: Sequence[Sound], top: int = TOP) -> list[SoundClass]:
        """The same with the probabilities of the `top` classes."""
        if not isinstance(sounds, list | tuple):
            raise UserError("classify_audio_full takes a list of sounds; use [sound] for a single one")
        found: list[SoundClass] = self.classes(sounds, top)
        return found

    def scores(self, contents: Sequence[Any]) -> list[list[float]]:
        found: list[list[float]] = []
        for start in range(0, len(contents), TOGETHER):
            reader = self.reader
            features = [reader.features(reader.read(one)) for one in contents[start : start + TOGETHER]]
            found += self._of_features(features)
        return found

    def _of_features(self, features: list[Tensor]) -> list[list[float]]:
        dtype, config = next(self.model.parameters()).dtype, self.model.config.embed

        def answer(batch: list[int]) -> list[list[float]]:
            made = SoundInput.signal([features[n] for n in batch]).to(self.device)
            given = Signal(made.values.to(dtype), made.lengths)
            return to_list(self.model.logits(Batch(given)).float().softmax(-1))

        return run_in_batches(self.model, [config.positions_of(one.shape[-1]) for one in features], answer)


def sound_input(folder: Folder) -> SoundInput:
    """How the folder's model reads sounds."""
    settings = folder.task.get("sound") or {}
    return parse(SoundInput, settings, f"{folder.path}: task.sound")
