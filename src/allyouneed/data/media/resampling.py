"""Resampling by a windowed sinc evaluated at the new sample times (Smith and Gossett 1984, "A Flexible Sampling-Rate
Conversion Method").

A sample at time t is Σ x[i] · h(t − i), where h is a low-pass filter below the lower of the two Nyquist frequencies, so
that nothing aliases.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CROSSINGS = 64  # zero crossings of the sinc kept on each side: more is a steeper edge
EDGE = 0.95  # -6 dB point of the filter, as a fraction of the lower Nyquist frequency
STEEPNESS = 10.06  # Kaiser's β for 100 dB stop-band attenuation (Kaiser 1974)
BLOCK = 1 << 22  # values in memory at a time


def resample(samples: Tensor, old: int, new: int) -> Tensor:
    """(time,) at `old` samples per second -> (time,) at `new`; zero-padded at both ends."""
    if old == new or not len(samples):
        return samples
    shared = math.gcd(old, new)
    down, up = old // shared, new // shared  # `up` new samples per `down` old ones, periodically
    count = -(-len(samples) * up // down)
    rounds = -(-count // up)
    weights, reach = _phases(down, up)
    spare = (rounds + 1) * down + weights.shape[1] - len(samples)
    padded = torch.nn.functional.pad(samples.float(), (reach, max(spare, 0)))
    found = torch.empty(rounds, up)
    block = max(1, BLOCK // weights.shape[1])
    for phase in range(up):
        first = phase * down // up
        for begin in range(0, rounds, block):
            here = min(block, rounds - begin)
            taken = padded.as_strided((here, weights.shape[1]), (down, 1), first + begin * down)
            found[begin : begin + here, phase] = taken @ weights[phase]
    return found.flatten()[:count]


def _phases(down: int, up: int) -> tuple[Tensor, int]:
    """(up, taps): filter weights of each of the `up` phases, and how many old samples precede the current one."""
    edge = EDGE * min(1.0, up / down)
    reach = math.ceil(CROSSINGS / edge)
    offset = torch.arange(up, dtype=torch.float64) * down / up
    taps = torch.arange(-reach, reach + 2, dtype=torch.float64)
    apart = taps - (offset - offset.floor())[:, None]
    inside = (1 - (apart / (reach + 1)).square()).clamp(min=0)
    window = torch.special.i0(STEEPNESS * inside.sqrt()) * (inside > 0)
    weights = torch.sinc(edge * apart) * window
    return (weights / weights.sum(1, keepdim=True)).float(), reach  # unit gain at DC
