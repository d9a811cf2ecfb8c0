"""Beam search on the device (device_search.py). Stop conditions run on the host, between two stages of a step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allyouneed.infer.cuda_graph.device_search import DeviceSearch, SearchStage
from allyouneed.infer.decoding.base import DecodingSpec, make_hypothesis, matches_stop
from allyouneed.infer.decoding.repetition import has_check, is_check_due, is_looping
from allyouneed.infer.decoding.rules import (
    Candidates,
    NonFiniteError,
    Short,
    add_finished,
    beam_candidates,
    beam_step,
    best_candidates,
    can_improve,
    close_request,
)
from allyouneed.kernels import usable
from allyouneed.runtime.cuda.static_cache import StaticStates


class DeviceBeamSearch(DeviceSearch):
    """Beam search. A step's record (slots, beams, 9): a candidate that may be finished (score, parent, token, its
    log-probability, whether it is finished), and a beam that continues (parent, token, log-probability, score)."""

    def __init__(self, spec: DecodingSpec, states: StaticStates, vocab: int, stops: bool = False) -> None:
        super().__init__(spec, states, vocab, stops)
        self.beams = states.group
        self.found: Candidates | None = None  # of the current step, if stop conditions are checked
        self.stopped = torch.zeros(states.slot_count, 2 * self.beams, dtype=torch.bool, device=self.device)
        self.record = torch.zeros(self.run_steps, states.slot_count, self.beams, 9, device=self.device)
        self.scores = torch.zeros(states.slot_count, self.beams, device=self.device)
        self.first_rows = torch.arange(states.slot_count, device=self.device)[:, None] * self.beams

    def reset_slots(self, slots: Tensor, limits: Tensor, last_tokens: Tensor) -> None:
        super().reset_slots(slots, limits, last_tokens)
        self.scores.index_fill_(0, slots, -torch.inf)  # all beams are equal at first: only one continues
        self.scores[:, 0].index_fill_(0, slots, 0.0)

    def candidates(self, logits: Tensor) -> Candidates:
        """The best candidates of each slot, twice as many as beams."""
        count, spec, least = 2 * self.beams, self.spec, self.rules.min_tokens
        plain = not self.penalizes and self.row_rules is None and not spec.force_eos
        if plain and usable(logits) and count.bit_count() == 1 and count <= min(32, logits.shape[1]):
            from allyouneed.kernels.triton.topk import topk

            best, tokens, normaliser = topk(logits, self.bans, self.lengths, least, count)
            log_probs, tokens = (part.unflatten(0, (-1, self.beams)) for part in (best - normaliser, tokens))
            return best_candidates(log_probs, tokens, self.scores, count)
        logits = logits.float() if self.row_rules is None else self.row_rules.apply(logits.float())
        if self.token_history is not None and self.penalizes:  # of log-probabilities, as in host search
            each = self.lengths.repeat_interleave(self.beams)
            logits = self.token_history.penalize(logits.log_softmax(-1), each)
        logits = logits.unflatten(0, (-1, self.beams))  # (slots, beams, vocab)
        short: Short = "some" if least > 0 else "none"
        rules = (self.lengths, self.limits, self.rules, spec.force_eos, short, self.penalizes)
        return beam_candidates(logits, self.scores, count, *rules)

    def search_stages(self, logits: Callable[[], Tensor]) -> list[SearchStage]:
        if not self.stops:
            return super().search_stages(logits)
        return [
            SearchStage(lambda: self.keep_candidates(self.candidates(logits())), self.match_stops),
            SearchStage(self.select),
        ]

    def keep_candidates(self, found: Candidates) -> None:
        if self.found is None:
            self.found = Candidates(*(part.clone() for part in found))
        for kept, part in zip(self.found, found, strict=True):
            kept.copy_(part)

    def match_stops(self, number: int) -> None:
        """Which candidates meet a stop condition."""
        assert self.found is not None
        stopped = torch.zeros(self.stopped.shape, dtype=torch.bool)
        watched = [slot for slot, entry in self.occupied.items() if entry.request.request.stop is not None]
        parents, tokens = (part.tolist() for part in self.found[1:3]) if watched else ([], [])
        for slot in watched:
            past = self.texts([slot], number).tolist()
            pairs = zip(parents[slot], tokens[slot], strict=True)
            state = self.occupied[slot].request
            stopped[slot] = torch.tensor([matches_stop(state, [*past[parent], token]) for parent, token in pairs])
        self.stopped.copy_(stopped)

    def step(self, logits: Tensor) -> None:
        self.choose(self.candidates(logits))

    def select(self) -> None:
        assert self.found is not None
        self.choose(self.found)

    def choose(self, found: Candidates) -> None:
        ended = self.rules.is_eos(found.tokens) | (self.limits <= self.lengths + 1)[:, None] | self.stopped
        finished, scores, parents, tokens, log_probs = beam_step(found, ended, self.beams)
        self.scores.copy_(scores)
        rows = (self.first_rows + parents).flatten()
        self.states.reorder(rows)
        if self.token_history is not None:
            self.token_history.reorder(rows)
            self.token_history.append(tokens.flatten(), self.lengths.repeat_interleave(self.beams))
        if self.row_rules is not None:
            self.row_rules.reorder(rows)
            self.row_rules.append(tokens.flatten())
        self.last_tokens.copy_(tokens.flatten())
        self.lengths.add_(1)
        candidates = [part[:, : self.beams].float() for part in (*found, finished)]
        self.write_record(torch.stack([*candidates, parents.float(), tokens.float(), log_probs, scores], -1))

    def process(self, first: int, record: NDArray[np.float32]) -> list[int]:
        self.add_history(first, record)
        free: list[int] = []
        for number, step in enumerate(record):  # (slots, beams, 9)
            lengths = first + number - self.first_steps
            here = self.is_occupied & (lengths >= 0)
            for slot in np.flatnonzero(here & np.isnan(step[..., 0]).any(1)).tolist():
                self.occupied[slot].request.fail(NonFiniteError())
            finished = step[..., 4].astype(bool) & here[:, None]
            for first_step in set(self.first_steps[finished.any(1)].tolist()):
                some = finished & (self.first_steps == first_step)[:, None]
                self.collect(first_step, some, first + number - first_step, step)
            best, checked = step[:, 0, 8], has_check(lengths, lengths + 1, self.options)
            entries = self.occupied.values()
            unfinished = np.zeros_like(here)  # slots without a finished hypothesis: they can only continue
            unfinished[list(self.occupied)] = [not e.request.cancelled and not e.request.hypotheses for e in entries]
            for slot in np.flatnonzero(here & ~(unfinished & (best > -np.inf) & ~checked)).tolist():
                if self.close_slot(slot, float(best[slot]), int(lengths[slot]) + 1):
                    self.release([slot])
                    free.append(slot)
        return free

    def close_slot(self, slot: int, best: float, length: int) -> bool:
        """Close the request of a slot if it is cancelled, cannot improve, or its best hypothesis loops."""
        entry = self.occupied[slot]
        state, running = entry.request, []
        if not state.cancelled and can_improve(state, self.spec, best, length):
            if not is_check_due(length, self.options):
                return False
            slots, beams = np.full(self.beams, slot), np.arange(self.beams)
            tokens, log_probs = (each.tolist() for each in self.trace_back(entry.first_step, length, slots, beams))
            if not is_looping(tokens[0], self.options):
                return False
            scores = self.history.since(entry.first_step, length)[-1, slot, :, 8].tolist()
            every = zip(tokens, log_probs, scores, strict=True)
            running = [make_hypothesis(self.spec, state, *beam) for beam in every if beam[2] > float("-inf")]
        close_request(state, self.options.best, running)
        return True

    def trace_back(
        self, first_step: int, length: int, slots: NDArray[np.int64], beams: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens and log-probabilities (hypotheses, length) of what these beams held after `length` steps."""
        tokens, log_probs = np.empty((len(slots), length), np.int64), np.empty((len(slots), length), np.float32)
        for number, step in reversed(list(enumerate(self.history.since(first_step, length)))):
            values = step[slots, beams]  # (hypotheses, 9)
            tokens[:, number], log_probs[:, number], beams = values[:, 6], values[:, 7], values[:, 5].astype(int)
        return tokens, log_probs

    def collect(self, first_step: int, finished: NDArray[np.bool_], length: int, step: NDArray[np.float32]) -> None:
        """Finished hypotheses (slots, beams) of slots that started at this step."""
        slots, beams = finished.nonzero()
        scores, parents, tokens, log_probs, _ = step[slots, beams, :5].T
        past, past_log_probs = self.trace_back(first_step, length, slots, parents.astype(int))
        texts = np.column_stack((past, tokens.astype(int))).tolist()
        values = np.column_stack((past_log_probs, log_probs)).tolist()
        for slot, text, own, score in zip(slots.tolist(), texts, values, scores.tolist(), strict=True):
            state = self.occupied[slot].request
            add_finished(state, make_hypothesis(self.spec, state, text, own, score), self.beams)
