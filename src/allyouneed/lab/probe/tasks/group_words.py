from __future__ import annotations

from itertools import permutations

import torch
from torch import Generator, Tensor

from allyouneed.lab.probe.task import ProbeTask, drawn


def even(order: tuple[int, ...]) -> bool:
    return sum(a > b for n, a in enumerate(order) for b in order[n + 1 :]) % 2 == 0


ELEMENTS = [order for order in permutations(range(5)) if even(order)]  # A5, the smallest group that is not solvable
NUMBERS = {order: number for number, order in enumerate(ELEMENTS)}
TABLE = torch.tensor([[NUMBERS[tuple(a[b[n]] for n in range(5))] for b in ELEMENTS] for a in ELEMENTS])


def make(dice: Generator, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Even permutations of five things; at each, the product of all so far."""
    tokens = drawn(dice, 0, len(ELEMENTS), rows, length)
    products = [tokens[:, 0]]
    for column in tokens.unbind(1)[1:]:
        products.append(TABLE[products[-1], column])
    return tokens, torch.stack(products, 1)


TASK = ProbeTask(
    ("group words: products in A5", "群的字：A5 中的乘积"),
    "Merrill et al. 2024, The Illusion of State in State-Space Models, 4",
    len(ELEMENTS),
    1 / len(ELEMENTS),
    (2, 8),
    16,
    make,
    convolved=False,
)
