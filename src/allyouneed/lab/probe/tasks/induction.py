from __future__ import annotations

from torch import Generator, Tensor

from allyouneed.lab.probe.task import ProbeTask, distinct, drawn
from allyouneed.nn.batch import IGNORE

LETTERS = 32


def make(dice: Generator, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Different letters in random order, then one of them again: the letter behind its first place is asked for."""
    tokens = distinct(dice, LETTERS, rows, length)
    places = drawn(dice, 0, length - 2, rows, 1)
    answers = tokens.gather(1, places + 1)
    tokens[:, -1:] = tokens.gather(1, places)
    labels = tokens.new_full(tokens.shape, IGNORE)
    labels[:, -1:] = answers
    return tokens, labels


TASK = ProbeTask(
    ("induction: what followed this letter before", "归纳：该字母上次出现后的字母"),
    "Olsson et al. 2022, In-context Learning and Induction Heads",
    LETTERS,
    1 / LETTERS,
    (8, 16),
    32,
    make,
)
