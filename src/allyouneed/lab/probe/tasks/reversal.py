from __future__ import annotations

import torch
from torch import Generator, Tensor

from allyouneed.lab.probe.task import ProbeTask, drawn, shifted

LETTERS = 16


def make(dice: Generator, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Letters, a separator, the letters from the last to the first."""
    letters = drawn(dice, 0, LETTERS, rows, length)
    return shifted(torch.cat((letters, torch.full((rows, 1), LETTERS)), 1), letters.flip(1))


TASK = ProbeTask(
    ("reversal: the letters backwards", "反转：倒序给出字母"),
    "Kazemnejad et al. 2023, The Impact of Positional Encoding on Length Generalization, 3",
    LETTERS + 1,
    1 / LETTERS,
    (4, 12),
    24,
    make,
)
