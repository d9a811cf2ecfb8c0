"""Search on the device: the next tokens are chosen without the host, which reads them some steps later. The device
never waits: whether a text has ended does not change how it continues, only when the host stops reading it. The tokens
of a run of steps reach the host as one record. The rules are those of host search (decoding/rules.py).

Where the host takes part in every step (`waits`), by a logits processor or by stop conditions of beams, a step is cut
into stages, and the host runs between two of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allyouneed.infer.cuda_graph.row_tables import RowRuleTables, TokenHistory
from allyouneed.infer.decoding.base import (
    DecodingSpec,
    Hypothesis,
    RequestState,
    any_processor,
    any_row_rules,
    make_hypothesis,
    matches_stop,
    process_logits,
)
from allyouneed.infer.decoding.repetition import find_loop, has_check, next_check
from allyouneed.infer.decoding.rules import NonFiniteError, TokenRules, choose_tokens, force_eos_at_limit
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


class SearchStage(NamedTuple):
    """A part of a step: `run` on the device, without the host; then `after` on the host, given the step's number."""

    run: Callable[[], None]
    after: Callable[[int], None] | None = None


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
    """Kept on the device: `last_tokens` (rows,); `lengths` (tokens generated) and `limits` (slots,); `record`
    (run_steps, …) and its `record_step`. On the host: `occupied`, the request of each slot."""

    record: Tensor
    run_steps = RUN_STEPS

    def __init__(self, spec: DecodingSpec, states: StaticStates, vocab: int, stops: bool = False) -> None:
        """`stops`: stop conditions are checked in every step."""
        self.spec, self.options, self.states = spec, spec.decoding, states
        self.processes, self.stops = spec.logits_processor is any_processor, stops
        self.waits = self.processes or stops
        self.run_steps = 1 if self.waits else self.run_steps
        self.logits: Tensor | None = None  # (rows, vocab): of the current step, if it is cut into stages
        self.device, slots = states.device, states.slot_count
        self.rules = TokenRules(spec, self.device)
        self.bans = self.rules.ban_table(vocab)
        self.last_tokens = torch.zeros(states.rows, dtype=torch.long, device=self.device)
        self.lengths = torch.zeros(slots, dtype=torch.long, device=self.device)
        self.limits = torch.ones(slots, dtype=torch.long, device=self.device)
        self.record_step = torch.zeros(1, dtype=torch.long, device=self.device)
        self.penalizes = self.options.has_penalties
        self.token_history = TokenHistory(states, self.options) if self.penalizes or self.waits else None
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

    def stages(self, decode_step: Callable[[Tensor], Tensor]) -> list[SearchStage]:
        """A step, from the tokens that the model reads to the next ones."""
        if not self.processes:
            return self.search_stages(lambda: decode_step(self.inputs()))
        return [
            SearchStage(lambda: self.keep_logits(decode_step(self.inputs())), self.process_logits),
            *self.search_stages(self.kept_logits),
        ]

    def search_stages(self, logits: Callable[[], Tensor]) -> list[SearchStage]:
        return [SearchStage(lambda: self.step(logits()))]

    def keep_logits(self, logits: Tensor) -> None:
        if self.logits is None:
            self.logits = torch.empty_like(logits, dtype=torch.float32)
        self.logits.copy_(logits)

    def kept_logits(self) -> Tensor:
        assert self.logits is not None
        return self.logits

    def process_logits(self, number: int) -> None:
        """Apply each request's logits processor, in one call for requests that share one and started together."""
        groups: dict[tuple[int, int], list[int]] = {}
        for slot, entry in self.occupied.items():
            if not entry.request.finished:
                groups.setdefault((id(entry.request.spec.logits_processor), entry.first_step), []).append(slot)
        logits, group = self.kept_logits(), self.states.group
        for slots in groups.values():
            requests = [self.occupied[slot].request for slot in slots]
            processor = requests[0].spec.logits_processor
            assert processor is not None
            rows = torch.tensor([slot * group + line for slot in slots for line in range(group)])
            rows = to_device(rows, self.device)
            found = process_logits(processor, logits[rows], self.texts(slots, number), requests)
            if found.shape[1] < logits.shape[1]:  # the last tokens were cut off
                missing = logits.shape[1] - found.shape[1]
                found = torch.nn.functional.pad(found, (0, missing), value=-torch.inf)
            logits[rows] = found.to(logits.dtype)

    def texts(self, slots: Sequence[int], number: int) -> Tensor:
        """The tokens (rows, time) that requests which have started together have generated before this step."""
        assert self.token_history is not None
        length = number - self.occupied[slots[0]].first_step
        begins = [len(self.occupied[slot].request.request.prompt) for slot in slots]
        places = torch.tensor(begins)[:, None] + torch.arange(length)  # (slots, time)
        group = self.states.group
        rows = torch.tensor(list(slots))[:, None] * group + torch.arange(group)  # (slots, group)
        rows, places = (
            to_device(rows.flatten(), self.device),
            to_device(places.repeat_interleave(group, 0), self.device),
        )
        return self.token_history.tokens[rows[:, None], places]

    @abstractmethod
    def process(self, first: int, record: NDArray[np.float32]) -> list[int]:
        """Read the record of steps from number `first` on; the slots that are free now."""

    def reset_slots(self, slots: Tensor, limits: Tensor, last_tokens: Tensor) -> None:
        """Begin new texts in these slots on the device, from `last_tokens`; all (slots,)."""
        self.lengths.index_fill_(0, slots, 0)
        self.limits[slots] = limits
        rows = self.last_tokens.view(self.states.slot_count, -1)
        rows[slots] = last_tokens[:, None].expand(-1, rows.shape[1])

    def reset(self) -> None:
        """Forget the steps of a warm-up."""
        self.states.device_lengths.zero_()
        self.record_step.zero_()

    def assign(self, slots: Sequence[int], requests: Sequence[RequestState], first_step: int) -> None:
        """Assign requests to these slots on the host."""
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

    def __init__(self, spec: DecodingSpec, states: StaticStates, vocab: int, stops: bool = False) -> None:
        super().__init__(spec, states, vocab, stops)
        self.group = states.group
        self.record = torch.zeros(self.run_steps, 2, states.rows, device=self.device)
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
        allowed = logits
        if self.token_history is not None and self.penalizes:
            allowed = self.token_history.penalize(logits, lengths)
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
        first_steps, limits = self.first_steps.repeat(self.group), self.host_limits.repeat(self.group)
        before = first - first_steps  # tokens of each row before this record
        here = self.active & (before >= 0)  # the others started after these steps
        counts = np.minimum(len(record), limits - before)
        is_eos = np.isin(record[:, 0], list(self.rules.eos_ids))  # (steps, rows)
        until_eos = np.where(is_eos.any(0), is_eos.argmax(0) + 1, len(record) + 1)
        here &= ~self.fail_non_finite(here, record[:, 1], np.minimum(until_eos, counts))
        ended = (until_eos <= counts) | (before + counts >= limits)
        after = before + np.minimum(until_eos, counts)
        # only rows to which something happens are read one by one
        checked = has_check(before, after, self.options)
        self.stream((here & self.streamed & ~checked).nonzero()[0], record, after - before)
        for row in (here & (self.watched | checked)).nonzero()[0].tolist():
            count, stopped = self.read_row(row, int(before[row]), int(after[row]))
            after[row], ended[row] = count, ended[row] or stopped
        self.collect((here & ended).nonzero()[0], first_steps, after)
        self.active &= ~(here & ended)
        cancelled = [slot for slot, entry in self.occupied.items() if entry.request.cancelled]
        done = (self.is_occupied & ~self.active.reshape(-1, self.group).any(1)).nonzero()[0].tolist()
        for slot in done:
            self.occupied[slot].request.complete()
        free = list(dict.fromkeys([*done, *cancelled]))
        self.release(free)
        return free

    def fail_non_finite(
        self, rows: NDArray[np.bool_], log_probs: NDArray[np.float32], counts: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Fail the requests of those `rows` with NaN among their first `counts` (rows,) of these log-probabilities
        (steps, rows); these rows."""
        invalid = np.isnan(log_probs)
        if not invalid.any():
            return invalid[0]
        found: NDArray[np.bool_] = rows & (invalid & (np.arange(len(invalid))[:, None] < counts)).any(0)
        for row in np.flatnonzero(found).tolist():
            self.occupied[row // self.group].request.fail(NonFiniteError())
        return found

    def release(self, slots: list[int]) -> None:
        super().release(slots)
        self.active.reshape(-1, self.group)[slots] = False

    def stream(self, rows: NDArray[np.int64], record: NDArray[np.float32], counts: NDArray[np.int64]) -> None:
        """Emit the first `counts` tokens that these rows have in a record; the end token is not emitted."""
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
        """Collect the hypotheses of rows that ended after `counts` tokens; those that started together at once."""
        for first_step in set(first_steps[rows].tolist()):
            some = rows[first_steps[rows] == first_step]
            own = counts[some]
            tokens, log_probs = self.history.since(first_step, own.max())[:, :, some].transpose(1, 2, 0)
            states = [self.occupied[row // self.group].request for row in some.tolist()]
            texts = make_hypotheses(self.spec, states, tokens, log_probs, own)
            for state, text in zip(states, texts, strict=True):
                state.hypotheses.append(text)


def make_hypotheses(
    spec: DecodingSpec,
    states: Sequence[RequestState],
    tokens: NDArray[np.float32],
    log_probs: NDArray[np.float32],
    counts: NDArray[np.int64],
) -> Iterator[Hypothesis]:
    """`make_hypothesis` of the first `counts` tokens of texts (texts, time): what they share is computed together."""
    options, counted, last = spec.decoding, spec.counted_prompt, (np.arange(len(counts)), counts - 1)
    first_check = np.inf if options.loops is None else next_check(0, options)
    divisors = {count: options.length_divisor(count + counted) for count in set(counts.tolist())}
    ends = np.isin(tokens[last], list(spec.eos_ids)).tolist()
    totals = log_probs.cumsum(1, dtype=np.float64)[last].tolist()
    lists = tokens.astype(np.int64).tolist(), log_probs.tolist()
    for state, count, ended, total, text, values in zip(states, counts.tolist(), ends, totals, *lists, strict=True):
        text, values = text[:count], values[:count]
        if count >= first_check or state.request.stop is not None or state.error is not None:
            yield make_hypothesis(spec, state, text, values, total)
        else:
            yield Hypothesis(text[:-1] if ended else text, total / divisors[count], total, values, ended)
