"""What a text should not repeat: chances of the next token, changed by what each row has read and said."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from allyouneed.infer.decoding.options import Decoding


class Penalties:
    """`given`: what each row has read. Changed scores are those of Hugging Face's processors of the same names."""

    def __init__(self, decoding: Decoding, given: Sequence[Sequence[int]]) -> None:
        self.factor, self.run = decoding.repetition_penalty, decoding.no_repeat
        self.past = [list(row) for row in given]

    @classmethod
    def of(cls, decoding: Decoding, given: Sequence[Sequence[int]]) -> Penalties | None:
        """None where nothing is asked for."""
        return cls(decoding, given) if decoding.repetition_penalty != 1 or decoding.no_repeat is not None else None

    def say(self, tokens: Sequence[int]) -> None:
        for past, token in zip(self.past, tokens, strict=True):
            past.append(token)

    def select(self, order: Sequence[int]) -> None:
        self.past = [list(self.past[row]) for row in order]

    def repeat_rows(self, count: int) -> None:
        self.past = [list(past) for past in self.past for _ in range(count)]

    def join(self, other: Penalties) -> None:
        self.past += other.past

    def changed(self, scores: Tensor) -> Tensor:
        """(rows, vocab)"""
        if self.factor != 1:  # Keskar et al. 2019, 4.1, with the sign minded: a negative score is to fall as well
            seen = self._marked(scores, self.past)
            lowered = torch.where(scores < 0, scores * self.factor, scores / self.factor)
            scores = torch.where(seen, lowered, scores)
        if self.run is not None:
            closing = [closes_a_run(past, self.run) for past in self.past]
            scores = scores.masked_fill(self._marked(scores, closing), -torch.inf)
        return scores

    def _marked(self, scores: Tensor, tokens: Sequence[Sequence[int]]) -> Tensor:
        """(rows, vocab) bool: these tokens of each row."""
        rows = [number for number, row in enumerate(tokens) for _ in row]
        marked = torch.zeros_like(scores, dtype=torch.bool)
        marked[rows, [token for row in tokens for token in row]] = True
        return marked


def closes_a_run(past: Sequence[int], size: int) -> list[int]:
    """The tokens that would make the last `size` tokens a run that was there before."""
    last = list(past[len(past) - size + 1 :])
    places = range(len(past) - size + 1)
    return [past[at + size - 1] for at in places if list(past[at : at + size - 1]) == last]
