"""Speculative decoding on the device (Leviathan et al. 2023): a round drafts (device_drafts.py), verifies all draft
tokens in one pass (runtime/cuda/multi_token.py) and accepts some, without the host, which reads the tokens of some
rounds later. Tokens and counts are those of `SpeculativeDecoder` (speculative/decode.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allyouneed.infer.cuda_graph.device_drafts import Proposal, device_drafter
from allyouneed.infer.cuda_graph.device_search import DeviceSearch
from allyouneed.infer.cuda_graph.row_tables import TokenHistory
from allyouneed.infer.decoding.base import DecodingSpec, RequestState
from allyouneed.infer.decoding.rules import choose_tokens, force_eos_at_limit
from allyouneed.infer.decoding.sampling import token_probs
from allyouneed.infer.decoding.topk import token_log_probs
from allyouneed.infer.speculative.acceptance import is_accepted, resample
from allyouneed.infer.speculative.decode import SpeculativeRow, draft_uniforms
from allyouneed.nn.batch import to_device
from allyouneed.runtime.cuda.multi_token import accept
from allyouneed.runtime.cuda.static_cache import StaticStates


class DeviceSpeculation(DeviceSearch):
    """`row_lengths`, `row_limits` (rows,): rows accept different numbers of tokens. A round's record (rows,
    2 · tokens + 2): tokens, their log-probabilities, how many of them are accepted, and how many were proposed."""

    run_steps = 4
    token_history: TokenHistory
    proposal: Proposal  # of the current round

    def __init__(self, spec: DecodingSpec, states: StaticStates, vocab: int) -> None:
        super().__init__(spec, states, vocab)
        self.vocab, self.ahead, self.group = vocab, spec.draft.ahead, states.group
        self.steps = torch.arange(self.ahead + 1, device=self.device)
        self.row_lengths = torch.zeros(states.rows, dtype=torch.long, device=self.device)
        self.row_limits = torch.ones(states.rows, dtype=torch.long, device=self.device)
        self.token_history = TokenHistory(states, self.options)
        self.record = torch.zeros(self.run_steps, states.rows, 2 * self.ahead + 4, device=self.device)
        self.uniforms: Tensor | None = None
        if self.options.method == "sample":
            self.uniforms = torch.zeros(states.rows, states.capacity, 3, dtype=torch.double, device=self.device)
        self.drafter = device_drafter(spec.draft, self)
        self.drafted: dict[int, list[SpeculativeRow]] = {}  # of each slot
        self.processed = 0  # rounds that the host has read

    # --- on the device ------------------------------------------------------------------------------------------------

    def inputs(self) -> Tensor:
        self.proposal = self.drafter.propose(self)
        tokens = torch.cat((self.last_tokens[:, None], self.proposal.tokens), 1)
        if self.options.has_penalties:
            self.token_history.append(self.proposal.tokens, self.row_lengths)
        return tokens

    def wanted(self) -> Tensor:
        """How many tokens to propose (rows,): none before the first one, and none that would be the last."""
        count = (self.row_limits - self.row_lengths - 1).clamp(min=0, max=self.ahead)
        return torch.where(self.row_lengths > 0, count, 0)

    def allowed(self, logits: Tensor, lengths: Tensor) -> Tensor:
        """Under the rules: logits (n, vocab) of texts with `lengths` (n,) tokens, one or several of each row."""
        if self.options.has_penalties:
            logits = self.token_history.penalize(logits, lengths)
        return self.rules.ban_tokens(logits, lengths)

    def uniforms_of(self, lengths: Tensor) -> Tensor:
        """(rows, 3), or (rows, n, 3) for lengths (rows, n): see `DraftRow`."""
        assert self.uniforms is not None
        places = lengths.view(len(lengths), -1, 1).clamp(max=self.uniforms.shape[1] - 1)
        return self.uniforms.gather(1, places.expand(-1, -1, 3)).view(*lengths.shape, 3)

    def step(self, logits: Tensor) -> None:
        lengths = self.row_lengths[:, None] + self.steps  # (rows, tokens)
        logits = logits.float()
        tokens, right = self.choose(self.allowed(logits, lengths.flatten()), lengths)
        log_probs = token_log_probs(logits, tokens.flatten()).view_as(tokens)
        if self.spec.force_eos:
            tokens, log_probs = force_eos_at_limit(tokens, log_probs, lengths, self.row_limits[:, None], self.spec.eos)
        self.token_history.append(tokens, self.row_lengths)
        self.last_tokens.copy_(tokens.gather(1, right[:, None])[:, 0])
        counts = right + 1
        accept(self.states, self.states.device_lengths, counts)
        self.drafter.accept(counts)
        self.row_lengths.add_(counts)
        numbers = torch.stack((counts, self.proposal.counts), 1)
        self.write_record(torch.cat((tokens.float(), log_probs, numbers.float()), 1))

    def choose(self, logits: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (rows, tokens) and how many of the draft tokens are right (rows,); the tokens after the next one are
        none. `logits` (rows · tokens, vocab): after all rules."""
        drafts, counts, probs = self.proposal
        inside = self.steps[:-1] < counts[:, None]
        uniforms = None if self.uniforms is None else self.uniforms_of(lengths)
        if probs is None:
            numbers = None if uniforms is None else uniforms[..., 2].flatten()
            tokens = choose_tokens(logits, self.options, numbers).view_as(lengths)
            return tokens, leading(inside & (tokens[:, :-1] == drafts))
        assert uniforms is not None
        target = token_probs(logits, self.options).unflatten(0, lengths.shape)  # (rows, tokens, vocab)
        theirs, ours = (each[:, : self.ahead].gather(2, drafts[..., None])[..., 0] for each in (probs, target))
        right = leading(inside & is_accepted(uniforms[:, :-1, 1], theirs, ours))
        at = right[:, None, None].expand(-1, 1, self.vocab)
        rejected = probs.gather(1, at.clamp(max=self.ahead - 1))[:, 0] * (right < counts)[:, None]
        number = uniforms[..., 2].gather(1, right[:, None])[:, 0]
        own = resample(target.gather(1, at)[:, 0], rejected, number)
        return torch.cat((drafts, own[:, None]), 1).scatter(1, right[:, None], own[:, None]), right

    def reset_slots(self, slots: Tensor, limits: Tensor, last_tokens: Tensor) -> None:
        super().reset_slots(slots, limits, last_tokens)
        self.row_lengths.view(self.states.slot_count, -1).index_fill_(0, slots, 0)
        rows = self.row_limits.view(self.states.slot_count, -1)
        rows[slots] = limits[:, None].expand(-1, rows.shape[1])

    def reset(self) -> None:
        super().reset()
        self.drafter.reset()

    # --- on the host --------------------------------------------------------------------------------------------------

    def assign(self, slots: Sequence[int], requests: Sequence[RequestState], first_step: int) -> None:
        super().assign(slots, requests, first_step)
        for slot, state in zip(slots, requests, strict=True):
            prompt = state.request.prompt
            self.drafted[slot] = [SpeculativeRow(list(prompt), len(prompt), state=state) for _ in range(self.group)]
        self.drafter.assign(slots, requests)
        if self.uniforms is None:
            return
        streams = torch.zeros(len(slots), self.group, *self.uniforms.shape[1:], dtype=torch.double)
        for index, state in enumerate(requests):
            for line in range(self.group):
                streams[index, line, : state.limit] = draft_uniforms(state, line)
        at = to_device(torch.tensor(list(slots)), self.device)
        rows = self.uniforms.view(self.states.slot_count, self.group, *self.uniforms.shape[1:])
        rows[at] = to_device(streams, self.device)

    def release(self, slots: list[int]) -> None:
        super().release(slots)
        for slot in slots:
            del self.drafted[slot]

    def process(self, first: int, record: NDArray[np.float32]) -> list[int]:
        for number, values in enumerate(record):
            for slot, entry in self.occupied.items():
                if first + number >= entry.first_step:
                    for line, row in enumerate(self.drafted[slot]):
                        self.extend(row, values[slot * self.group + line])
        self.processed = first + len(record)
        free = [slot for slot, entry in self.occupied.items() if entry.request.finished]
        self.release(free)
        return free

    def extend(self, row: SpeculativeRow, values: NDArray[np.float32]) -> None:
        if row.finished or row.state.cancelled:
            return
        (tokens, log_probs), numbers = np.split(values[:-2], 2), values[-2:]
        count, guessed = numbers.astype(int).tolist()
        row.extend(tokens[:count].astype(int).tolist(), log_probs[:count].tolist(), guessed, self.group)

    def steps_left(self, now: int) -> int:
        """A round adds at least one token."""
        return max((self._left(slot, now) for slot in self.occupied), default=0)

    def has_idle_slot(self, now: int) -> bool:
        return not self.is_occupied.all() or any(self._left(slot, now) <= 0 for slot in self.occupied)

    def _left(self, slot: int, now: int) -> int:
        entry = self.occupied[slot]
        least = min((row.generated for row in self.drafted[slot] if not row.finished), default=entry.request.limit)
        return entry.request.limit - least - (now - max(entry.first_step, self.processed))


def leading(right: Tensor) -> Tensor:
    """How many are True before the first that is not: (rows, n) to (rows,)."""
    return right.long().cumprod(1).sum(1)
