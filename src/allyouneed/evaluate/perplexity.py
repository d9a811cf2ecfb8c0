"""How well a decoder predicts one long text, read in three ways (Dai et al. 2019, 3.1 and figures 1 and 2).

    pieces      cut apart; the first tokens of each piece are predicted from almost nothing
    sliding     every token from a window of its own, computed from nothing: as much context for all, at any price
    recurrent   segments over what the model remembers: each token is computed once

Where a pattern sees so many places back and positions are relative, `recurrent` equals `sliding` over a window of all
that can reach a token through the layers (`receptive_field`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.decoder import Decoder
from allyouneed.nn.models.segment_recurrence import run_segments


@dataclass(frozen=True)
class TextLoss:
    """The summed negative log-likelihood of so many tokens, and how many tokens were computed for it."""

    total: float
    tokens: int
    computed: int

    @property
    def mean(self) -> float:
        return self.total / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.mean, 700.0))


def receptive_field(config: Decoder) -> float:
    """How many tokens, its own included, can have a part in what a decoder makes of a token; infinite if any can."""
    reaches = [layer.repeat * _back(layer.mixer) for layer in config.decoder if layer.mixer is not None]
    return 1 + sum(reaches)


def _back(mixer: Any) -> float:
    pattern = getattr(mixer, "pattern", None)
    return math.inf if pattern is None else -float(pattern.reach[0])


def pieces(model: Any, text: Tensor, length: int) -> TextLoss:
    """Disjoint pieces of `length` tokens of a text (time,); its first token is given, all others are predicted."""
    total, read = 0.0, text[:-1]
    for begin in range(0, len(read), length):
        given, labels = read[None, begin : begin + length], text[None, begin + 1 : begin + 1 + length]
        total += _loss(model, lambda given=given: model(Batch(Rows(given))), labels)  # type: ignore[misc]
    return TextLoss(total, len(read), len(read))


def recurrent(model: Any, text: Tensor, segment: int) -> TextLoss:
    """Segments of so many tokens, each over what is remembered of those before."""
    states = model.start(1)
    total, steps = 0.0, run_segments(model, text[None, :-1], segment, states)
    for begin in range(0, len(text) - 1, segment):
        labels = text[None, begin + 1 : begin + 1 + segment]
        total += _loss(model, lambda: next(steps)[1], labels)
    return TextLoss(total, len(text) - 1, len(text) - 1)


def sliding(model: Any, text: Tensor, window: int, rows: int = 64) -> TextLoss:
    """Every token from the `window` tokens before it, so many windows at once; those nearer to the beginning of the
    text, from all before them."""
    first = text[: window + 1]
    total = _loss(model, lambda: model(Batch(Rows(first[None, :-1]))), first[None, 1:])
    computed = len(first) - 1
    windows = text[1:-1].unfold(0, window, 1) if len(text) > window + 1 else text.new_empty(0, window)
    labels = text[window + 1 :]
    for begin in range(0, len(windows), rows):
        given = windows[begin : begin + rows]
        last = _loss(
            model,
            lambda given=given: model(Batch(Rows(given)))[:, -1:],  # type: ignore[misc]
            labels[begin : begin + rows, None],
        )
        total, computed = total + last, computed + given.numel()
    return TextLoss(total, len(text) - 1, computed)


@torch.no_grad()
def _loss(model: Any, hidden: Callable[[], Tensor], labels: Tensor) -> float:
    """Without dropout, of everything that is labelled."""
    training = model.training
    model.eval()
    try:
        return float(model.head.loss(hidden(), labels, 0.0)[1])
    finally:
        model.train(training)
