"""How a model reads sounds: samples at 16 kHz, as log-mel frames or as a waveform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from allyouneed.config import Config
from allyouneed.data.media.sound import HOP, RATE, WINDOW, log_mel
from allyouneed.data.media.sound_files import read_samples
from allyouneed.errors import UserError
from allyouneed.nn.batch import Signal

SHORTEST = WINDOW // 2 + 1  # samples of the first frame
FULL = 1 << 15  # a sample of 1, stored
QUIET = 1e-7  # added to the variance of a waveform


class SoundInput(Config):
    """Samples become log-mel frames, or a waveform of mean 0 and variance 1 (as wav2vec 2.0 reads it)."""

    medium: ClassVar[str] = "sound"
    dtype: ClassVar[str] = "<i2"
    mels: Annotated[int, Field(gt=0)] | None = None
    """Mel channels of a frame; null: a waveform."""
    seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """The longest sound."""
    step: Annotated[int, Field(gt=0)] = 2 * HOP
    """Samples of a position of the encoder; set from the model."""
    padded: bool = False
    """Whether every sound is padded with silence to `seconds`."""

    def read(self, sound: Any) -> Tensor:
        """(time,) samples at 16 kHz of a path, the bytes of a file, mono samples, or (samples, rate)."""
        samples = read_samples(sound, self.seconds)
        if len(samples) < SHORTEST:
            raise UserError(f"{len(samples) / RATE:.3f} s of sound: too short")
        return samples

    def stored(self, sound: Any) -> NDArray[np.int16]:
        """The samples as they are stored, in 16 bits."""
        scaled = (self.read(sound) * FULL).round().clamp(-FULL, FULL - 1)
        found: NDArray[np.int16] = scaled.to(torch.int16).numpy()
        return found

    def restored(self, stored: NDArray[np.int16]) -> Any:
        """What is stored, as it is given."""
        return stored, RATE

    def features(self, samples: Tensor) -> Tensor:
        """(mels, time) log-mel frames, or (1, time) samples."""
        if self.mels is not None:
            seconds = self.seconds if self.padded else max(len(samples) // HOP, 2) * HOP / RATE
            return log_mel(samples, self.mels, seconds)
        centred = samples - samples.mean()
        values = centred / (centred.square().mean() + QUIET).sqrt()
        return torch.nn.functional.pad(values, (0, max(0, WINDOW - len(samples))))[None]

    @staticmethod
    def signal(features: Sequence[Tensor]) -> Signal:
        """A batch of sounds, padded with zeros to the longest."""
        lengths = [one.shape[-1] for one in features]
        longest = max(lengths)
        values = torch.stack([torch.nn.functional.pad(one, (0, longest - one.shape[-1])) for one in features])
        return Signal(values, None if min(lengths) == longest else torch.tensor(lengths))
