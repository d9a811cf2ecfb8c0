"""Log-mel spectrogram as in Whisper (Radford et al. 2022, 2.2): 25 ms windows every 10 ms.

frames = log_mel(samples)      # mono, 16,000 a second, between -1 and 1 -> (mels, time)
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from allyouneed.errors import UserError

RATE = 16_000
WINDOW = 400
HOP = 160
QUIETEST = 1e-10
BLOCK = 6_000  # frames computed at a time: a minute
RANGE = 8.0  # dynamic range in powers of ten


def log_mel(samples: Tensor, mels: int = 80, seconds: float | None = None, rate: int = RATE) -> Tensor:
    """(…, samples) -> (…, mels, time), a frame every 10 ms. `seconds`: pad with silence or truncate to this length."""
    if rate != RATE:
        raise UserError(f"sound at {rate:,} samples per second; expected {RATE:,}, resample it first")
    if not samples.is_floating_point():
        raise UserError(f"sound as {samples.dtype}; expected floats between -1 and 1, divide by the maximum")
    samples = samples.float()
    if seconds is not None:
        wanted = round(seconds * RATE)
        samples = torch.nn.functional.pad(samples[..., :wanted], (0, max(0, wanted - samples.shape[-1])))
    if samples.shape[-1] <= WINDOW // 2:
        raise UserError(f"sound of {samples.shape[-1]} samples is too short; the first frame needs {WINDOW // 2 + 1}")
    flat = samples.reshape(-1, samples.shape[-1])
    edges = torch.nn.functional.pad(flat[:, None], (WINDOW // 2, WINDOW // 2), mode="reflect")[:, 0]
    count = samples.shape[-1] // HOP
    mel = torch.empty(len(flat), mels, count, device=samples.device)
    for begin in range(0, count, BLOCK):  # an hour's spectrogram at once would take half a gigabyte
        end = min(begin + BLOCK, count)
        mel[:, :, begin:end] = _log_power(edges[:, begin * HOP : (end - 1) * HOP + WINDOW], mels)
    loudest = mel.amax((-2, -1), keepdim=True)
    return ((mel.maximum(loudest - RANGE) + 4) / 4).view(*samples.shape[:-1], mels, -1)


def _log_power(samples: Tensor, mels: int) -> Tensor:
    """log10 of the mel power of all windows: (sounds, mels, time)."""
    window = torch.hann_window(WINDOW, device=samples.device)
    waves = torch.stft(samples, WINDOW, HOP, window=window, center=False, return_complex=True)  # (sounds, 201, time)
    power = (waves.real.square() + waves.imag.square()).contiguous()
    return (mel_filters(mels).to(samples.device) @ power).clamp(min=QUIETEST).log10()


@functools.cache
def mel_filters(mels: int) -> Tensor:
    """(mels, frequencies): triangular filters evenly spaced on Slaney's mel scale, each of area 1 (Slaney 1998,
    "Auditory Toolbox"; the same as librosa's)."""
    frequencies = torch.linspace(0, RATE / 2, WINDOW // 2 + 1, dtype=torch.float64)
    corners = _hertz(torch.linspace(0, _mel(RATE / 2), mels + 2, dtype=torch.float64))
    rising = (frequencies - corners[:-2, None]) / (corners[1:-1] - corners[:-2])[:, None]
    falling = (corners[2:, None] - frequencies) / (corners[2:] - corners[1:-1])[:, None]
    triangles = rising.minimum(falling).clamp(min=0)
    return (triangles * (2 / (corners[2:] - corners[:-2]))[:, None]).float()


# Slaney's scale: linear below 1000 Hz (15 mels), above it 27 mels for each factor of 6.4
KNEE, KNEE_MELS, FACTOR, FACTOR_MELS = 1000.0, 15.0, 6.4, 27.0


def _mel(hertz: float) -> float:
    """The mel value of a frequency above the knee."""
    return KNEE_MELS + FACTOR_MELS * math.log(hertz / KNEE, FACTOR)


def _hertz(mel: Tensor) -> Tensor:
    return torch.where(mel < KNEE_MELS, mel * KNEE / KNEE_MELS, KNEE * FACTOR ** ((mel - KNEE_MELS) / FACTOR_MELS))
