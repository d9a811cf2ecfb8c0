"""Search on the device: the next tokens are chosen without the host, which reads them some steps later. The device
never waits: whether a text has ended does not change how it continues, only when the host stops reading it. The tokens
of a run of steps reach the host as one record. The rules are those of host search (decoding/rules.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allyouneed.infer.cuda_graph.row_tables import RowRuleTables, TokenHistory
from allyouneed.infer.decoding.base import (
    DecodingSpec,
    RequestState,
    any_row_rules,
    make_hypothesis,
    matches_stop,
)
from allyouneed.infer.decoding.repetition import find_loop, has_check, is_check_due, is_looping
from allyouneed.infer.decoding.rules import (
    Candidates,
    Short,
    TokenRules,
    add_finished,
    beam_candidates,
    beam_step,
    best_candidates,
    can_improve,
    choose_tokens,
    close_request,
    force_eos_at_limit,
)
from allyouneed.infer.decoding.sampling import uniform_stream, uniforms_at
from allyouneed.infer.decoding.topk import token_log_probs
from allyouneed.kernels import usable
from allyouneed.nn.batch import to_device
from allyouneed.runtime.cuda.static_cache import StaticStates

RUN_STEPS = 8  # steps of a record


@dataclass(eq=False, slots=True)
class SlotRequest:
    """The request in a slot, and the step at which it started."""

    request: RequestState
    first_step: int


class StepHistory:
    """The records (steps, …) since the oldest request in a slot started."""

    def __init__(self) -> None:
        self.begin = 0
        self.steps: NDArray[np.float32] = np.empty(0, dtype=np.float32)

    def add(self, first: int, record: NDArray[np.float32], oldest: int) -> None:
        """Append steps from number `first` on; after steps that were not read, start anew."""
        if first != self.begin + len(self.steps):
            self.begin, self.steps = first, self.steps[:0]
        if oldest - self.begin > max(256, len(self.steps) // 2):
            self.steps, self.begin = self.steps[oldest - self.begin :], oldest
        self.steps = np.concatenate([self.steps, record]) if len(self.steps) else record.copy()

    def since(self, first_step: int, count: int) -> NDArray[np.float32]:
        return self.steps[first_step - self.begin : first_step - self.begin + count]


class DeviceSearch(ABC):
    """On the device: `last_tokens` (rows,); `lengths` (tokens generated) and `limits` (slots,); `record` (run_steps, …)
    and its `record_step`. On the host: `occupied`, the request of each slot."""

    record: Tensor
    run_steps = RUN_STEPS

    def __init__(self, spec: DecodingSpec, states: StaticStates, vocab: int) -> None:
        self.spec, self.options, self.states = spec, spec.decoding, states
        self.device, slots = states.device, states.slot_count
        self.rules = TokenRules(spec, self.device)
        self.bans = self.rules.ban_table(vocab)
        self.last_tokens = torch.zeros(states.rows, dtype=torch.long, device=self.device)
        self.lengths = torch.zeros(slots, dtype=torch.long, device=self.device)
        self.limits = torch.ones(slots, dtype=torch.long, device=self.device)
        self.record_step = torch.zeros(1, dtype=torch.long, device=self.device)
        self.token_history = TokenHistory(states, self.options) if self.options.has_penalties else None
        self.row_rules = RowRuleTables(states, vocab) if spec.logits_processor is any_row_rules else None
        self.occupied: dict[int, SlotRequest] = {}
        self.first_steps, self.host_limits = np.zeros((2, slots), dtype=np.int64)
        self.is_occupied = np.zeros(slots, dtype=bool)
        self.history = StepHistory()

    def inputs(self) -> Tensor:
        """The tokens that the model reads next."""
        return self.last_tokens

    @abstractmethod
    def step(self, logits: Tensor) -> None:
        """Choose the next tokens by logits (rows, vocab), without the host."""

    @abstractmethod
    def process(self, first: int, record: NDArray[np.float32]) -> list[int]:
        """Read the record of steps from number `first` on; the slots that are free now."""

    def reset_slots(self, slots: Tensor, limits: Tensor, last_tokens: Tensor) -> None:
        """On the device: new texts in these slots, which continue from `last_tokens`; all (slots,)."""
        self.lengths.index_fill_(0, slots, 0)
        self.limits[slots] = limits
        rows = self.last_tokens.view(self.states.slot_count, -1)
        rows[slots] = last_tokens[:, None].expand(-1, rows.shape[1])

    def reset(self) -> None:
        """Forget the steps of a warm-up."""
        self.states.device_lengths.zero_()
        self.record_step.zero_()

    def assign(self, slots: Sequence[int], requests: Sequence[RequestState], first_step: int) -> None:
        """On the host: the requests of these slots."""
        self.occupied |= {slot: SlotRequest(state, first_step) for slot, state in zip(slots, requests, strict=True)}
        self.first_steps[slots], self.is_occupied[slots] = first_step, True
        self.host_limits[slots] = [state.limit for state in requests]
        if self.token_history is not None:
            self.token_history.assign(slots, [state.request.prompt for state in requests])
        if self.row_rules is not None:
            self.row_rules.assign(slots, [state.spec.row_rules for state in requests])

    def release(self, slots: list[int]) -> None:
        for slot in slots:
            del self.occupied[slot]
        self.is_occupied[slots] = False

    def write_record(self, values: Tensor) -> None:
        self.record.index_copy_(0, self.record_step, values[None])
        self.record_step.add_(1)

    def add_history(self, first: int, record: NDArray[np.float32]) -> None:
        oldest = int(self.first_steps[self.is_occupied].min()) if self.occupied else first
        self.history.add(first, record, min(first, oldest))

    def steps_left(self, now: int) -> int:
        """The most steps that any request in a slot may still need."""
        return int((self.first_steps + self.host_limits)[self.is_occupied].max()) - now if self.occupied else 0

    def has_idle_slot(self, now: int) -> bool:
        """Whether some slot has no request that needs the next step; an end token may tell later of more."""
        return not self.is_occupied.all() or int((self.first_steps + self.host_limits).min()) <= now


class DeviceIndependentSearch(DeviceSearch):
    """Greedy decoding and sampling. A step's record: tokens and their log-probabilities (2, rows)."""

    def __init__(self, spec: DecodingSpec, states: StaticStates, vocab: int) -> None:
        super().__init__(spec, states, vocab)
        self.group = states.group
        self.record = torch.zeros(RUN_STEPS, 2, states.rows, device=self.device)
        self.uniforms: Tensor | None = None
        if self.options.method == "sample":
            self.uniforms = torch.zeros(states.rows, states.capacity, dtype=torch.double, device=self.device)
        # rows: that have not ended; whose tokens only have to be streamed; whose tokens are read one by one
        self.active, self.streamed, self.watched = np.zeros((3, states.rows), dtype=bool)

    def assign(self, slots: Sequence[int], requests: Sequence[RequestState], first_step: int) -> None:
        super().assign(slots, requests, first_step)
        self.active.reshape(-1, self.group)[slots] = True
        streamed = [[state.streams and state.request.stop is None and self.group == 1] for state in requests]
        watched = [[state.request.stop is not None or state.streams] for state in requests]
        self.streamed.reshape(-1, self.group)[slots] = streamed
        self.watched.reshape(-1, self.group)[slots] = np.array(watched) & ~np.array(streamed)
        if self.uniforms is None:
            return
        streams = torch.zeros(len(slots), self.group, self.states.capacity, dtype=torch.double)
        for index, state in enumerate(requests):
            for line in range(self.group):
                count = min(state.limit, self.states.capacity)
                streams[index, line, :count] = uniform_stream((state.seed, line, *state.request.sample_key), count)
        on_device = to_device(torch.tensor(list(slots)), self.device)
        rows = self.uniforms.view(self.states.slot_count, self.group, -1)
        rows[on_device] = to_device(streams, self.device)

    def step(self, logits: Tensor) -> None:
        plain = self.uniforms is None and self.token_history is None and self.row_rules is None
        plain = plain and not self.spec.force_eos
        if plain and self.group == 1 and usable(logits):
            from allyouneed.kernels.triton.topk import argmax_step

            least = self.rules.min_tokens
            argmax_step(logits, self.bans, self.lengths, least, self.last_tokens, self.record, self.record_step)
            self.record_step.add_(1)
            return
        lengths, limits = self.lengths, self.limits
        if self.group > 1:
            lengths, limits = (x.repeat_interleave(self.group) for x in (lengths, limits))
        logits = logits.float() if self.row_rules is None else self.row_rules.apply(logits.float())
        uniforms = None if self.uniforms is None else uniforms_at(self.uniforms, lengths)
        allowed = logits if self.token_history is None else self.token_history.penalize(logits, lengths)
        tokens = choose_tokens(self.rules.ban_tokens(allowed, lengths), self.options, uniforms)
        log_probs = token_log_probs(logits, tokens)
        if self.spec.force_eos:
            tokens, log_probs = force_eos_at_limit(tokens, log_probs, lengths, limits, self.spec.eos)
        if self.token_history is not None:
            self.token_history.append(tokens, lengths)
        if self.row_rules is not None:
            self.row_rules.append(tokens)
        self.last_tokens.copy_(tokens)
        self.lengths.add_(1)
        self.write_record(torch.stack((tokens.to(log_probs.dtype), log_probs)))

    def process(self, first: int, record: NDArray[np.float32]) -> list[int]:
        self.add_history(first, record)
        first_steps, limits = (np.repeat(each, self.group) for each in (self.first_steps, self.host_limits))
        before = first - first_steps  # tokens of each row before this record
        here = self.active & (before >= 0)  # the others started after these steps
        counts = np.minimum(len(record), limits - before)
        is_eos = np.isin(record[:, 0], list(self.rules.eos_ids))  # (steps, rows)
        until_eos = np.where(is_eos.any(0), is_eos.argmax(0) + 1, len(record) + 1)
        ended = (until_eos <= counts) | (before + counts >= limits)
        after = before + np.minimum(until_eos, counts)
        # only rows to which something happens are read one by one
        checked = has_check(before, after, self.options)
        self.stream(np.flatnonzero(here & self.streamed & ~checked), record, after - before)
        for row in np.flatnonzero(here & (self.watched | checked)).tolist():
            count, stopped = self.read_row(row, int(before[row]), int(after[row]))
            after[row], ended[row] = count, ended[row] or stopped
        self.collect(np.flatnonzero(here & ended), first_steps, after)
        self.active &= ~(here & ended)
        cancelled = [slot for slot, entry in self.occupied.items() if entry.request.cancelled]
        done = np.flatnonzero(self.is_occupied & ~self.active.reshape(-1, self.group).any(1)).tolist()
        for slot in done:
            self.occupied[slot].request.complete()
        free = list(dict.fromkeys([*done, *cancelled]))
        self.release(free)
        return free

    def release(self, slots: list[int]) -> None:
        super().release(slots)
        self.active.reshape(-1, self.group)[slots] = False

    def stream(self, rows: NDArray[np.int64], record: NDArray[np.float32], counts: NDArray[np.int64]) -> None:
        """Emit the tokens that these rows have in a record, each so many; the end token is not emitted."""
        texts = record[:, 0, rows].T.astype(int).tolist()
        for row, text, count in zip(rows.tolist(), texts, counts[rows].tolist(), strict=True):
            ends = text[count - 1] in self.rules.eos_ids
            self.occupied[row].request.emit_all(text[: count - ends])

    def read_row(self, row: int, before: int, after: int) -> tuple[int, bool]:
        """Emit the tokens of a row from `before` to `after`, up to a loop or a stop condition; how many tokens it has
        then, and whether it stops there."""
        entry = self.occupied[row // self.group]
        state = entry.request
        tokens: list[int] = self.history.since(entry.first_step, after)[:, 0, row].astype(int).tolist()
        loop = find_loop(tokens, self.options, before)
        after = after if loop is None else loop
        if state.request.stop is None and not state.streams:
            return after, loop is not None
        for count in range(before + 1, after + 1):
            token = tokens[count - 1]
            emits = self.group == 1 and not state.cancelled and token not in self.rules.eos_ids
            if state.streams and emits:
                state.emit(token)
            if state.cancelled or matches_stop(state, tokens[:count]):
                return count, True
        return after, loop is not None

    def collect(self, rows: NDArray[np.int64], first_steps: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Hypotheses of rows that have ended, with so many tokens; those that started and ended together at once."""
        for first_step, count in set(zip(first_steps[rows].tolist(), counts[rows].tolist(), strict=True)):
            some = rows[(first_steps[rows] == first_step) & (counts[rows] == count)]
            tokens, log_probs = self.history.since(first_step, count)[:, :, some].transpose(1, 2, 0)
            texts = zip(some.tolist(), tokens.astype(int).tolist(), log_probs.tolist(), strict=True)
            for row, text, values in texts:
                state = self.occupied[row // self.group].request
                state.hypotheses.append(make_hypothesis(self.spec, state, text, values, sum(values)))


class DeviceBeamSearch(DeviceSearch):
    """Beam search. A step's record (slots, beams, 9): a candidate that may be finished (score, parent, token, its
    log-probability, whether it is finished), and a beam that continues (parent, token, log-probability, score)."""

    def __init__(self, spec: DecodingSpec, states: StaticStates, vocab: int) -> None:
        super().__init__(spec, states, vocab)
        self.beams = states.group
        self.record = torch.zeros(RUN_STEPS, states.slot_count, self.beams, 9, device=self.device)
        self.scores = torch.zeros(states.slot_count, self.beams, device=self.device)
        self.first_rows = torch.arange(states.slot_count, device=self.device)[:, None] * self.beams

    def reset_slots(self, slots: Tensor, limits: Tensor, last_tokens: Tensor) -> None:
        super().reset_slots(slots, limits, last_tokens)
        self.scores.index_fill_(0, slots, -torch.inf)  # all beams are equal at first: only one continues
        self.scores[:, 0].index_fill_(0, slots, 0.0)

    def candidates(self, logits: Tensor) -> Candidates:
        """The best candidates of each slot, twice as many as beams."""
        count, spec, least = 2 * self.beams, self.spec, self.rules.min_tokens
        plain = self.token_history is None and not spec.force_eos
        if plain and usable(logits) and count.bit_count() == 1 and count <= min(32, logits.shape[1]):
            from allyouneed.kernels.triton.topk import topk

            best, tokens, normaliser = topk(logits, self.bans, self.lengths, least, count)
            log_probs, tokens = (part.unflatten(0, (-1, self.beams)) for part in (best - normaliser, tokens))
            return best_candidates(log_probs, tokens, self.scores, count)
        logits = logits.float()
        if self.token_history is not None:  # penalties apply to log-probabilities, as in host search
            each = self.lengths.repeat_interleave(self.beams)
            logits = self.token_history.penalize(logits.log_softmax(-1), each)
        logits = logits.unflatten(0, (-1, self.beams))  # (slots, beams, vocab)
        short: Short = "some" if least > 0 else "none"
        rules = (self.lengths, self.limits, self.rules, spec.force_eos, short, self.token_history is not None)
        return beam_candidates(logits, self.scores, count, *rules)

    def step(self, logits: Tensor) -> None:
        found = self.candidates(logits)
        ended = self.rules.is_eos(found.tokens) | (self.limits <= self.lengths + 1)[:, None]
        finished, scores, parents, tokens, log_probs = beam_step(found, ended, self.beams)
        self.scores.copy_(scores)
        rows = (self.first_rows + parents).flatten()
        self.states.reorder(rows)
        if self.token_history is not None:
            self.token_history.reorder(rows)
            self.token_history.append(tokens.flatten(), self.lengths.repeat_interleave(self.beams))
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
            tokens, log_probs = (each.tolist() for each in self.texts(entry.first_step, length, slots, beams))
            if not is_looping(tokens[0], self.options):
                return False
            scores = self.history.since(entry.first_step, length)[-1, slot, :, 8].tolist()
            every = zip(tokens, log_probs, scores, strict=True)
            running = [make_hypothesis(self.spec, state, *beam) for beam in every if beam[2] > float("-inf")]
        close_request(state, self.options.best, running)
        return True

    def texts(
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
        past, past_log_probs = self.texts(first_step, length, slots, parents.astype(int))
        texts = np.column_stack((past, tokens.astype(int))).tolist()
        values = np.column_stack((past_log_probs, log_probs)).tolist()
        for slot, text, own, score in zip(slots.tolist(), texts, values, scores.tolist(), strict=True):
            state = self.occupied[slot].request
            add_finished(state, make_hypothesis(self.spec, state, text, own, score), self.beams)
