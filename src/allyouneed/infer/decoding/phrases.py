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
from typing import NamedTuple

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


class Lead(NamedTuple):
    """What one hypothesis may read next. `closes`: it has just completed a phrase that ends a word. `following`: the
    tokens that begin or continue a missing phrase, if there is one; `only`: no other token may follow."""

    closes: bool
    following: Sequence[int] = ()
    only: bool = False


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
        """logits (rows, vocab), tokens so far (rows, time) -> logits that lead to the phrases. The tokens are read on
        the host; what follows from them is applied where the logits are."""
        leads = [self._lead(past) for past in tokens.tolist()]
        if not any(lead.closes or lead.following for lead in leads):
            return logits
        logits, device = logits.clone(), logits.device
        if closing := [row for row, lead in enumerate(leads) if lead.closes]:
            known = len(self.joins)
            logits[closing, :known] = logits[closing, :known].masked_fill(self.joins.to(device), -torch.inf)
        led = [(row, token) for row, lead in enumerate(leads) for token in lead.following]
        if not led:
            return logits
        rows, ids = torch.tensor(led, device=device).T  # (n,) each
        missing, only = torch.tensor([(bool(lead.following), lead.only) for lead in leads], device=device).T[..., None]
        eos = torch.tensor(list(self.eos), device=device)
        only = only | (missing & torch.isin(logits.argmax(-1, keepdim=True), eos))  # (rows, 1): it would end
        logits[:, eos] = logits[:, eos].masked_fill(missing, -torch.inf)
        values = logits[rows, ids]
        logits.masked_fill_(only, -torch.inf)
        # even one that continues a word may be the only one
        logits[rows, ids] = torch.where(only[rows, 0], values.nan_to_num(neginf=0.0), values + self.bonus)
        return logits

    def _lead(self, past: list[int]) -> Lead:
        """What follows from the tokens of one hypothesis."""
        text = self.decode(past)
        closes = any(one.closed and self._completes(past, one) for one in self.phrases)
        missing = [(one, count) for one in self.phrases if (count := one.times - one.count(text)) > 0]
        if not missing:
            return Lead(closes)
        needed = sum(count * max(map(len, one.forms)) for one, count in missing)
        begun = [(self._begun(past, form), form) for one, _ in missing for form in one.forms]
        longest = max(size for size, _ in begun)
        if longest:
            following = {form[size] for size, form in begun if size == longest}
        else:
            after_word, after_space = text[-1:].isalnum(), not text or text[-1].isspace()
            following = {one.inside[0] for one, _ in missing if not after_space}
            following |= {one.alone[0] for one, _ in missing if not after_word}
        return Lead(closes, sorted(following), longest > 0 or len(past) + needed + 1 >= self.limit)

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
