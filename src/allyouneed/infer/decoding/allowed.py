"""Requests that restrict their tokens (`Request.allowed`): all others have a logit of -inf, so that log-probabilities
are normalised over those allowed.

Where every request of a batch does so, only columns of the output layer that one of them allows are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from allyouneed.infer.decoding.base import RequestState

NarrowHead = Callable[[Tensor], Callable[[Tensor], Tensor]]  # tokens (n,) -> (hidden states -> their logits)


class Columns:
    """The tokens (n,) that one of these requests allows, with a `head` that computes their logits alone. It serves any
    of the requests, however many are left."""

    def __init__(self, narrow: NarrowHead, requests: Sequence[RequestState], vocab: int, device: torch.device) -> None:
        used = torch.zeros(vocab, dtype=torch.bool)
        for state in requests:
            used[state.request.allowed] = True
        tokens = used.nonzero()[:, 0]
        self.rows, self.vocab, self.head = len(requests), vocab, narrow(tokens.to(device))
        self.columns = torch.full((vocab,), -1).index_put_((tokens,), torch.arange(len(tokens)))
        self.tokens = tokens.to(device)

    def find(self, tokens: Tensor | None) -> Tensor | None:
        """The columns of those tokens that have one."""
        if tokens is None:
            return None
        found = self.columns[tokens.cpu()]
        found = found[found >= 0].to(tokens.device)
        return found if len(found) else None

    def spread(self, logits: Tensor) -> Tensor:
        """Logits (rows, n) of the columns as (rows, vocab), with -inf elsewhere."""
        return logits.new_full((len(logits), self.vocab), -torch.inf).index_copy_(1, self.tokens, logits)


def find_columns(model: Any, requests: Sequence[RequestState], device: torch.device) -> Columns | None:
    """None where a request allows all tokens, or the head has no part for some of them. `model`: or its executor."""
    narrow = getattr(model, "narrow_head", None)
    head = model.head if narrow is None else model.model.head
    if not getattr(head, "narrows", False) or any(state.request.allowed is None for state in requests):
        return None
    return Columns(narrow or head.narrowed, requests, head.vocab_size, device)


def allowed_mask(requests: Sequence[RequestState], vocab: int, columns: Columns | None, device: torch.device) -> Tensor:
    """(requests, vocab), or (requests, n) for columns: 0 for tokens that a request allows, else -inf."""
    mask = torch.zeros(len(requests), vocab if columns is None else len(columns.tokens))
    sets = {
        row: torch.as_tensor(one) for row, state in enumerate(requests) if (one := state.request.allowed) is not None
    }
    rows, tokens = torch.tensor(list(sets)), torch.cat(list(sets.values()))
    mask[rows] = -torch.inf
    rows = rows.repeat_interleave(torch.tensor([len(some) for some in sets.values()]))
    mask[rows, tokens if columns is None else columns.columns[tokens]] = 0
    return mask.to(device)
