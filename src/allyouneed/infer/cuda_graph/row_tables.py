"""What a search on the device keeps of each row for rules that depend on the tokens so far (device_search.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from allyouneed.infer.decoding.base import RowRules
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.penalties import penalize
from allyouneed.runtime.cuda.static_cache import StaticStates


class TokenHistory:
    """The tokens of each row, its prompt included, for penalties: `tokens` (rows, capacity + 1) are known as far as the
    prompt (rows,) and the generated tokens go."""

    def __init__(self, states: StaticStates, options: Decoding) -> None:
        self.options, self.slots, self.group = options, states.slot_count, states.group
        self.tokens = torch.zeros(states.rows, states.capacity + 1, dtype=torch.long, device=states.device)
        self.prompts = torch.zeros(states.rows, dtype=torch.long, device=states.device)

    def assign(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        tokens = torch.zeros(len(slots), self.tokens.shape[1], dtype=torch.long)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(list(prompt))
        at = torch.tensor(list(slots), device=self.tokens.device)
        self.tokens.view(self.slots, self.group, -1)[at] = tokens.to(self.tokens.device)[:, None]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.tokens.device)
        self.prompts.view(self.slots, self.group)[at] = lengths[:, None]

    def penalize(self, logits: Tensor, lengths: Tensor) -> Tensor:
        """`lengths` (rows,): tokens generated so far; rows that have ended go on counting. There may be logits of
        several tokens per row, (rows · tokens, vocab)."""
        prompts, tokens, each = self.prompts, self.tokens, len(logits) // len(self.prompts)
        if each > 1:
            prompts, tokens = prompts.repeat_interleave(each), tokens.repeat_interleave(each, 0)
        return penalize(logits, tokens, (prompts + lengths).clamp(max=tokens.shape[1]), self.options)

    def append(self, tokens: Tensor, lengths: Tensor) -> None:
        """The tokens (rows,) or (rows, count) that follow the first `lengths` (rows,) generated ones."""
        tokens = tokens if tokens.dim() == 2 else tokens[:, None]
        places = (self.prompts + lengths)[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.tokens.scatter_(1, places.clamp(max=self.tokens.shape[1] - 1), tokens)

    def reorder(self, rows: Tensor) -> None:
        self.tokens.copy_(self.tokens.index_select(0, rows))


class RowRuleTables:
    """`RowRules` of each row: a bias (rows, vocab), how often each token was generated, what that costs (rows, 1)."""

    def __init__(self, states: StaticStates, vocab: int) -> None:
        self.group = states.group
        self.bias, self.counts = torch.zeros(2, states.rows, vocab, device=states.device)
        self.presence, self.frequency = torch.zeros(2, states.rows, 1, device=states.device)

    def assign(self, slots: Sequence[int], rules: Sequence[RowRules | None]) -> None:
        bias = torch.zeros(len(slots), self.bias.shape[1])
        costs = torch.zeros(2, len(slots), 1)
        for number, rule in enumerate(rules):
            if rule is not None:
                bias[number, list(rule.bias)] = torch.tensor(list(rule.bias.values()), dtype=bias.dtype)
                costs[:, number, 0] = torch.tensor([rule.presence, rule.frequency])
        rows = torch.tensor([slot * self.group + line for slot in slots for line in range(self.group)])
        rows, each = rows.to(self.bias.device), torch.arange(len(slots)).repeat_interleave(self.group)
        self.bias[rows] = bias[each].to(rows.device)
        self.presence[rows], self.frequency[rows] = costs[:, each].to(rows.device)
        self.counts[rows] = 0

    def apply(self, logits: Tensor) -> Tensor:
        return logits + self.bias - self.frequency * self.counts - self.presence * (self.counts > 0)

    def reorder(self, rows: Tensor) -> None:
        """Row i continues row `rows[i]` of the same request."""
        self.counts.copy_(self.counts.index_select(0, rows))

    def append(self, tokens: Tensor) -> None:
        self.counts.scatter_add_(1, tokens[:, None], torch.ones_like(self.presence))
