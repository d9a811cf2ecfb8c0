from __future__ import annotations

import torch
from torch import Generator, Tensor

from allyouneed.lab.probe.task import ProbeTask, distinct, drawn
from allyouneed.nn.batch import IGNORE

KEYS = 16


def make(dice: Generator, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Pairs of key and value, then every key again in another order: its value is asked for."""
    keys, values = distinct(dice, KEYS, rows, length), KEYS + drawn(dice, 0, KEYS, rows, length)
    order = distinct(dice, length, rows, length)
    asked, answers = keys.gather(1, order), values.gather(1, order)
    pairs = [torch.stack(both, 2).flatten(1) for both in ((keys, values), (asked, answers))]
    labels = torch.full((rows, 4 * length), IGNORE)
    labels[:, 2 * length :: 2] = answers
    return torch.cat(pairs, 1), labels


TASK = ProbeTask(
    ("recall: values of keys seen before (MQAR)", "联想回忆：给出前面键对应的值（MQAR）"),
    "Arora et al. 2023, Zoology, 3.1",
    2 * KEYS,
    1 / KEYS,
    (4, 8),
    16,
    make,
)
