"""Penalties on repetition: logits of the next token, changed by the prompt and the tokens generated so far."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from allyouneed.infer.decoding.options import Decoding


class Penalties:
    """Repetition penalty and no-repeat n-grams over each row's `history`; the numbers of Hugging Face's processors of
    the same names."""

    def __init__(self, options: Decoding, prompts: Sequence[Sequence[int]]) -> None:
        self.factor, self.ngram = options.repetition_penalty, options.no_repeat
        self.history = [list(prompt) for prompt in prompts]

    def append(self, tokens: Sequence[int]) -> None:
        for history, token in zip(self.history, tokens, strict=True):
            history.append(token)

    def select(self, rows: Sequence[int]) -> None:
        self.history = [list(self.history[row]) for row in rows]

    def repeat_rows(self, count: int) -> None:
        self.history = [list(history) for history in self.history for _ in range(count)]

    def join(self, other: Penalties) -> None:
        self.history += other.history

    def apply(self, logits: Tensor) -> Tensor:
        """(rows, vocab)"""
        if self.factor != 1:  # Keskar et al. 2019, 4.1; negative logits are multiplied so that they fall as well
            seen = _mask(logits, self.history)
            lowered = torch.where(logits < 0, logits * self.factor, logits / self.factor)
            logits = torch.where(seen, lowered, logits)
        if self.ngram is not None:
            banned = [ngram_completions(history, self.ngram) for history in self.history]
            logits = logits.masked_fill(_mask(logits, banned), -torch.inf)
        return logits


def _mask(logits: Tensor, tokens: Sequence[Sequence[int]]) -> Tensor:
    """(rows, vocab) bool: these tokens of each row."""
    rows = [number for number, row in enumerate(tokens) for _ in row]
    mask = torch.zeros_like(logits, dtype=torch.bool)
    mask[rows, [token for row in tokens for token in row]] = True
    return mask


def ngram_completions(history: Sequence[int], size: int) -> list[int]:
    """The tokens that would complete an n-gram of `size` that occurred before."""
    last = list(history[len(history) - size + 1 :])
    starts = range(len(history) - size + 1)
    return [history[at + size - 1] for at in starts if list(history[at : at + size - 1]) == last]


def penalize(logits: Tensor, history: Tensor, counts: Tensor, options: Decoding) -> Tensor:
    """`Penalties.apply` for tensors: the first `counts` (rows,) tokens of `history` (rows, capacity) are known. Shapes
    are fixed, and nothing is read on the host."""
    columns = torch.arange(history.shape[1], device=history.device)
    if options.repetition_penalty != 1:
        seen = _mark(logits, history, columns < counts[:, None])
        factor = options.repetition_penalty
        logits = torch.where(seen, torch.where(logits < 0, logits * factor, logits / factor), logits)
    if (size := options.no_repeat) is not None and size <= history.shape[1]:
        last = (counts[:, None] - size + 1 + columns[: size - 1]).clamp(min=0)
        ngrams = history.unfold(1, size, 1)  # (rows, starts, size)
        again = (ngrams[..., :-1] == history.gather(1, last)[:, None]).all(-1)
        known = columns[: ngrams.shape[1]] + size <= counts[:, None]
        logits = logits.masked_fill(_mark(logits, ngrams[..., -1], again & known), -torch.inf)
    return logits


def _mark(logits: Tensor, tokens: Tensor, marked: Tensor) -> Tensor:
    """(rows, vocab) bool: the marked ones of these tokens (rows, n)."""
    rows, vocab = logits.shape
    mask = torch.zeros(rows, vocab + 1, dtype=torch.bool, device=logits.device)
    return mask.scatter_(1, tokens.where(marked, vocab), True)[:, :vocab]
