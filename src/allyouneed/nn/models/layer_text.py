"""Stacks as text: `"3×local, 1×full"`, `"2×(3×local, full), local"`.

Names refer to the layers defined under `layers`; the text expands to a list of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from allyouneed.config.messages import parenthesis_problem

_TIMES = r"(\d+)\s*[×x*]"
MAX_LAYERS = 10_000  # of a stack
MAX_DEPTH = 50  # of parentheses


def expand_layers(text: str, named: Any) -> list[dict[str, Any]]:
    """`list := item (',' item)*   item := [number ('×' | 'x' | '*')] (name | '(' list ')')`"""
    if not isinstance(named, Mapping) or not all(isinstance(layer, Mapping) for layer in named.values()):
        raise ValueError(f"{text!r} requires `layers`, a mapping of names to layers")
    if problem := parenthesis_problem(text):
        raise ValueError(f"{problem}, in {text!r}")
    parser = _LayerParser(text, named)
    found = parser.items()
    if parser.at < len(parser.words):
        raise ValueError(f"unexpected {parser.words[parser.at]!r} in {text!r}")
    return found


class _LayerParser:
    def __init__(self, text: str, named: Mapping[str, Mapping[str, Any]]) -> None:
        self.text, self.named = text, named
        self.words = [match[0] for match in re.finditer(rf"{_TIMES}|[A-Za-z][\w-]*|\S", text)]
        self.at = self.depth = 0

    def items(self) -> list[dict[str, Any]]:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep: {self.text[:80]!r}…")
        found = self._item()
        while self._take(","):
            found += self._item()
        self.depth -= 1
        return found

    def _item(self) -> list[dict[str, Any]]:
        times = self._times()
        if self._take("("):
            inside = self.items()
            if not self._take(")"):
                raise ValueError(f"expected ')' before {self.words[self.at]!r} in {self.text!r}")
            if len(inside) * times > MAX_LAYERS:
                raise ValueError(f"more than {MAX_LAYERS:,} layers in {self.text[:80]!r}")
            return inside * times
        if self.at == len(self.words):
            raise ValueError(f"missing layer at the end of {self.text!r}")
        word = self.words[self.at]
        if word not in self.named:
            known = ", ".join(sorted(self.named)) or "none; define them under `layers`"
            raise ValueError(f"unknown layer {word!r} in {self.text!r} (allowed: {known})")
        self.at += 1
        layer, repeat = self.named[word], self.named[word].get("repeat", 1)
        if not isinstance(repeat, int):  # reported when the layer is validated
            return [dict(layer)]
        return [{**layer, "repeat": times * repeat}]

    def _times(self) -> int:
        number = re.match(_TIMES, self.words[self.at]) if self.at < len(self.words) else None
        if number is None:
            return 1
        self.at += 1
        if len(number[1]) > len(str(MAX_LAYERS)):
            raise ValueError(f"more than {MAX_LAYERS:,} layers in {self.text[:80]!r}")
        if int(number[1]) < 1:
            raise ValueError(f"repeat must be at least 1, not {number[1]}, in {self.text!r}")
        return int(number[1])

    def _take(self, word: str) -> bool:
        found = self.at < len(self.words) and self.words[self.at] == word
        self.at += found
        return found
