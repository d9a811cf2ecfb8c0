"""A command that upper-cases lines, and a disk that kills whoever uses it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from allyouneed.cli.text.resumable_output import ResumableOutput
from allyouneed.cli.text_commands import TextCommand
from allyouneed.errors import UserError


@dataclass(frozen=True)
class Shout:
    text: str
    notes: tuple[str, ...] = ()


def shout(blanks: bool = True, chunk: int = 16, bad: str = "", odd: str = "") -> TextCommand[Shout]:
    """Upper-cases each line and numbers it."""

    def predict(texts: list[str], first: int) -> list[Shout]:
        if bad and bad in texts:
            raise UserError("a bad line")
        return [
            Shout(f"{first + n}: {text.upper()}", ("odd",) if odd and odd in text else ())
            for n, text in enumerate(texts)
        ]

    return TextCommand(
        "shouting", predict, lambda one: one.text + "\n", lambda one: {"said": one.text}, blanks=blanks, chunk=chunk
    )


class KilledError(BaseException):
    pass


class Killer:
    """Dies in the middle of the n-th thing that is asked of the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: float = float("inf")
        self.count = 0
        monkeypatch.setattr(ResumableOutput, "__exit__", lambda work, *_: work._close())  # nobody tidies up
        for place, name in ((os, "write"), (os, "fsync"), (os, "ftruncate"), (Path, "replace"), (Path, "unlink")):
            monkeypatch.setattr(place, name, self.deadly(getattr(place, name), name))

    def deadly(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def act(*args: Any, **more: Any) -> Any:
            self.count += 1
            self.left -= 1
            if self.left >= 0:
                return None if name == "fsync" else call(*args, **more)  # a process dies here, not the machine
            if name == "write":
                call(args[0], args[1][: len(args[1]) // 2])  # half of it
            elif name in ("replace", "unlink") and self.count % 2:
                call(*args, **more)  # done, but nobody knows
            raise KilledError

        return act
