"""Decoding under lexical constraints: every hypothesis contains given phrases.

A logits processor (`DecodingSpec.logits_processor`) for one request. As long as a phrase is missing, the tokens that
begin it are likelier by `bonus`, what was begun is completed, and the hypothesis cannot end; where it would end, or has
no tokens left for anything else, the phrase begins. So beam search places a phrase where the model finds it least
surprising. Unlike in grid beam search (Hokamp and Liu 2017) and dynamic beam allocation (Post and Vilar 2018), beams
are not shared out by the number of phrases that they contain: the search itself needs no change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tokens = tuple[int, ...]
BONUS = 4.0  # nats


@dataclass(frozen=True)
class Phrase:
    """`forms`: its tokens, in each way it may be written; `times`: how often a text must have it; `count(text)`: how
    often it does; `closed`: it ends a word."""

    forms: tuple[Tokens, ...]
    times: int
    count: Callable[[str], int]
    closed: bool = True


@dataclass(frozen=True, eq=False)
class ForcedPhrases:
    """`limit`: the most tokens of a hypothesis. `decode`: the text of tokens. `joins` (vocab,): True for tokens that
    continue a word; none of them follows a phrase that ends one."""

    phrases: Sequence[Phrase]
    eos: Sequence[int]
    limit: int
    decode: Callable[[list[int]], str]
    joins: Tensor
    bonus: float = BONUS

    def __call__(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """logits (rows, vocab), tokens so far (rows, time) -> logits that lead to the phrases."""
        logits = logits.clone()
        for row, past in zip(logits, tokens.tolist(), strict=True):
            self._lead(row, past)
        return logits

    def _lead(self, row: Tensor, past: list[int]) -> None:
        """Change the logits (vocab,) of one hypothesis."""
        text = self.decode(past)
        if any(one.closed and self._completes(past, one) for one in self.phrases):
            row[: len(self.joins)].masked_fill_(self.joins.to(row.device), -torch.inf)
        missing = [(one, count) for one in self.phrases if (count := one.times - one.count(text)) > 0]
        if not missing:
            return
        needed = sum(count * max(map(len, one.forms)) for one, count in missing)
        begun = [(_begun(past, form), form) for one, _ in missing for form in one.forms]
        longest = max(size for size, _ in begun)
        following = sorted({form[size] for size, form in begun if size == longest})
        ends = int(row.argmax()) in self.eos or len(past) + needed + 1 >= self.limit
        row[list(self.eos)] = -torch.inf
        if longest or ends:
            kept = row[following].clone()
            row.fill_(-torch.inf)
            row[following] = kept.nan_to_num(neginf=0.0)  # even one that follows no word
        else:
            row[following] += self.bonus

    def _completes(self, past: list[int], phrase: Phrase) -> bool:
        """Whether the last tokens are a phrase that was missing before."""
        found = next((form for form in phrase.forms if _ends_with(past, form)), None)
        return found is not None and phrase.count(self.decode(past[: -len(found)])) < phrase.times


def _ends_with(past: list[int], form: Tokens) -> bool:
    return tuple(past[-len(form) :]) == form


def _begun(past: list[int], form: Tokens) -> int:
    """Tokens of a form that the text ends with, fewer than all."""
    return next((size for size in range(min(len(past), len(form) - 1), 0, -1) if _ends_with(past, form[:size])), 0)
