"""Search: chooses the next tokens of several requests. It knows logits and tokens only; the model and its `States`
belong to the running batch (running_batch.py), so requests with different decoding options share a forward pass.

Requests may join at any step: each counts its own tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.penalties import Penalties
from allyouneed.infer.decoding.repetition import MIN_LOOP_TOKENS, find_loop, is_check_due
from allyouneed.infer.decoding.rules import NonFiniteError, Short, TokenRules, find_short
from allyouneed.infer.request import Request
from allyouneed.nn.states.base import concat_rows

if TYPE_CHECKING:
    from allyouneed.infer.decoding.allowed import Columns

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]

WIDTH = 256  # columns for generated tokens at first; they double when needed, for limits can be far larger


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One generated text. `tokens` exclude begin and end mark; `finished`: the model generated the end mark, or a stop
    condition was met; `repeats`: it was cut because it repeated itself.

    `score` is `log_prob` divided by the length penalty; `log_probs` has one entry per token, and one for the end mark.
    """

    tokens: list[int]
    score: float
    log_prob: float
    log_probs: list[float]
    finished: bool
    repeats: bool = False


@runtime_checkable
class RowRules(Protocol):
    """A logits processor that is nothing but numbers, so that it can run on a device: `bias` of token ids, and what a
    generated token costs once (`presence`) and each time (`frequency`). Not so if it `records` what it sees."""

    bias: Mapping[int, float]
    presence: float
    frequency: float
    records: bool

    def __call__(self, logits: Tensor, tokens: Tensor) -> Tensor: ...


def any_row_rules(logits: Tensor, tokens: Tensor) -> Tensor:
    """Stands for the row rules of each request in the specification of a batch."""
    raise TypeError("each request has its own rules")


def any_processor(logits: Tensor, tokens: Tensor) -> Tensor:
    """Stands for the logits processor of each request in the specification of a batch."""
    raise TypeError("each request has its own logits processor")


@dataclass(frozen=True)
class DecodingSpec:
    """How a request is decoded. `extra_eos`: tokens that end a text as `eos` does. `counted_prompt`: prompt tokens that
    count as generated where lengths matter. `force_eos`: a text that reaches its limit ends with `eos`, at
    log-probability 0. `logits_processor(logits, tokens)` changes the logits (rows, vocab) of the next token, given the
    tokens generated so far (rows, time). Only requests that start together share a call of it."""

    decoding: Decoding
    eos: int
    forbidden: tuple[int, ...] = ()
    extra_eos: tuple[int, ...] = ()
    counted_prompt: int = 0
    force_eos: bool = False
    logits_processor: LogitsProcessor | None = None
    draft: Any = None  # a `Draft`: speculative decoding

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        return frozenset({self.eos, *self.extra_eos})

    @cached_property
    def rows(self) -> int:
        """Rows decoded for one request."""
        return self.decoding.rows

    @property
    def min_new_tokens(self) -> int:
        return self.decoding.min_length - self.counted_prompt

    @cached_property
    def batch_key(self) -> DecodingSpec:
        """Equal for specs whose requests can share a search: all but options that each request has for itself."""
        own = {"seed": 0, "stop": (), "max_length": None, "extra": 0, "shortlist": True}
        return replace(self, decoding=self.decoding.model_copy(update=own))

    @property
    def device_key(self) -> DecodingSpec:
        """`batch_key` of a search on the device, where requests have rules or processors of their own."""
        if self.logits_processor is None:
            return self.batch_key
        processor = any_processor if self.row_rules is None else any_row_rules
        return replace(self.batch_key, logits_processor=processor)

    @property
    def row_rules(self) -> RowRules | None:
        rules = self.logits_processor
        return rules if isinstance(rules, RowRules) and not rules.records else None


@dataclass(eq=False, slots=True)
class RequestState:
    """Progress of a request. `limit`: the most new tokens, as the model has positions for them. `tokens`: those
    streamed so far; of a beam search all of the best hypothesis, at its end. `hypotheses`: best first once `done`.
    `error`: why it failed, if it did; it is cancelled then. `failures`: where a failed request adds itself. For
    who steps the scheduler: `on_end`, to be called when it is done, cancelled or has failed, and two times."""

    request: Request
    spec: DecodingSpec
    limit: int
    streams: bool = False  # `tokens` and the listener get each token as it is decoded
    tokens: list[int] = field(default_factory=list)
    hypotheses: list[Hypothesis] = field(default_factory=list)
    done: bool = False
    cancelled: bool = False
    error: BaseException | None = None
    failures: list[RequestState] = field(default_factory=list)
    admitted: bool = False  # by a scheduler: no longer waiting
    number: int = 0  # order of arrival at the scheduler
    arrived: int = 0  # scheduler step in which it arrived
    inputs: tuple[tuple[int, ...], tuple[int, ...] | None] = ((), None)  # prompt and source; equal ones are read once
    unpaged: int = 0  # pool blocks that its states that are not paged count as
    reserved: list[int] = field(default_factory=list)  # those blocks, while it is decoded
    on_end: Callable[[RequestState], None] | None = None
    submitted: float = 0.0
    first_token: float = 0.0

    @property
    def seed(self) -> int:
        return self.spec.decoding.seed

    @property
    def finished(self) -> bool:
        """Done or cancelled: no more tokens follow."""
        return self.done or self.cancelled

    @property
    def answer(self) -> list[Hypothesis] | None:
        return self.hypotheses if self.done else None

    def cancel(self) -> None:
        """Stop decoding it; `tokens` keeps what was streamed. No effect once it is done."""
        if not self.done:
            self.cancelled = True

    def fail(self, error: BaseException) -> None:
        """Cancel it because of this error."""
        if self.error is None:
            self.error = error
            self.cancel()
            self.failures.append(self)

    def complete(self) -> None:
        """All its hypotheses are known: it is done, unless it was cancelled meanwhile."""
        self.hypotheses.sort(key=lambda h: -h.score)
        self.done = not self.cancelled

    def emit(self, token: int) -> None:
        """Stream a token. A listener that raises fails its own request; an interrupt does, too, and the scheduler
        raises it after the step."""
        if self.error is not None:
            return
        try:
            self.tokens.append(token)
            if self.request.listener is not None:
                self.request.listener(token)
        except BaseException as error:
            self.fail(error)

    def emit_all(self, tokens: list[int]) -> None:
        """Stream several tokens; a listener with a method `extend` gets them at once."""
        listener = self.request.listener
        extend: Callable[[list[int]], None] | None = getattr(listener, "extend", None)
        if listener is not None and extend is None:
            for token in tokens:
                self.emit(token)
        elif self.error is None and not self.cancelled:
            try:
                self.tokens += tokens
                if extend is not None:
                    extend(tokens)
            except BaseException as error:
                self.fail(error)


class Search(ABC):
    """`group` adjacent rows for each request; one row each before the first `step` (`fresh`)."""

    def __init__(self, spec: DecodingSpec, requests: Sequence[RequestState], device: torch.device) -> None:
        self.spec, self.options, self.device = spec, spec.decoding, device
        self.batch_key, self.rules = spec.batch_key, TokenRules(spec, device)
        self.penalties: Penalties | None = None
        if spec.decoding.has_penalties:
            self.penalties = Penalties(spec.decoding, [state.request.prompt for state in requests])
        self.group, self.requests, self.fresh = spec.rows, list(requests), True
        self.mask: tuple[Columns | None, Tensor] | None = None  # of `restrict`, for these requests
        self.steps, self.started = 0, [0] * len(requests)  # a request has generated steps - started tokens
        self._update()
        rows, width = len(requests) * self.group, min(WIDTH, self.longest)
        self.tokens = torch.empty(rows, width, dtype=torch.long, device=device)  # generated by each row
        self.log_probs = torch.empty(rows, width, device=device)  # of each of them
        self.last_tokens = torch.empty(0, dtype=torch.long, device=device)  # (rows,)

    @abstractmethod
    def step(self, logits: Tensor, compact: bool = False, columns: Columns | None = None) -> list[int] | None:
        """Choose the next token by logits (rows, vocab), or those of `columns`. Row i continues row `order[i]`; None:
        no row moves. `compact`: drop rows that are done at once, for the model has no positions left for them."""

    def restrict(self, logits: Tensor, columns: Columns | None) -> Tensor:
        """Set logits (rows, vocab), or those of `columns`, to -inf for tokens that a request does not allow."""
        if self.mask is None or self.mask[0] is not columns:
            from allyouneed.infer.decoding.allowed import allowed_mask

            self.mask = columns, allowed_mask(self.requests, logits.shape[1], columns, self.device)
        mask, rows = self.mask[1], len(logits) // len(self.requests)
        return logits.add_(mask if rows == 1 else mask.repeat_interleave(rows, 0))

    def join(self, other: Self) -> None:
        """Append the rows of another search with the same `batch_key`."""
        for search, width in ((self, other.tokens.shape[1]), (other, self.tokens.shape[1])):
            search.widen(width)
        self.started += [self.steps - other.steps + started for started in other.started]
        self.requests += other.requests
        self.tokens = concat_rows(self.tokens, other.tokens)
        self.log_probs = concat_rows(self.log_probs, other.log_probs)
        self.last_tokens = concat_rows(self.last_tokens, other.last_tokens)
        if self.penalties is not None and other.penalties is not None:
            self.penalties.join(other.penalties)
        self._update()

    def fail_non_finite(self, found: Tensor) -> bool:
        """Fail the requests for which `found` (rows or requests, …) has NaN; whether there are any."""
        invalid = found.isnan()
        if not bool(invalid.any()):
            return False
        for index in invalid.view(len(self.requests), -1).any(1).nonzero()[:, 0].tolist():
            self.requests[index].fail(NonFiniteError())
        return True

    def widen(self, width: int) -> None:
        """Make room for `width` generated tokens."""
        missing = width - self.tokens.shape[1]
        if missing > 0:
            self.tokens = nn.functional.pad(self.tokens, (0, missing))
            self.log_probs = nn.functional.pad(self.log_probs, (0, missing))

    def _update(self) -> None:
        """Limits and first steps (requests,) of the requests that are here now."""
        limits = list[int]()
        self.stop_reach = 0  # tokens that stop conditions read
        self.observed = self.streams = self.restricted = False
        self.mask = None
        for state in self.requests:
            limits.append(state.limit)
            if state.request.stop is not None:
                self.stop_reach = max(self.stop_reach, state.request.stop.reach)
            self.observed = self.observed or state.request.observer is not None
            self.streams = self.streams or state.streams
            self.restricted = self.restricted or state.request.allowed is not None
        self.limits = torch.tensor(limits, dtype=torch.long, device=self.device)
        self.first_steps = torch.tensor(self.started, dtype=torch.long, device=self.device)
        self.starts = set(self.started)
        self.oldest = min(self.started, default=0)
        self.aligned = len(self.starts) == 1  # all have generated as many tokens
        self.first_limit = min(map(add, limits, self.started), default=0)
        self.longest = max(limits, default=0)

    @property
    def lengths(self) -> Tensor:
        """Tokens generated so far, (requests,), or (rows,) where rows are independent."""
        return self.steps - self.first_steps

    def length(self, index: int) -> int:
        return self.steps - self.started[index]

    def at_limit(self) -> bool:
        """Whether the token being chosen may be the last of some request."""
        return self.steps + 1 >= self.first_limit

    def keep_requests(self, indices: Sequence[int]) -> list[int]:
        """Drop all other requests; the rows that stay, by their old index."""
        order = [index * self.group + line for index in indices for line in range(self.group)]
        self.reorder(order)
        self._keep(indices)
        return order

    def copy_requests(self, indices: Sequence[int]) -> Self:
        """A search of its own with a copy of these requests."""
        new = copy(self)
        new.penalties = copy(self.penalties)
        new.keep_requests(indices)
        return new

    def drop_finished(self, compact: bool) -> list[int] | None:
        """Drop rows that are done, if it is worth the copy; the rows that stay, or None."""
        return None

    def _keep(self, indices: Sequence[int]) -> None:
        self.requests, self.started = [self.requests[n] for n in indices], [self.started[n] for n in indices]
        self._update()

    def begin_step(self, logits: Tensor) -> tuple[Tensor, Short]:
        """Make room for the next token. The logits as the specification's processor changes them, and which requests
        have too few tokens to end."""
        width = self.tokens.shape[1]
        if self.steps - self.oldest >= width < self.longest:
            self.widen(min(2 * width, self.longest))
        least: int = self.rules.min_tokens
        short: Short = "none"
        if least > 0:
            short = find_short([self.steps - started for started in self.starts], least)
        if self.spec.logits_processor is None:
            return logits, short
        tokens = self.tokens[: len(logits), : self.steps]
        return process_logits(self.spec.logits_processor, logits, tokens, self.requests), short

    def append(self, tokens: Tensor, log_probs: Tensor) -> None:
        """One token per row; both (rows,)."""
        last = self.tokens.shape[1] - 1  # rows that are done and not yet dropped overwrite it
        if self.aligned:
            position = min(self.steps - self.started[0], last)
            self.tokens[:, position], self.log_probs[:, position] = tokens, log_probs
        else:
            lengths = self.lengths
            lengths = lengths if len(lengths) == len(tokens) else lengths.repeat_interleave(self.group)
            positions = lengths.clamp(max=last)[:, None]
            self.tokens.scatter_(1, positions, tokens[:, None])
            self.log_probs.scatter_(1, positions, log_probs[:, None])
        self.last_tokens = tokens
        self.steps += 1
        if self.penalties is not None:
            self.penalties.append(tokens.tolist())

    def due_for_loop_check(self) -> list[int]:
        """Indices of requests to check for loops now (repetition.py)."""
        if self.steps < MIN_LOOP_TOKENS:
            return []
        return [index for index in range(len(self.requests)) if is_check_due(self.length(index), self.options)]

    def reorder(self, order: list[int]) -> None:
        index = torch.tensor(order, dtype=torch.long, device=self.device)
        self.tokens, self.log_probs = self.tokens.index_select(0, index), self.log_probs.index_select(0, index)
        if len(self.last_tokens):
            self.last_tokens = self.last_tokens.index_select(0, index)
        if self.penalties is not None:
            self.penalties.select(order)

    def recent_tokens(self, lengths: Tensor) -> list[list[int]]:
        """The last `stop_reach` tokens of each row, which has generated `lengths` (rows,)."""
        reach = self.stop_reach
        positions = lengths[:, None] - reach + torch.arange(reach, device=self.device)
        found = self.tokens.gather(1, positions.clamp(0, self.tokens.shape[1] - 1)).tolist()
        return [row[max(0, reach - length) :] for row, length in zip(found, lengths.tolist(), strict=True)]


def process_logits(
    processor: LogitsProcessor, logits: Tensor, tokens: Tensor, requests: Sequence[RequestState]
) -> Tensor:
    """Logits (rows, vocab) of these requests, which have generated `tokens` (rows, time), equally many rows each. Where
    the processor raises, it is called for each request alone, and those for which it still does fail."""
    try:
        found = processor(logits, tokens)
        (rows, vocab), shape = logits.shape, tuple[int, ...](getattr(found, "shape", ()))
        if len(shape) != 2 or shape[0] != rows or not 0 < shape[1] <= vocab:  # the last tokens may be cut off
            raise UserError(f"logits_processor: must return ({rows}, {vocab}) logits, not {shape}")
        return found
    except Exception as error:
        if len(requests) == 1:
            requests[0].fail(error)
            return logits
    rows = len(logits) // len(requests)
    each = zip(logits.split(rows), tokens.split(rows), requests, strict=True)
    parts = [process_logits(processor, own, past, [state]) for own, past, state in each]
    columns = min(part.shape[1] for part in parts)
    return torch.cat([part[:, :columns] for part in parts])


def make_hypothesis(
    spec: DecodingSpec, state: RequestState, tokens: list[int], log_probs: list[float], log_prob: float
) -> Hypothesis:
    """The hypothesis of generated tokens, end token included; cut where a loop is found."""
    ended = tokens[-1] in spec.eos_ids
    finished = ended or matches_stop(state, tokens)
    end = None if finished else find_loop(tokens, spec.decoding)
    if end is not None and end < len(tokens):
        tokens, log_probs = tokens[:end], log_probs[:end]
        log_prob = sum(log_probs)
    score = log_prob / spec.decoding.length_divisor(len(tokens) + spec.counted_prompt)
    return Hypothesis(tokens[:-1] if ended else tokens, score, log_prob, log_probs, finished, end is not None)


def matches_stop(state: RequestState, tokens: Sequence[int]) -> bool:
    """Whether its stop condition is met. One that raises ends the request, which has failed."""
    stop = state.request.stop
    if stop is None or state.error is not None:
        return state.error is not None
    try:
        return bool(stop(tokens[-stop.reach :]))
    except BaseException as error:
        state.fail(error)
        return True
