"""Times of words: cross-attention weights of a finished window, aligned by dynamic time warping (the method of OpenAI's
Whisper code)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allyouneed.data.tokenizers.base import EAST_ASIAN_CHARACTER, Tokenizer

SMOOTHED = 7  # positions of the median filter over time
SECONDS = 0.02  # per position of the encoder


@dataclass(frozen=True)
class Word:
    """A word from `start` to `end`, in seconds."""

    text: str
    start: float
    end: float


def token_positions(weights: Tensor) -> list[int]:
    """The encoder position at which each token begins. `weights`: cross-attention (heads, tokens, positions)."""
    values = weights.float()
    deviation = values.std(1, keepdim=True, correction=0)
    values = (values - values.mean(1, keepdim=True)) / deviation.clamp(min=1e-8)
    pad = min(SMOOTHED // 2, values.shape[-1] - 1)
    if pad:
        values = (
            torch.nn.functional.pad(values, (pad, pad), mode="reflect").unfold(-1, 2 * pad + 1, 1).median(-1).values
        )
    return warp(-values.mean(0).double().numpy())


def warp(cost: np.ndarray) -> list[int]:
    """The first column of each row on the cheapest monotonic path through `cost` (rows, columns)."""
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    total[0, 0] = 0
    step = np.zeros((rows + 1, columns + 1), dtype=np.int8)  # 0: diagonal, 1: from the row above, 2: from the left
    for column in range(1, columns + 1):
        for row in range(1, rows + 1):
            before = (total[row - 1, column - 1], total[row - 1, column], total[row, column - 1])
            step[row, column] = best = int(np.argmin(before))
            total[row, column] = cost[row - 1, column - 1] + before[best]
    firsts = [0] * rows
    row, column = rows, columns
    while row > 0 and column > 0:
        firsts[row - 1] = column - 1
        moved = int(step[row, column])
        row, column = row - (moved != 2), column - (moved != 1)
    return firsts


def split_words(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[tuple[str, int]]:
    """Words, and the number of tokens of each. A word begins with a space, or is one Chinese or Japanese character;
    punctuation belongs to the word before it."""
    words: list[tuple[str, int]] = []
    held: list[int] = []
    for token in tokens:
        held.append(token)
        text = tokenizer.decode(held)
        if "\ufffd" in text and len(held) < 4:  # part of a character
            continue
        begins = text.startswith(" ") or EAST_ASIAN_CHARACTER.match(text) is not None
        if words and not (begins and any(char.isalnum() for char in text)):
            words[-1] = (words[-1][0] + text, words[-1][1] + len(held))
        else:
            words.append((text, len(held)))
        held = []
    if held:
        words.append((tokenizer.decode(held), len(held)))
    return words


def time_words(words: Sequence[tuple[str, int]], positions: Sequence[int], begin: float, end: float) -> list[Word]:
    """`positions`: of each token and of the end token, from the start of the window, which is at `begin` seconds. No
    word ends after `end`."""
    found, at = [], 0
    for text, count in words:
        start, stop = (begin + positions[n] * SECONDS for n in (at, at + count))
        at += count
        if text.strip():
            found.append(Word(text.strip(), min(start, end), min(max(start, stop), end)))
    return found
