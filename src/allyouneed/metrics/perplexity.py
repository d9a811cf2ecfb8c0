"""The loss of a decoder on one long text, in three ways (Dai et al. 2019, section 3.1, figures 1 and 2).

    pieces      disjoint pieces; the first tokens of each have almost no context
    sliding     a full window before every token, recomputed each time: equal context for all, at high cost
    recurrent   segments over cached states: each token is computed once

With a windowed pattern and relative positions, `recurrent` equals `sliding` with a window as long as the receptive
field of all layers (`receptive_field`)."""

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
    """The summed negative log-likelihood of `tokens` tokens, and how many tokens were computed for it."""

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
    """How many tokens, itself included, can influence a decoder's output at a token; may be infinite."""
    reaches = [layer.repeat * _reach(layer.mixer) for layer in config.decoder if layer.mixer is not None]
    return 1 + sum(reaches)


def _reach(mixer: Any) -> float:
    pattern = getattr(mixer, "pattern", None)
    return math.inf if pattern is None else -float(pattern.reach[0])


def pieces(model: Any, text: Tensor, length: int) -> TextLoss:
    """Disjoint pieces of `length` tokens of a text (time,); all tokens but the first are predicted."""
    total, read = 0.0, text[:-1]
    for begin in range(0, len(read), length):
        given, labels = read[None, begin : begin + length], text[None, begin + 1 : begin + 1 + length]
        total += _loss(model, lambda given=given: model(Batch(Rows(given))), labels)  # type: ignore[misc]
    return TextLoss(total, len(read), len(read))


def recurrent(model: Any, text: Tensor, segment: int) -> TextLoss:
    """Segments of `segment` tokens, each over the states of those before."""
    states = model.start(1)
    total, steps = 0.0, run_segments(model, text[None, :-1], segment, states)
    for begin in range(0, len(text) - 1, segment):
        labels = text[None, begin + 1 : begin + 1 + segment]
        total += _loss(model, lambda: next(steps)[1], labels)
    return TextLoss(total, len(text) - 1, len(text) - 1)


def sliding(model: Any, text: Tensor, window: int, rows: int = 64) -> TextLoss:
    """Predict every token from the `window` tokens before it, or from all where there are fewer; `rows` windows per
    batch."""
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
    """The summed loss of the labels, without dropout."""
    training = model.training
    model.eval()
    try:
        return float(model.head.loss(hidden(), labels, 0.0)[1])
    finally:
        model.train(training)
