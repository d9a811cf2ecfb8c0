from __future__ import annotations

import torch
from torch import Generator, Tensor

from allyouneed.lab.probe.task import ProbeTask, drawn
from allyouneed.nn.batch import IGNORE

VALUES, NOISE = 16, 8
MARK, ASK = VALUES + NOISE, VALUES + NOISE + 1


def make(dice: Generator, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Noise with a mark and a value at one place; the value is asked for at the end."""
    tokens = drawn(dice, VALUES, VALUES + NOISE, rows, length)
    places, values = drawn(dice, 0, length - 2, rows, 1), drawn(dice, 0, VALUES, rows, 1)
    tokens = tokens.scatter(1, places, MARK).scatter(1, places + 1, values)
    tokens[:, -1] = ASK
    labels = torch.full_like(tokens, IGNORE)
    labels[:, -1:] = values
    return tokens, labels


TASK = ProbeTask(
    ("needle: one marked value in noise", "大海捞针：噪声中一个带标记的值"),
    "Kamradt 2023, Needle in a Haystack",
    VALUES + NOISE + 2,
    1 / VALUES,
    (16, 48),
    128,
    make,
)
