"""What tasks with sounds share: how sounds are read and augmented."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator

from allyouneed.config import parse, tree_of
from allyouneed.data.batches.media import StoredMedia, StoredSounds
from allyouneed.data.media.augment_sound import SoundAugment, SpecAugment
from allyouneed.data.media.sound import HOP
from allyouneed.data.media.sound_input import SoundInput
from allyouneed.tasks.media import MediaTask

SoundAugments = Annotated[
    tuple[SoundAugment, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str | dict) else value)
]


class SoundTask(MediaTask):
    """A task whose models read sounds, one for each example."""

    medium: ClassVar[str] = "sound"
    media: ClassVar[type[StoredMedia]] = StoredSounds
    usual_rows: ClassVar[int] = 32
    near: ClassVar[int] = 8
    sound: SoundInput | None = None
    """How sounds are read; default: as the model does, up to 30 seconds; longer ones are left out of training."""
    augment: SoundAugments = ()
    """Random changes of training sounds: speed, shift, gain, noise, spec-augment."""

    def input_for(self, embed: Any) -> SoundInput | None:
        if embed.medium != "audio":
            return None
        mels: int | None = getattr(embed, "mels", None)
        if mels is None and any(isinstance(one, SpecAugment) for one in self.augment):
            raise ValueError("task.augment: spec-augment masks log-mel frames, and this model reads samples")
        given = {} if self.sound is None else tree_of(self.sound, full=False)
        if given.get("mels", mels) != mels:
            raise ValueError(f"task.sound.mels: {given['mels']}, the model reads {mels or 'samples'}")
        return parse(SoundInput, given | {"mels": mels, "step": embed.step * (HOP if mels else 1)}, "task.sound")
