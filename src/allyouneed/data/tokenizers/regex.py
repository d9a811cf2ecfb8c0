"""How long a regular expression may take: the `tokenizers` library runs those of a tokenizer.json by backtracking.

Time is exponential where a repeated group contains alternatives or repeats of its own, `(a+)+`, and a high power of the
length where many repeats follow each other, `a*a*a*a*a*`. Neither occurs in published tokenizers."""

from __future__ import annotations

from dataclasses import dataclass

MAX_REPEATS = 4  # repeats of any length in one alternative; published tokenizers have two
ANY_LENGTH = 8  # a repeat with this upper bound or more counts as unbounded
ZERO_WIDTH = "bBAzZGyYK"  # escapes that match no character
LOOKS = ("=", "!", "<=", "<!")


@dataclass
class MatchBounds:
    """The fewest characters that a part of an expression matches, and what it contains."""

    least: int = 0
    repeats: int = 0  # of any length, in one alternative
    varies: bool = False  # alternatives, or repeats of variable length


class OutOfBounds(ValueError):
    """Why an expression is refused."""


def least_width(pattern: str) -> int:
    """The fewest characters that a match has. A `OutOfBounds` where matching may take too long."""
    reader = _RegexReader(pattern)
    shape = reader.alternatives()
    if reader.at < len(pattern):
        raise OutOfBounds("it has an unmatched parenthesis")
    return shape.least


class _RegexReader:
    """`alternatives := sequence ('|' sequence)*   sequence := (atom quantifier*)*`"""

    def __init__(self, pattern: str) -> None:
        self.text, self.at, self.depth = pattern, 0, 0

    def alternatives(self) -> MatchBounds:
        found = [self._sequence()]
        while self._take("|"):
            found.append(self._sequence())
        varies = len(found) > 1 or found[0].varies
        return MatchBounds(min(one.least for one in found), max(one.repeats for one in found), varies)

    def _sequence(self) -> MatchBounds:
        total = MatchBounds()
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            atom = self._atom()
            while (bounds := self._quantifier()) is not None:
                atom = self._repeated(atom, *bounds)
            total = MatchBounds(total.least + atom.least, total.repeats + atom.repeats, total.varies or atom.varies)
            if total.repeats > MAX_REPEATS:
                raise OutOfBounds(f"more than {MAX_REPEATS} repeats follow each other, which can take very long")
        return total

    def _repeated(self, atom: MatchBounds, least: int, most: int | None) -> MatchBounds:
        if atom.varies and (most is None or most > 1):
            raise OutOfBounds("it repeats a group with repeats or alternatives in it, which can take exponential time")
        if most == 0:
            return MatchBounds()
        endless = most is None or most > ANY_LENGTH
        return MatchBounds(atom.least * least, atom.repeats + (endless and least != most), atom.varies or least != most)

    def _atom(self) -> MatchBounds:
        char = self.text[self.at]
        self.at += 1
        if char == "(":
            return self._group()
        if char == "[":
            self._char_class()
            return MatchBounds(1)
        if char == "\\":
            return self._escape()
        return MatchBounds(0 if char in "^$" else 1)

    def _group(self) -> MatchBounds:
        self.depth += 1
        if self.depth > 100:
            raise OutOfBounds("it is nested too deeply")
        look = False
        if self._take("?"):
            if self._take("#"):
                self.at = self._after(")")
                self.depth -= 1
                return MatchBounds()
            if self.text[self.at : self.at + 1] in ("~", "{", "(", "@"):
                raise OutOfBounds(f"(?{self.text[self.at]} is not supported")
            look = any(self.text.startswith(sign, self.at) for sign in LOOKS)
            if look:
                self.at += 2 if self.text[self.at] == "<" else 1
            elif self._take("<") or self._take("'"):  # a named group
                self.at = min(self._after(">"), self._after("'"))
            elif not self._take(">"):
                while self.text[self.at : self.at + 1].isalpha() or self.text[self.at : self.at + 1] == "-":
                    self.at += 1  # options: (?i:…) and (?i)
                if self.text[self.at : self.at + 1] == ")":
                    self.at += 1
                    self.depth -= 1
                    return MatchBounds()
                self._take(":")
        elif self.text.startswith("*", self.at):
            raise OutOfBounds("(* is not supported")
        inside = self.alternatives()
        if not self._take(")"):
            raise OutOfBounds("it has an unmatched parenthesis")
        self.depth -= 1
        return MatchBounds(0, inside.repeats, inside.varies) if look else inside

    def _char_class(self) -> None:
        """Up to the closing bracket: classes nest, and a first `]` is a character."""
        depth, first = 1, True
        self._take("^")
        while depth:
            if self.at >= len(self.text):
                raise OutOfBounds("it has an unmatched bracket")
            char = self.text[self.at]
            self.at += 2 if char == "\\" else 1
            if char == "[":
                depth += 1
                self._take("^")
                first = True
                continue
            if char == "]" and not first:
                depth -= 1
            first = False

    def _escape(self) -> MatchBounds:
        char = self.text[self.at : self.at + 1]
        self.at += 1
        if char == "g":
            raise OutOfBounds("it calls itself")
        if char == "k" or (char.isdigit() and char != "0"):
            return MatchBounds(0, 1, True)  # what a group matched before, of any length
        if char in "pPxuko" and self.text.startswith("{", self.at):
            self.at = self._after("}")
        return MatchBounds(0 if char in ZERO_WIDTH else 1)

    def _quantifier(self) -> tuple[int, int | None] | None:
        char = self.text[self.at : self.at + 1]
        if char in ("*", "+", "?"):
            self.at += 1
            bounds: tuple[int, int | None] = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
            if not self._take("?"):  # lazy
                self._take("+")  # possessive
            return bounds
        if char != "{":
            return None
        inside, closed, _ = self.text[self.at + 1 :].partition("}")
        first, comma, last = inside.partition(",")
        if not closed or not (first or last) or not (first + last).isdecimal() or len(first + last) > 12:
            return None  # a brace like any other character
        self.at += len(inside) + 2
        self._take("?")
        least = int(first or 0)
        return least, (int(last) if last else None) if comma else least

    def _take(self, text: str) -> bool:
        found = self.text.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def _after(self, sign: str) -> int:
        found = self.text.find(sign, self.at)
        return len(self.text) if found < 0 else found + 1
