"""Layers of different kinds in one line: `"3×local, 1×full"`, `"2×(3×local, full), local"`.

The words are names that the model gives to layers; the text stands for the list of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def written_out(text: str, named: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`list := item (',' item)*   item := [number ('×' | 'x' | '*')] (name | '(' list ')')`"""
    reader = _Reader(text, named)
    found = reader.items()
    if reader.at < len(reader.words):
        raise ValueError(f"{reader.words[reader.at]!r} does not belong here, in {text!r}")
    return found


class _Reader:
    def __init__(self, text: str, named: Mapping[str, Any]) -> None:
        self.text, self.named = text, named
        self.words = re.findall(r"\d+\s*[×x*]|[A-Za-z][\w-]*|\S", text)
        self.at = 0

    def _take(self, word: str) -> bool:
        found = self.at < len(self.words) and self.words[self.at] == word
        self.at += found
        return found

    def items(self) -> list[dict[str, Any]]:
        found = self._item()
        while self._take(","):
            found += self._item()
        return found

    def _item(self) -> list[dict[str, Any]]:
        times = 1
        if self.at < len(self.words) and (number := re.match(r"(\d+)\s*[×x*]", self.words[self.at])):
            times = int(number[1])
            self.at += 1
            if times < 1:
                raise ValueError(f"a layer stands at least once, not {times} times, in {self.text!r}")
        if self._take("("):
            inside = self.items()
            if not self._take(")"):
                raise ValueError(f"a ')' is missing, in {self.text!r}")
            return inside * times
        word = self.words[self.at] if self.at < len(self.words) else "the end"
        if word not in self.named:
            known = ", ".join(sorted(self.named)) or "none; name them under 'layers'"
            raise ValueError(f"{word!r} is no layer (known: {known}), in {self.text!r}")
        self.at += 1
        layer = dict(self.named[word])
        return [layer | {"repeat": times * layer.get("repeat", 1)}]
