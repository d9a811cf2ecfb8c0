"""Beam search: the rows of a source are its best hypotheses so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from allyouneed.infer.decoding.base import DecodingSpec, RequestState, Search, make_hypothesis, matches_stop
from allyouneed.infer.decoding.beam_record import BeamCandidate, Fate
from allyouneed.infer.decoding.repetition import is_looping
from allyouneed.infer.decoding.rules import (
    Candidates,
    Short,
    add_finished,
    beam_candidates,
    beam_step,
    can_improve,
    close_request,
)
from allyouneed.nn.states.base import concat_rows

if TYPE_CHECKING:
    from allyouneed.infer.decoding.allowed import Columns


class BeamSearch(Search):
    """`rules.beam_step` for each source until `rules.can_improve` is False: it has as many finished hypotheses as beams
    and its best running one, scored as if it ended here, would not be among them; or, with `early`, as soon as it has
    as many."""

    def __init__(self, spec: DecodingSpec, requests: Sequence[RequestState], device: torch.device) -> None:
        super().__init__(spec, requests, device)
        self.scores = torch.zeros(len(requests), 1, device=device)  # one empty hypothesis per source

    def join(self, other: Self) -> None:
        super().join(other)
        self.scores = concat_rows(self.scores, other.scores)

    def keep_requests(self, indices: Sequence[int]) -> list[int]:
        order = super().keep_requests(indices)
        self.scores = self.scores[list(indices)]
        return order

    def step(self, logits: Tensor, compact: bool = False, columns: Columns | None = None) -> list[int] | None:
        logits = logits if columns is None else columns.spread(logits)
        beams, lengths = self.group, self.lengths
        looping = self.close_loops()
        found = self.candidates(*self.begin_step(logits), lengths)
        self.fail_non_finite(found.scores)
        ended = self.rules.is_eos(found.tokens)
        if self.at_limit():
            ended = ended | (self.limits <= lengths + 1)[:, None]
        if self.stop_reach:
            ended = ended | self.match_stops(found, lengths)
        finished, scores, parents, tokens, log_probs = beam_step(found, ended, beams)
        finished[looping] = False
        if self.observed:
            self.record(found, finished, parents, tokens)
        if bool(finished.any()):
            self.collect(finished, found)
        if self.fresh:  # all beams continue the one empty hypothesis
            if self.penalties is not None:
                self.penalties.repeat_rows(beams)
            parents = torch.arange(beams, device=self.device).expand_as(parents)
        self.fresh = False
        indices = self.close_hopeless(scores[:, 0])
        kept = torch.tensor(indices, dtype=torch.long, device=self.device)
        order = (kept[:, None] * beams + parents[kept]).flatten().tolist()
        moves = order != list(range(len(self.tokens)))
        if moves:
            self.reorder(order)
        self._keep(indices)
        self.scores = scores[kept]
        if indices:
            self.append(tokens[kept].flatten(), log_probs[kept].flatten())
        return order if moves else None

    def candidates(self, logits: Tensor, short: Short, lengths: Tensor) -> Candidates:
        normalised = self.penalties is not None
        if self.penalties is not None:  # penalties apply to log-probabilities, as in Hugging Face's beam search
            logits = self.penalties.apply(logits.log_softmax(-1))
        logits = logits.unflatten(0, (len(self.requests), -1))  # (sources, beams, vocab)
        count, limits, force_eos = 2 * self.group, self.limits, self.spec.force_eos
        return beam_candidates(logits, self.scores, count, lengths, limits, self.rules, force_eos, short, normalised)

    def collect(self, finished: Tensor, candidates: Candidates) -> None:
        indices, ranks = finished.nonzero(as_tuple=True)
        scores, parents, tokens, log_probs = (part[indices, ranks] for part in candidates)
        rows = indices * self.group + parents
        past = self.tokens[rows].tolist(), self.log_probs[rows].tolist()
        new = tokens.tolist(), log_probs.tolist(), scores.tolist()
        for index, texts, probs, token, log_prob, score in zip(indices.tolist(), *past, *new, strict=True):
            state, length = self.requests[index], self.length(index)
            text, values = [*texts[:length], token], [*probs[:length], log_prob]
            add_finished(state, make_hypothesis(self.spec, state, text, values, score), self.group)

    def record(self, found: Candidates, finished: Tensor, parents: Tensor, tokens: Tensor) -> None:
        """Tell the observers of requests what became of the candidates. `parents`, `tokens` (sources, beams): of the
        hypotheses that continue."""
        for index, state in enumerate(self.requests):
            record = state.request.observer
            if record is None or state.finished:
                continue
            done, candidates = finished[index].tolist(), []
            rows = list(zip(parents[index].tolist(), tokens[index].tolist(), strict=True))
            for rank, values in enumerate(zip(*(part[index].tolist() for part in found), strict=True)):
                total, beam, token, log_prob = values
                ends, kept = rank < len(done) and done[rank], (beam, token) in rows
                if total > float("-inf"):  # where there are too few candidates, the rest are empty
                    fate: Fate = "finished" if ends else "kept" if kept else "pruned"
                    candidates.append(BeamCandidate(beam, token, log_prob, total, fate))
            order = {(one.beam, one.token): n for n, one in enumerate(candidates) if one.fate == "kept"}
            record.add_step(self.spec, self.length(index), candidates, [order[row] for row in rows if row in order])

    def close_loops(self) -> list[int]:
        """Close sources whose best hypothesis loops; their indices."""
        closed = []
        for index in [] if self.fresh else self.due_for_loop_check():
            state, length = self.requests[index], self.length(index)
            rows = slice(index * self.group, (index + 1) * self.group)
            tokens, log_probs = self.tokens[rows, :length].tolist(), self.log_probs[rows, :length].tolist()
            if not is_looping(tokens[0], self.options):
                continue
            beams = zip(tokens, log_probs, self.scores[index].tolist(), strict=True)
            running = [make_hypothesis(self.spec, state, *beam) for beam in beams if beam[2] > float("-inf")]
            close_request(state, self.options.best, running)
            closed.append(index)
        return closed

    def match_stops(self, found: Candidates, lengths: Tensor) -> Tensor:
        """(sources, candidates) bool: those that meet a stop condition."""
        past = self.recent_tokens(lengths.repeat_interleave(self.group))
        sources = zip(self.requests, found.parents.tolist(), found.tokens.tolist(), strict=True)
        stopped = [
            [matches_stop(state, [*past[index * self.group + p], token]) for p, token in zip(*pairs, strict=True)]
            for index, (state, *pairs) in enumerate(sources)
        ]
        return torch.tensor(stopped, device=self.device)

    def close_hopeless(self, best: Tensor) -> list[int]:
        """Close sources that cannot improve any more; indices of those that continue."""
        indices = []
        for index, (state, score) in enumerate(zip(self.requests, best.tolist(), strict=True)):
            if state.finished:
                continue
            if can_improve(state, self.spec, score, self.length(index) + 1):
                indices.append(index)
            else:
                close_request(state, self.options.best)
        return indices
