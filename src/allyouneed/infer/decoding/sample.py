"""Greedy decoding and sampling: rows are independent of each other."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from allyouneed.infer.decoding.base import DecodingSpec, RequestState, Search, make_hypothesis, matches_stop
from allyouneed.infer.decoding.repetition import is_looping
from allyouneed.infer.decoding.rules import NonFiniteError, Short, choose_tokens, force_eos_at_limit
from allyouneed.infer.decoding.sampling import uniform_stream, uniforms_at
from allyouneed.infer.decoding.topk import greedy_tokens, token_log_probs
from allyouneed.nn.states.base import concat_rows

if TYPE_CHECKING:
    from allyouneed.infer.decoding.allowed import Columns

DROP_SHARE = 8  # rows are dropped once one of this many is done, since dropping copies the states


class IndependentSearch(Search):
    """Each row chooses one token at a time."""

    def __init__(self, spec: DecodingSpec, requests: Sequence[RequestState], device: torch.device) -> None:
        super().__init__(spec, requests, device)
        self.finished = torch.zeros(len(self.tokens), dtype=torch.bool, device=device)
        self.uniforms: Tensor | None = None  # (rows, tokens)
        if self.options.method == "sample":
            self.uniforms = self.draw_uniforms()

    def draw_uniforms(self) -> Tensor:
        """(rows, columns): the numbers that decide each row's tokens."""
        streams = torch.zeros(self.tokens.shape, dtype=torch.double)
        for row, stream in enumerate(streams):
            state = self.request_of(row)
            count = min(state.limit, len(stream))
            stream[:count] = uniform_stream((state.seed, row % self.group, *state.request.sample_key), count)
        return streams.to(self.device)

    def widen(self, width: int) -> None:
        if width > self.tokens.shape[1]:
            super().widen(width)
            self.uniforms = None if self.uniforms is None else self.draw_uniforms()

    def _update(self) -> None:
        super()._update()
        if self.group > 1:  # (rows,)
            self.limits, self.first_steps = (x.repeat_interleave(self.group) for x in (self.limits, self.first_steps))

    def join(self, other: Self) -> None:
        super().join(other)
        self.finished = concat_rows(self.finished, other.finished)
        if self.uniforms is not None and other.uniforms is not None:
            self.uniforms = concat_rows(self.uniforms, other.uniforms)

    def step(self, logits: Tensor, compact: bool = False, columns: Columns | None = None) -> list[int] | None:
        if columns is not None and not self.is_greedy:
            logits, columns = columns.spread(logits), None
        if self.fresh and self.group > 1:
            logits = logits.repeat_interleave(self.group, 0)
            if self.penalties is not None:
                self.penalties.repeat_rows(self.group)
        self.fresh = False
        tokens, log_probs = self.choose(*self.begin_step(logits), columns)
        if self.spec.force_eos:
            tokens, log_probs = force_eos_at_limit(tokens, log_probs, self.lengths, self.limits, self.spec.eos)
        self.append(tokens, log_probs)
        on_cpu, streams = self.device.type == "cpu", self.group == 1 and self.streams
        newest = tokens.tolist() if on_cpu or streams else []
        invalid = (on_cpu or streams) and self.fail_non_finite(log_probs)
        for state, token in zip(self.requests, newest, strict=True) if streams else ():
            if state.streams and not (state.done or state.cancelled) and token not in self.rules.eos_ids:
                state.emit(token)
        due, at_limit = self.due_for_loop_check() if self.options.loops else [], self.steps >= self.first_limit
        may_end = (
            invalid or due or at_limit or self.stop_reach or not on_cpu or not self.rules.eos_ids.isdisjoint(newest)
        )
        if may_end and self.collect_ended(tokens, log_probs, at_limit, due):
            return self.drop_finished(compact)
        if not compact and not any([state.cancelled for state in self.requests]):
            return None
        return self.drop_finished(compact)

    def collect_ended(self, tokens: Tensor, log_probs: Tensor, at_limit: bool, due: Sequence[int]) -> bool:
        """Collect the texts that end with these tokens (rows,); whether there are any."""
        ended = self.rules.is_eos(tokens) | log_probs.isnan()
        if at_limit:
            ended = ended | (self.limits <= self.lengths)
        if self.stop_reach:
            recent = self.recent_tokens(self.lengths)
            stopped = [matches_stop(self.request_of(row), some) for row, some in enumerate(recent)]
            ended = ended | torch.tensor(stopped, device=self.device)
        if due:
            ended = ended | self.find_loops(due)
        ended = ended & ~self.finished
        if not bool(ended.any()):
            return False
        self.collect(ended.nonzero()[:, 0].tolist())
        self.finished |= ended
        return True

    @property
    def is_greedy(self) -> bool:
        """Whether its tokens are the likeliest as the model says."""
        return self.uniforms is None and self.penalties is None and self.spec.logits_processor is None

    def choose(self, logits: Tensor, short: Short, columns: Columns | None = None) -> tuple[Tensor, Tensor]:
        """Tokens and their log-probabilities (rows,), before penalties, bans and filters. `columns`: those of the
        logits, if the search `is_greedy`."""
        if self.uniforms is None and self.penalties is None and short != "some":
            banned = self.rules.banned if short == "none" else self.rules.banned_while_short
            if columns is None:
                return greedy_tokens(logits, banned)
            found, log_probs = greedy_tokens(logits, columns.find(banned))
            return columns.tokens[found], log_probs
        logits = logits if columns is None else columns.spread(logits)
        lengths = self.lengths
        allowed = logits if self.penalties is None else self.penalties.apply(logits)
        allowed = self.rules.ban_tokens(allowed, lengths, short)
        uniforms = None if self.uniforms is None else uniforms_at(self.uniforms, lengths)
        tokens = choose_tokens(allowed, self.options, uniforms)
        return tokens, token_log_probs(logits, tokens)

    def find_loops(self, indices: Sequence[int]) -> Tensor:
        """(rows,) bool: rows of these requests that loop."""
        rows = [index * self.group + line for index in indices for line in range(self.group)]
        found = torch.zeros(len(self.tokens), dtype=torch.bool)
        for row, tokens in zip(rows, self.tokens[rows, : self.steps].tolist(), strict=True):
            found[row] = is_looping(tokens[: self.length(row // self.group)], self.options)
        return found.to(self.device)

    def request_of(self, row: int) -> RequestState:
        return self.requests[row // self.group]

    def collect(self, rows: list[int]) -> None:
        tokens, log_probs = self.tokens[rows].tolist(), self.log_probs[rows].tolist()
        for row, text, values in zip(rows, tokens, log_probs, strict=True):
            state, length = self.request_of(row), self.length(row // self.group)
            values = values[:length]
            if isnan(values[-1]):
                state.fail(NonFiniteError())
                continue
            state.hypotheses.append(make_hypothesis(self.spec, state, text[:length], values, sum(values)))
            if len(state.hypotheses) == self.group:
                state.complete()

    def drop_finished(self, compact: bool) -> list[int] | None:
        left = [index for index, state in enumerate(self.requests) if not (state.done or state.cancelled)]
        over = len(self.requests) - len(left)
        if not over or (DROP_SHARE * over < len(self.requests) and not compact):
            return None
        return self.keep_requests(left) if left else []  # the batch drops a search without rows

    def keep_requests(self, indices: Sequence[int]) -> list[int]:
        order = super().keep_requests(indices)
        index = torch.tensor(order, dtype=torch.long, device=self.device)
        self.finished = self.finished.index_select(0, index)
        self.uniforms = None if self.uniforms is None else self.uniforms.index_select(0, index)
        return order
