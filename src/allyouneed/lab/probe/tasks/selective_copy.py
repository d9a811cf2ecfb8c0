from __future__ import annotations

import torch
from torch import Generator, Tensor

from allyouneed.lab.probe.task import ProbeTask, drawn, shifted

LETTERS, COPIED = 8, 4
BLANK, ASK = LETTERS, LETTERS + 1


def make(dice: Generator, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Four letters anywhere among blanks, a separator, the letters in order."""
    letters = drawn(dice, 0, LETTERS, rows, COPIED)
    places = torch.rand(rows, length, generator=dice).argsort(1)[:, :COPIED].sort(1).values
    text = torch.full((rows, length + 1), BLANK).scatter(1, places, letters)
    text[:, -1] = ASK
    return shifted(text, letters)


TASK = ProbeTask(
    ("selective copy: four letters among blanks", "选择性复制：空白中的四个字母"),
    "Gu, Dao 2023, Mamba, 4.1.1",
    LETTERS + 2,
    1 / LETTERS,
    (16, 32),
    64,
    make,
)
