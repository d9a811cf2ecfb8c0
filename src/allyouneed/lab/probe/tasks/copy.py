from __future__ import annotations

import torch
from torch import Generator, Tensor

from allyouneed.lab.probe.task import ProbeTask, drawn, shifted

LETTERS = 16


def make(dice: Generator, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Letters, a separator, the same letters."""
    letters = drawn(dice, 0, LETTERS, rows, length)
    return shifted(torch.cat((letters, torch.full((rows, 1), LETTERS)), 1), letters)


TASK = ProbeTask(
    ("copy: the letters again", "复制：原样重复字母"),
    "Jelassi et al. 2024, Repeat After Me, 3",
    LETTERS + 1,
    1 / LETTERS,
    (4, 12),
    24,
    make,
)
