"""Patterns as text: `causal & (window(64) | prefix(4))`."""

from __future__ import annotations

import difflib
import re
from typing import Any

from pydantic_core import PydanticCustomError

from allyouneed.config.messages import parenthesis_problem
from allyouneed.nn.patterns.core import Pattern

COMBINATORS = ("and", "or", "not")
MAX_WORDS, MAX_DEPTH, MAX_DIGITS = 500, 50, 10


def shorten(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


class PatternParser:
    """`or := and ('|' and)*   and := not ('&' not)*   not := '~' not | '(' or ')' | word ['(' numbers ')']`"""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = re.findall(r"[a-z][a-z0-9-]*|\d+|\S", text)
        self.index = self.depth = 0

    def read(self) -> Pattern:
        if problem := parenthesis_problem(self.text):
            raise self._error(problem)
        if len(self.tokens) > MAX_WORDS:
            raise self._error(f"more than {MAX_WORDS} words")
        pattern = self._or()
        if self.index < len(self.tokens):
            raise self._error(f"unexpected {self.tokens[self.index]!r}")
        return pattern

    def _take(self, word: str) -> bool:
        found = self.index < len(self.tokens) and self.tokens[self.index] == word
        self.index += found
        return found

    def _or(self) -> Pattern:
        pattern = self._and()
        while self._take("|"):
            pattern = pattern | self._and()
        return pattern

    def _and(self) -> Pattern:
        pattern = self._not()
        while self._take("&"):
            pattern = pattern & self._not()
        return pattern

    def _not(self) -> Pattern:
        if self.depth == MAX_DEPTH:
            raise self._error(f"nested more than {MAX_DEPTH} levels deep")
        self.depth += 1
        pattern = self._nested()
        self.depth -= 1
        return pattern

    def _nested(self) -> Pattern:
        if self._take("~"):
            return ~self._not()
        if self._take("("):
            pattern = self._or()
            if not self._take(")"):
                raise self._error(f"expected ')' before {self.tokens[self.index]!r}")
            return pattern
        return self._word()

    def _word(self) -> Pattern:
        if self.index == len(self.tokens):
            raise self._error("missing pattern at the end")
        word = self.tokens[self.index]
        part = None if word in COMBINATORS else Pattern.find(word)
        if part is None:
            names = [kind for kind in Pattern.known() if kind not in COMBINATORS]
            close = difflib.get_close_matches(word, names, n=1)
            near = f"; did you mean {close[0]!r}?" if close else ""
            raise self._error(f"unknown pattern {word!r}{near} (allowed: {', '.join(sorted(names))})")
        self.index += 1
        values: list[int] = []
        if self._take("("):
            while not self._take(")"):
                value = self.tokens[self.index] if self.index < len(self.tokens) else ""
                if not value.isdecimal() or len(value) > MAX_DIGITS:
                    raise self._error(f"{word}(…) takes integers, not {shorten(value)!r}")
                values.append(int(value))
                self.index += 1
                self._take(",")
        fields = [name for name in part.__pydantic_fields__ if name != "kind"]
        if len(values) != len(fields):
            wanted = f"({', '.join(fields)})" if fields else "no arguments"
            raise self._error(f"{word} takes {wanted}, got {len(values)}")
        tree: dict[str, Any] = {"kind": word} | dict(zip(fields, values, strict=True))
        return Pattern.choose(tree)

    def _error(self, message: str) -> PydanticCustomError:
        return PydanticCustomError("config", "{text}", {"text": f"{message}, in {shorten(self.text)!r}"})
