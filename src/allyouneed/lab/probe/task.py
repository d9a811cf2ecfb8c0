"""A probe task: random token rows of any length, and the labels that a model must give. One file a task, in tasks/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import torch
from torch import Generator, Tensor

from allyouneed.errors import UserError
from allyouneed.nn.batch import IGNORE

HOME = Path(__file__).parent / "tasks"


@dataclass(frozen=True)
class ProbeTask:
    """`make(dice, rows, length)`: tokens (rows, time) and labels, the token that each position must give or IGNORE.
    `length` is the task's own measure (pairs, digits, letters): `trained` ones and a `longer` one."""

    about: tuple[str, str]  # English, Chinese
    source: str
    vocab: int
    chance: float  # accuracy of guessing
    trained: tuple[int, int]  # the shortest and the longest
    longer: int
    make: Callable[[Generator, int, int], tuple[Tensor, Tensor]]
    convolved: bool = True  # a short convolution before each mixer, as its source or Based has it


def names() -> list[str]:
    return [path.stem.replace("_", "-") for path in sorted(HOME.glob("*.py")) if path.stem != "__init__"]


@cache
def find(name: str) -> ProbeTask:
    if name not in names():
        raise UserError(f"no probe task {name!r} (allowed: {', '.join(names())})")
    found: ProbeTask = import_module(f"{__package__}.tasks.{name.replace('-', '_')}").TASK
    return found


def shifted(text: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
    """A text and the answer that follows it, to be predicted token by token: tokens and labels."""
    whole = torch.cat((text, answer), 1)
    labels = whole[:, 1:].clone()
    labels[:, : text.shape[1] - 1] = IGNORE
    return whole[:, :-1], labels


def drawn(dice: Generator, low: int, high: int, *shape: int) -> Tensor:
    """Random integers from low up to high − 1."""
    return torch.randint(low, high, shape, generator=dice)


def distinct(dice: Generator, of: int, rows: int, count: int) -> Tensor:
    """`count` different integers below `of` in each row, in random order."""
    return torch.rand(rows, of, generator=dice).argsort(1)[:, :count]
