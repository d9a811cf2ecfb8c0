"""Sound as log-mel frames, as Whisper hears it (Radford et al. 2022, 2.2): 25 ms windows every 10 ms.

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
BLOCK = 6_000  # frames made at a time: a minute
RANGE = 8.0  # powers of ten below the loudest moment that are told apart


def log_mel(samples: Tensor, mels: int = 80, seconds: float | None = None, rate: int = RATE) -> Tensor:
    """(…, samples) -> (…, mels, time), a frame every 10 ms. `seconds` pads with silence or cuts to this length."""
    if rate != RATE:
        raise UserError(f"sound at {rate:,} samples a second: it must be {RATE:,}; resample it first")
    if not samples.is_floating_point():
        raise UserError(f"sound as {samples.dtype}: samples must be numbers between -1 and 1; divide by their maximum")
    samples = samples.float()
    if seconds is not None:
        wanted = round(seconds * RATE)
        samples = torch.nn.functional.pad(samples[..., :wanted], (0, max(0, wanted - samples.shape[-1])))
    if samples.shape[-1] <= WINDOW // 2:
        raise UserError(f"sound of {samples.shape[-1]} samples is too short: {WINDOW // 2 + 1} make the first frame")
    flat = samples.reshape(-1, samples.shape[-1])
    edges = torch.nn.functional.pad(flat[:, None], (WINDOW // 2, WINDOW // 2), mode="reflect")[:, 0]
    count = samples.shape[-1] // HOP
    heard = torch.empty(len(flat), mels, count, device=samples.device)
    for begin in range(0, count, BLOCK):  # an hour's waves at once would be half a gigabyte
        end = min(begin + BLOCK, count)
        heard[:, :, begin:end] = _loudness(edges[:, begin * HOP : (end - 1) * HOP + WINDOW], mels)
    loudest = heard.amax((-2, -1), keepdim=True)
    return ((heard.maximum(loudest - RANGE) + 4) / 4).view(*samples.shape[:-1], mels, -1)


def _loudness(samples: Tensor, mels: int) -> Tensor:
    """(sounds, mels, time): powers of ten, of the windows that lie in the samples."""
    window = torch.hann_window(WINDOW, device=samples.device)
    waves = torch.stft(samples, WINDOW, HOP, window=window, center=False, return_complex=True)  # (sounds, 201, time)
    power = (waves.real.square() + waves.imag.square()).contiguous()
    return (mel_filters(mels).to(samples.device) @ power).clamp(min=QUIETEST).log10()


@functools.cache
def mel_filters(mels: int) -> Tensor:
    """(mels, frequencies): triangles evenly spaced on Slaney's mel scale, each of area 1 (Slaney 1998, "Auditory
    Toolbox", as librosa has them)."""
    frequencies = torch.linspace(0, RATE / 2, WINDOW // 2 + 1, dtype=torch.float64)
    corners = _hertz(torch.linspace(0, _mel(RATE / 2), mels + 2, dtype=torch.float64))
    rising = (frequencies - corners[:-2, None]) / (corners[1:-1] - corners[:-2])[:, None]
    falling = (corners[2:, None] - frequencies) / (corners[2:] - corners[1:-1])[:, None]
    triangles = rising.minimum(falling).clamp(min=0)
    return (triangles * (2 / (corners[2:] - corners[:-2]))[:, None]).float()


# Slaney's scale: linear below 1000 Hz (15 mels), above it 27 mels for each factor of 6.4
KNEE, KNEE_MELS, FACTOR, FACTOR_MELS = 1000.0, 15.0, 6.4, 27.0


def _mel(hertz: float) -> float:
    """Of a frequency above the knee."""
    return KNEE_MELS + FACTOR_MELS * math.log(hertz / KNEE, FACTOR)


def _hertz(mel: Tensor) -> Tensor:
    return torch.where(mel < KNEE_MELS, mel * KNEE / KNEE_MELS, KNEE * FACTOR ** ((mel - KNEE_MELS) / FACTOR_MELS))
