"""Sound at another rate: a windowed sinc, evaluated where the new samples lie (Smith and Gossett 1984, "A Flexible
Sampling-Rate Conversion Method").

A sample at time t is Σ x[i] · h(t − i): h lets pass what both rates can say and nothing above, so that no tone comes
back as another one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CROSSINGS = 64  # of the sinc on each side that the window leaves: more is a steeper edge
EDGE = 0.95  # where the filter is half as high, as a share of the highest tone the lower rate can say
STEEPNESS = 10.06  # Kaiser's β for what is to be silent to come out 100 dB lower (Kaiser 1974)
BLOCK = 1 << 22  # numbers held at a time


def resample(samples: Tensor, old: int, new: int) -> Tensor:
    """(time,) at `old` samples a second -> (time,) at `new`; what lies before and behind the sound is silence."""
    if old == new or not len(samples):
        return samples
    shared = math.gcd(old, new)
    down, up = old // shared, new // shared  # every `up` new samples take `down` old ones, and then all repeats
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
    """(up, taps): what each of the `up` new samples is made of, and how many old ones before its own place."""
    edge = EDGE * min(1.0, up / down)
    reach = math.ceil(CROSSINGS / edge)
    place = torch.arange(up, dtype=torch.float64) * down / up
    taps = torch.arange(-reach, reach + 2, dtype=torch.float64)
    apart = taps - (place - place.floor())[:, None]
    inside = (1 - (apart / (reach + 1)).square()).clamp(min=0)
    window = torch.special.i0(STEEPNESS * inside.sqrt()) * (inside > 0)
    weights = torch.sinc(edge * apart) * window
    return (weights / weights.sum(1, keepdim=True)).float(), reach  # a steady sound stays what it is
