"""Whisper's logits rules: text between timestamps, in pairs, never decreasing (Radford et al. 2022, 2.3, 4.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from allyouneed.data.media.speech import TICK, Speech


class TimestampRules:
    """Masks the logits given the tokens so far. `timestamps`: allow timestamp tokens."""

    def __init__(self, speech: Speech, timestamps: bool, device: torch.device) -> None:
        self.speech, self.timestamps = speech, timestamps
        none = () if speech.no_timestamps is None else (speech.no_timestamps,)
        never = {*speech.suppress, *none} - {speech.end}
        self.never = torch.tensor(sorted(never), dtype=torch.long, device=device)
        self.not_first = torch.tensor(sorted({*speech.begin_suppress}), dtype=torch.long, device=device)

    def __call__(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """logits (rows, vocab), tokens so far (rows, time) -> logits with -inf at forbidden tokens."""
        logits = logits.index_fill(-1, self.never, -torch.inf)
        if not tokens.shape[1] and len(self.not_first):
            logits = logits.index_fill(-1, self.not_first, -torch.inf)
        if self.timestamps:
            return self._mask_times(logits, tokens)
        logits[:, self._first :] = -torch.inf
        return logits

    @property
    def _first(self) -> int:
        return self.speech.first_time

    def _mask_times(self, logits: Tensor, tokens: Tensor) -> Tensor:
        first = self._first
        ids = torch.arange(logits.shape[-1], device=logits.device)
        times = ids >= first
        if not tokens.shape[1]:  # starts with an early timestamp
            latest = first + round(self.speech.first_within / TICK)
            return logits.masked_fill(~times | (ids > latest), -torch.inf)
        is_time = tokens >= first
        last = is_time[:, -1]
        before = is_time[:, -2] if tokens.shape[1] > 1 else torch.ones_like(last)
        opens, ended = last & before, last & ~before  # text must follow, or a segment has just ended
        earliest = torch.where(is_time, tokens, first - 1).amax(1)  # the last timestamp
        earliest = torch.where(ended, earliest, earliest + 1)  # the next segment may start there; no segment is empty
        forbidden = (
            (opens[:, None] & times) | (ended[:, None] & self.speech.is_text(ids)) | (times & (ids < earliest[:, None]))
        )
        logits = logits.masked_fill(forbidden, -torch.inf)
        # if all timestamps together are more likely than any text token, only timestamps remain
        time_log_prob, text = logits[:, first:].logsumexp(-1), logits[:, :first].amax(-1)
        return logits.masked_fill((time_log_prob > text)[:, None] & ~times, -torch.inf)
