from __future__ import annotations

import torch
from torch import Generator, Tensor

from allyouneed.lab.probe.task import ProbeTask, distinct, shifted

NUMBERS = 32


def make(dice: Generator, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Different numbers, a separator, the numbers in order."""
    numbers = distinct(dice, NUMBERS, rows, length)
    return shifted(torch.cat((numbers, torch.full((rows, 1), NUMBERS)), 1), numbers.sort(1).values)


TASK = ProbeTask(
    ("sorting of different numbers", "排序：互不相同的数"),
    "Kazemnejad et al. 2023, The Impact of Positional Encoding on Length Generalization, 3",
    NUMBERS + 1,
    1 / NUMBERS,
    (4, 10),
    20,
    make,
)
