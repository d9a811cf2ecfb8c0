from __future__ import annotations

import torch
from torch import Generator, Tensor

from allyouneed.lab.probe.task import ProbeTask, drawn, shifted

BASE = 10
PLUS, EQUALS = BASE, BASE + 1


def make(dice: Generator, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Two numbers of equally many digits and their sum, the lowest digit first."""
    first, second = drawn(dice, 0, BASE, 2, rows, length)
    carry, digits = torch.zeros(rows, dtype=torch.long), []
    for a, b in zip(first.unbind(1), second.unbind(1), strict=True):
        digits.append((a + b + carry) % BASE)
        carry = (a + b + carry) // BASE
    plus, equals = (torch.full((rows, 1), sign) for sign in (PLUS, EQUALS))
    return shifted(torch.cat((first, plus, second, equals), 1), torch.stack((*digits, carry), 1))


TASK = ProbeTask(
    ("addition of two numbers, lowest digit first", "加法：两数相加，低位在前"),
    "Kazemnejad et al. 2023, The Impact of Positional Encoding on Length Generalization, 3",
    BASE + 2,
    1 / BASE,
    (2, 5),
    8,
    make,
)
