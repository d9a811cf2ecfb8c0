"""Speculative decoding (Leviathan et al. 2023): several tokens in one forward pass of the model.

A cheap draft proposes the next tokens (drafts.py). The model reads all of them in one pass, as in prefill. Draft tokens
are accepted from the left as long as the model agrees (acceptance.py), the model adds one token of its own, and
`States.trim` removes the rejected ones, row by row. Greedy decoding generates the same tokens as without a draft; so
does sampling where draft tokens are not sampled, and otherwise samples have the same distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import isnan

import torch
from torch import Tensor

from allyouneed.infer.decoding.allowed import allowed_mask
from allyouneed.infer.decoding.base import RequestState, make_hypothesis, matches_stop
from allyouneed.infer.decoding.repetition import is_looping
from allyouneed.infer.decoding.rules import NonFiniteError, choose_tokens
from allyouneed.infer.decoding.sample import DROP_SHARE
from allyouneed.infer.decoding.sampling import token_probs, uniform_stream
from allyouneed.infer.decoding.topk import token_log_probs
from allyouneed.infer.prefill import DecodableModel
from allyouneed.infer.speculative.acceptance import PositionRules, is_accepted, resample
from allyouneed.infer.speculative.drafts import Draft, DraftRow, DraftTokens
from allyouneed.infer.speculative.stats import DraftStats, SpeculativeHypothesis
from allyouneed.nn.batch import Rows
from allyouneed.nn.states.base import States


@dataclass(eq=False)
class SpeculativeRow(DraftRow):
    """One text of a request."""

    state: RequestState = field(kw_only=True)
    log_probs: list[float] = field(default_factory=list)
    finished: bool = False
    stats: DraftStats = field(default_factory=DraftStats)

    def extend(self, tokens: Sequence[int], log_probs: Sequence[float], guessed: int, group: int) -> None:
        """Append the accepted tokens of one pass over `guessed` draft tokens, and the model's own. `group`: texts of
        the request."""
        self.stats += DraftStats(1, guessed, len(tokens) - 1)
        for token, log_prob in zip(tokens, log_probs, strict=True):
            if not self.finished:  # accepted tokens after the end are dropped
                self._append(token, log_prob, group)

    def _append(self, token: int, log_prob: float, group: int) -> None:
        state, spec = self.state, self.state.spec
        if isnan(log_prob):
            state.fail(NonFiniteError())
            self.finished = True
            return
        if spec.force_eos and self.generated + 1 == state.limit:
            token, log_prob = spec.eos, 0.0
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        ends = token in spec.eos_ids
        if state.streams and group == 1 and not ends:
            state.emit(token)
        tokens = self.tokens[self.prompt_length :]
        self.finished = ends or self.generated >= state.limit or matches_stop(state, tokens)
        self.finished = self.finished or state.cancelled or is_looping(tokens, spec.decoding)
        if self.finished:
            plain = make_hypothesis(spec, state, tokens, self.log_probs, sum(self.log_probs))
            values = {part.name: getattr(plain, part.name) for part in fields(plain)}
            state.hypotheses.append(SpeculativeHypothesis(**values, stats=self.stats))
            if len(state.hypotheses) == group:
                state.complete()


def draft_uniforms(state: RequestState, line: int) -> Tensor:
    """(tokens, 3) of one text of a request: see `DraftRow`. The last column decides tokens without a draft, too: the
    numbers of decoding without one."""
    key = (state.seed, line, *state.request.sample_key)
    more = uniform_stream((*key, 1), 2 * state.limit).view(-1, 2)
    return torch.cat((more, uniform_stream(key, state.limit)[:, None]), 1)


class SpeculativeDecoder:
    """Decodes `group` rows for each request with a draft; a `step` is one forward pass of the model."""

    def __init__(self, model: DecodableModel, states: States, last: Tensor, requests: Sequence[RequestState]) -> None:
        """`last`: hidden states of the last token of each prompt (requests, width)."""
        self.model, self.states, self.device = model, states, states.device
        self.spec = requests[0].spec
        draft: Draft = self.spec.draft
        self.ahead, self.options = draft.ahead, self.spec.decoding
        self.rules = PositionRules(self.spec, self.device)
        self.group = self.options.best if self.rules.samples else 1
        logits = model.head(last).float()
        self.rows = [
            SpeculativeRow(list(prompt), len(prompt), self._uniforms(state, line), state=state)
            for state, prompt in ((state, state.request.prompt) for state in requests)
            for line in range(self.group)
        ]
        self.drafter = draft.start([state.request for state in requests], self.group, self.rules, logits.shape[1])
        if self.group > 1:
            self.states.repeat_rows(self.group)
            logits = logits.repeat_interleave(self.group, 0)
        self._verify(logits, [DraftTokens([]) for _ in self.rows])

    def _uniforms(self, state: RequestState, line: int) -> Tensor | None:
        return draft_uniforms(state, line).to(self.device) if self.rules.samples else None

    @property
    def active(self) -> bool:
        return not all(row.state.finished for row in self.rows)

    @property
    def requests(self) -> list[RequestState]:
        return [row.state for row in self.rows[:: self.group]]

    def close(self) -> None:
        self.states.close()

    def step(self) -> None:
        """Draft, verify all draft tokens in one pass, keep those accepted and one more token."""
        for row in self.rows:
            row.finished = row.finished or row.state.cancelled
        if all(row.finished for row in self.rows):
            return
        self._drop_finished()
        counts = [0 if row.finished else min(self.ahead, row.state.limit - row.generated - 1) for row in self.rows]
        drafts = self.drafter.propose(self.rows, counts)
        new = [
            [] if row.finished else [row.tokens[-1], *draft.tokens]
            for row, draft in zip(self.rows, drafts, strict=True)
        ]
        hidden = self.model.advance(Rows.of(new, self.spec.eos).to(self.device), self.states)
        rows = [row for row, some in enumerate(new) for _ in some]
        positions = [position for some in new for position in range(len(some))]
        self._verify(self.model.head(hidden[rows, positions]).float(), drafts)
        seen = self.states.lengths
        kept = [count if row.finished else len(row.tokens) - 1 for row, count in zip(self.rows, seen, strict=True)]
        if kept != seen:
            self.states.trim(kept)

    def _verify(self, logits: Tensor, drafts: Sequence[DraftTokens]) -> None:
        """Verify drafts by logits (positions, vocab): for each active row one position per draft token, and one
        more."""
        active = [(row, draft) for row, draft in zip(self.rows, drafts, strict=True) if not row.finished]
        if any(row.state.request.allowed is not None for row, _ in active):
            states = [row.state for row, draft in active for _ in range(len(draft.tokens) + 1)]
            logits = logits + allowed_mask(states, logits.shape[1], None, logits.device)
        lengths = [row.generated + n for row, draft in active for n in range(len(draft.tokens) + 1)]
        histories: list[list[int]] = []
        if self.rules.needs_history:
            histories = [x.tokens + d.tokens[:n] for x, d in active for n in range(len(d.tokens) + 1)]
        accepted = self._accept(self.rules.apply(logits, lengths, histories), active)
        first = 0
        positions: list[int] = []
        for (_, draft), tokens in zip(active, accepted, strict=True):
            positions += range(first, first + len(tokens))
            first += len(draft.tokens) + 1
        flat = torch.tensor([token for tokens in accepted for token in tokens], device=logits.device)
        chosen = logits if len(positions) == len(logits) else logits[positions]
        log_probs = iter(token_log_probs(chosen, flat).tolist())
        for (row, draft), tokens in zip(active, accepted, strict=True):
            row.extend(tokens, [next(log_probs) for _ in tokens], len(draft.tokens), self.group)

    def _accept(self, logits: Tensor, active: Sequence[tuple[SpeculativeRow, DraftTokens]]) -> list[list[int]]:
        """The draft tokens of each row that are accepted, and the model's own token after them."""
        if any(draft.probs is not None for _, draft in active):
            return self._accept_sampled(token_probs(logits, self.options), active)
        uniforms = None
        if self.rules.samples:
            uniforms = torch.cat([_next_uniforms(row, len(draft.tokens) + 1)[:, 2] for row, draft in active])
        own = iter(choose_tokens(logits, self.options, uniforms).tolist())
        found = []
        for _, draft in active:
            tokens = [next(own) for _ in range(len(draft.tokens) + 1)]
            right = next((n for n, token in enumerate(draft.tokens) if token != tokens[n]), len(draft.tokens))
            found.append(tokens[: right + 1])
        return found

    def _accept_sampled(self, target: Tensor, active: Sequence[tuple[SpeculativeRow, DraftTokens]]) -> list[list[int]]:
        """Accept sampled draft tokens by chance, and resample in place of the first rejected one. `target`: the model's
        probabilities (positions, vocab)."""
        found, positions, rejected, numbers, first = [], [], [], [], 0
        for row, draft in active:
            count, uniforms = len(draft.tokens), _next_uniforms(row, len(draft.tokens) + 1)
            right = 0
            if draft.probs is not None:
                index = torch.tensor(draft.tokens, device=target.device)[:, None]
                both = [probs.gather(1, index)[:, 0] for probs in (draft.probs, target[first : first + count])]
                right = int(is_accepted(uniforms[:count, 1], both[0], both[1]).long().cumprod(0).sum())
            found.append(draft.tokens[:right])
            positions.append(first + right)
            rejected.append(draft.probs[right] if draft.probs is not None and right < count else None)
            numbers.append(uniforms[right, 2])
            first += count + 1
        theirs = torch.stack([target.new_zeros(target.shape[1]) if probs is None else probs for probs in rejected])
        own = resample(target[positions], theirs, torch.stack(numbers)).tolist()
        return [[*tokens, token] for tokens, token in zip(found, own, strict=True)]

    def _drop_finished(self) -> None:
        """Drop requests that are done when enough of them are, for dropping copies the states."""
        size, count = self.group, len(self.rows) // self.group
        stay = [n for n in range(count) if not all(row.finished for row in self.rows[n * size : (n + 1) * size])]
        if DROP_SHARE * (count - len(stay)) < count or len(stay) == count:
            return
        rows = [index * size + line for index in stay for line in range(size)]
        self.states.select(rows)
        self.drafter.select(rows)
        self.rows = [self.rows[row] for row in rows]


def _next_uniforms(row: SpeculativeRow, count: int) -> Tensor:
    """(count, 3): of the next tokens of a row."""
    assert row.uniforms is not None
    return row.uniforms[row.generated : row.generated + count]
