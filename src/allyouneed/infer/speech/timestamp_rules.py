"""What Whisper may say next: text between times, times in pairs and never backwards (Radford et al. 2022, 2.3, 4.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from allyouneed.data.media.speech import TICK, Speech


class Rules:
    """Rules out tokens given those said so far. `timestamps`: it tells when; else it says no time at all."""

    def __init__(self, speech: Speech, timestamps: bool, device: torch.device) -> None:
        self.speech, self.timestamps = speech, timestamps
        never = {*speech.suppress, speech.no_timestamps} - {speech.end}
        self.never = torch.tensor(sorted(never), device=device)
        self.not_first = torch.tensor(sorted({*speech.begin_suppress}), dtype=torch.long, device=device)

    def __call__(self, logits: Tensor, said: Tensor) -> Tensor:
        """logits (rows, vocab) and the tokens of each row (rows, time) -> logits with -inf where nothing may be."""
        logits = logits.index_fill(-1, self.never, -torch.inf)
        if not said.shape[1] and len(self.not_first):
            logits = logits.index_fill(-1, self.not_first, -torch.inf)
        return self._times(logits, said) if self.timestamps else logits[:, : self._first].contiguous()

    @property
    def _first(self) -> int:
        return self.speech.first_time

    def _times(self, logits: Tensor, said: Tensor) -> Tensor:
        first, end = self._first, self.speech.end
        ids = torch.arange(logits.shape[-1], device=logits.device)
        times = ids >= first
        if not said.shape[1]:  # begins with a time, and soon
            latest = first + round(self.speech.first_within / TICK)
            return logits.masked_fill(~times | (ids > latest), -torch.inf)
        is_time = said >= first
        last = is_time[:, -1]
        before = is_time[:, -2] if said.shape[1] > 1 else torch.ones_like(last)
        opens, ended = last & before, last & ~before  # a piece of text begins, or one was just ended
        earliest = torch.where(is_time, said, first - 1).amax(1)  # the last time that was said
        earliest = torch.where(ended, earliest, earliest + 1)  # the next piece may begin there; no piece is empty
        ruled_out = (opens[:, None] & times) | (ended[:, None] & (ids < end)) | (times & (ids < earliest[:, None]))
        logits = logits.masked_fill(ruled_out, -torch.inf)
        # a time, whichever, is likelier than any one token of text: then it is a time
        time_mass, text = logits[:, first:].logsumexp(-1), logits[:, :first].amax(-1)
        return logits.masked_fill((time_mass > text)[:, None] & ~times, -torch.inf)
