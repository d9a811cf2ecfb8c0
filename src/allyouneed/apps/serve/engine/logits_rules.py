"""Rules of one request on its logits: bias, presence and frequency penalty; and a record of log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from allyouneed.apps.serve.errors import ApiError

if TYPE_CHECKING:
    from allyouneed.apps.serve.sampling import SamplingFields


class TokenRecord(NamedTuple):
    """A generated token. `logprob`: of the model, before any rule; `top`: the likeliest tokens with theirs."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class LogitsRules:
    """A logits processor of one row. `presence` and `frequency` count generated tokens, as OpenAI documents it. `top`:
    how many alternatives to record; None: nothing is recorded."""

    def __init__(self, bias: dict[int, float], presence: float, frequency: float, top: int | None) -> None:
        self.bias, self.presence, self.frequency, self.top = bias, presence, frequency, top
        self.records = top is not None
        self.log_probs: Tensor | None = None  # (vocab,) of the token being chosen

    @classmethod
    def of(cls, fields: SamplingFields) -> LogitsRules | None:
        presence, frequency, top = fields.presence_penalty or 0.0, fields.frequency_penalty or 0.0, fields.top
        if not fields.logit_bias and not presence and not frequency and top is None:
            return None
        return cls({int(token): value for token, value in (fields.logit_bias or {}).items()}, presence, frequency, top)

    def check(self, vocab: int) -> None:
        if unknown := [token for token in self.bias if token >= vocab]:
            raise ApiError(f"logit_bias: token {unknown[0]} is outside the vocabulary of {vocab}", param="logit_bias")

    def __call__(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Logits (1, vocab), and the tokens generated so far (1, time)."""
        if self.top is not None:
            self.log_probs = logits[0].float().log_softmax(-1)
        if self.bias:
            index = torch.tensor([*self.bias], device=logits.device)
            values = torch.tensor([*self.bias.values()], device=logits.device, dtype=logits.dtype)
            logits = logits.index_add(-1, index, values[None].expand(len(logits), -1))
        if (self.presence or self.frequency) and tokens.shape[1]:
            counts = torch.zeros_like(logits).scatter_add_(1, tokens, torch.ones_like(tokens, dtype=logits.dtype))
            logits = logits - self.frequency * counts - self.presence * (counts > 0)
        return logits

    def listener(self, listener: Callable[[Any], None]) -> Callable[[int], None]:
        """Hands records of the tokens on."""
        return lambda token: listener(self.record(token))

    def record(self, token: int) -> TokenRecord:
        """The record of the token that was chosen last."""
        if self.log_probs is None:
            return TokenRecord(token)
        return record_of(self.log_probs, token, self.top or 0)


def record_of(log_probs: Tensor, token: int, top: int) -> TokenRecord:
    """`log_probs`: (vocab,)"""
    values, ids = log_probs.topk(min(top, len(log_probs)))
    best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenRecord(token, float(log_probs[token]), best)
