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
    """`inside`: its tokens after other words; `alone`: where no word is before it, as at the beginning. `times`: how
    often a text must have it; `count(text)`: how often it does; `closed`: it ends a word."""

    inside: Tokens
    alone: Tokens
    times: int
    count: Callable[[str], int]
    closed: bool = True

    @property
    def forms(self) -> tuple[Tokens, Tokens]:
        return self.inside, self.alone


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
        begun = [(self._begun(past, form), form) for one, _ in missing for form in one.forms]
        longest = max(size for size, _ in begun)
        if longest:
            following = {form[size] for size, form in begun if size == longest}
        else:
            after_word, after_space = text[-1:].isalnum(), not text or text[-1].isspace()
            following = {one.inside[0] for one, _ in missing if not after_space}
            following |= {one.alone[0] for one, _ in missing if not after_word}
        ids = sorted(following)
        ends = int(row.argmax()) in self.eos or len(past) + needed + 1 >= self.limit
        row[list(self.eos)] = -torch.inf
        if longest or ends:
            kept = row[ids].clone()
            row.fill_(-torch.inf)
            row[ids] = kept.nan_to_num(neginf=0.0)  # even one that continues a word
        else:
            row[ids] += self.bonus

    def _begun(self, past: list[int], form: Tokens) -> int:
        """Tokens of a form that the text ends with, fewer than all; a space alone does not count."""
        sizes = range(min(len(past), len(form) - 1), 0, -1)
        found = next((size for size in sizes if _ends_with(past, form[:size])), 0)
        return found if self.decode(list(form[:found])).strip() else 0

    def _completes(self, past: list[int], phrase: Phrase) -> bool:
        """Whether the last tokens are a phrase that was missing before."""
        found = next((form for form in phrase.forms if _ends_with(past, form)), None)
        return found is not None and phrase.count(self.decode(past[: -len(found)])) < phrase.times


def _ends_with(past: list[int], form: Tokens) -> bool:
    return tuple(past[-len(form) :]) == form
