"""Answers being written, token by token: what is said next, and who goes on. A search knows scores and tokens; the
model and its States are the crew's affair (running_batch.py), so that those who ask in different ways can be read together.

Those who ask may come at any time: every source has its own clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.penalties import Penalties
from allyouneed.infer.decoding.repetition import LEAST, cut, due
from allyouneed.infer.request import Request
from allyouneed.nn.states.base import concat_rows


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One answer. `tokens` are without begin and end mark; `finished` says whether the model set the end mark itself,
    or said what it was told to stop at; `repeats`: it was stopped because it said the same again and again.

    `score` is `log_prob` divided by the length penalty; `log_probs` has one entry a token, and one for the end mark.
    """

    tokens: list[int]
    score: float
    log_prob: float
    log_probs: list[float]
    finished: bool
    repeats: bool = False


@dataclass(frozen=True)
class DecodingSpec:
    """How answers are written, whoever asks. `ends`: tokens that end an answer as `eos` does. `counted`: so many tokens
    of the prompt count as said, where lengths matter. `ended`: an answer that reaches its limit ends there with `eos`,
    for nothing. `rules(scores, said)` may change the scores (rows, vocab) of the next token, before anything is made of
    them, by what each row has said (rows, time); those who follow rules begin together."""

    decoding: Decoding
    eos: int
    forbidden: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    counted: int = 0
    ended: bool = False
    rules: Callable[[Tensor, Tensor], Tensor] | None = None
    draft: Any = None  # a `Draft`: speculative decoding

    @property
    def batch_key(self) -> DecodingSpec:
        """Those that differ only in what each one asks for itself can be written together."""
        own = {"seed": 0, "stop": (), "max_length": None, "extra": 0}
        return replace(self, decoding=self.decoding.model_copy(update=own))


@dataclass(eq=False, slots=True)
class RequestState:
    """Progress of a request. `limit`: the most new tokens, as the model has positions for them. `tokens`: those
    streamed so far; of a beam search all of the best hypothesis, at its end. `hypotheses`: best first once `done`.
    `error`: raised by the request's listener, which cancels this request and no other."""

    request: Request
    spec: DecodingSpec
    limit: int
    streams: bool = False  # `tokens` and the listener get each token as it is decoded
    tokens: list[int] = field(default_factory=list)
    hypotheses: list[Hypothesis] = field(default_factory=list)
    done: bool = False
    cancelled: bool = False
    error: Exception | None = None
    number: int = 0  # order of arrival at the scheduler
    arrived: int = 0  # scheduler step in which it arrived
    reserved: list[int] = field(default_factory=list)  # pool blocks reserved for states that are not paged

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

    def emit(self, token: int) -> None:
        if self.error is not None:
            return
        self.tokens.append(token)
        if self.request.listener is not None:
            try:
                self.request.listener(token)
            except Exception as error:
                self.error = error
                self.cancel()


class Search(ABC):
    """`group` rows for each who asks, neighbours all the way; one row each before the first `step` (`fresh`)."""

    def __init__(self, way: DecodingSpec, asked: Sequence[RequestState], device: torch.device) -> None:
        self.way, self.decoding, self.device = way, way.decoding, device
        self.batch_key, self.ends = way.batch_key, {way.eos, *way.ends}
        self.penalties = Penalties.of(way.decoding, [one.request.prompt for one in asked])
        self.group = self.rows_each(way.decoding)
        self.requests, self.fresh = list(asked), True
        self.clock, self.born = 0, [0] * len(asked)  # a source has said as many tokens as its clock shows
        rows, longest = len(asked) * self.group, max(one.limit for one in asked)
        self.tokens = torch.empty(rows, longest, dtype=torch.long, device=device)  # what each row has said
        self.gains = torch.empty(rows, longest, device=device)  # and the log-probability of each token
        self.last_tokens = torch.empty(0, dtype=torch.long, device=device)  # (rows,) what was just said
        self._ends = torch.tensor(sorted(self.ends), device=device)
        never = [token for token in way.forbidden if token not in self.ends]
        self.never = torch.tensor(never, dtype=torch.long, device=device) if never else None
        # nor, as long as an answer is too short to end
        self.banned = self._ends if self.never is None else torch.cat([self.never, self._ends])
        self.settle()

    @staticmethod
    @abstractmethod
    def rows_each(decoding: Decoding) -> int: ...

    @abstractmethod
    def step(self, logits: Tensor, tight: bool = False) -> list[int] | None:
        """Say one more token by these scores, (rows, vocab). Row i goes on with the past of row `order[i]`; None:
        nobody moves. `tight`: the model has no place for any who need not go on."""

    def join(self, other: Self) -> None:
        """Go on together with another search of the same kind; its rows come after the own ones."""
        self.born += [self.clock - other.clock + born for born in other.born]
        self.requests += other.requests
        self.tokens, self.gains = concat_rows(self.tokens, other.tokens), concat_rows(self.gains, other.gains)
        self.last_tokens = concat_rows(self.last_tokens, other.last_tokens)
        if self.penalties is not None and other.penalties is not None:
            self.penalties.join(other.penalties)
        self.settle()

    def settle(self) -> None:
        """Limits and beginnings (sources,) of those who are here now."""
        self.limits = torch.tensor([one.limit for one in self.requests], dtype=torch.long, device=self.device)
        self.births = torch.tensor(self.born, dtype=torch.long, device=self.device)
        self.together = len(set(self.born)) == 1  # all have said as many tokens
        self.soonest = min((one.limit + born for one, born in zip(self.requests, self.born, strict=True)), default=0)

    @property
    def ages(self) -> Tensor:
        """How many tokens have been said, by each source or, where a search follows rows, by each row."""
        return self.clock - self.births

    def at_limit(self) -> bool:
        """Whether the token that is being said may be somebody's last."""
        return self.clock + 1 >= self.soonest

    def short(self) -> Literal["all", "some", "none"]:
        """Whose answers are too short to end."""
        least = self.decoding.min_length - self.way.counted
        if least <= 0:
            return "none"
        counts = {self.clock - born < least for born in self.born}
        return "some" if len(counts) > 1 else "all" if True in counts else "none"

    def keep_requests(self, places: Sequence[int]) -> list[int]:
        """Only these sources stay; their rows, as they were."""
        order = [place * self.group + line for place in places for line in range(self.group)]
        self.reorder(order)
        self.keep(places)
        return order

    def copy_requests(self, places: Sequence[int]) -> Self:
        """These sources once more, in a search of their own."""
        new = copy(self)
        new.penalties = copy(self.penalties)
        new.keep_requests(places)
        return new

    def drop_finished(self, tight: bool) -> list[int] | None:
        """Rows that need not go on may leave; those that stay, as they were, or None."""
        return None

    def keep(self, places: Sequence[int]) -> None:
        """Only these sources are listed."""
        self.requests, self.born = [self.requests[n] for n in places], [self.born[n] for n in places]
        self.settle()

    def age(self, place: int) -> int:
        return self.clock - self.born[place]

    def ruled(self, logits: Tensor) -> Tensor:
        if self.way.rules is None:
            return logits
        return self.way.rules(logits, self.tokens[: len(logits), : self.clock])

    def unending(self, logits: Tensor, ages: Tensor) -> Tensor:
        """(…, vocab): where an answer of these ages (…) is too short to end, it does not."""
        least = self.decoding.min_length - self.way.counted
        if self.short() == "none":
            return logits
        return torch.where((ages < least)[..., None], logits.index_fill(-1, self._ends, -torch.inf), logits)

    def say(self, tokens: Tensor, gains: Tensor, ages: Tensor) -> None:
        """All are (rows,)"""
        last = self.tokens.shape[1] - 1  # of a row that is over and still here
        if self.together:
            place = min(self.clock - self.born[0], last)
            self.tokens[:, place], self.gains[:, place] = tokens, gains
        else:
            places = ages.clamp(max=last)[:, None]
            self.tokens.scatter_(1, places, tokens[:, None])
            self.gains.scatter_(1, places, gains[:, None])
        self.last_tokens = tokens
        self.clock += 1
        if self.penalties is not None:
            self.penalties.say(tokens.tolist())

    def looked_at(self) -> list[int]:
        """Places of those whose last tokens are looked at, whether they repeat themselves (repetition.py)."""
        if self.decoding.loops is None or self.clock < LEAST:
            return []
        return [place for place in range(len(self.requests)) if due(self.age(place), self.decoding)]

    def ending(self, tokens: Tensor) -> Tensor:
        return tokens == self.way.eos if len(self.ends) == 1 else torch.isin(tokens, self._ends)

    def reorder(self, order: list[int]) -> None:
        index = torch.tensor(order, dtype=torch.long, device=self.device)
        self.tokens, self.gains = self.tokens.index_select(0, index), self.gains.index_select(0, index)
        if len(self.last_tokens):
            self.last_tokens = self.last_tokens.index_select(0, index)
        if self.penalties is not None:
            self.penalties.select(order)

    def past(self, ages: Tensor, reach: int) -> list[list[int]]:
        """The last so many tokens of each row, of which it has said as many as its age (rows,)."""
        places = ages[:, None] - reach + torch.arange(reach, device=self.device)
        found = self.tokens.gather(1, places.clamp(0, self.tokens.shape[1] - 1)).tolist()
        return [row[max(0, reach - age) :] for row, age in zip(found, ages.tolist(), strict=True)]

    def hypothesis(self, one: RequestState, tokens: list[int], gains: list[float], log_prob: float) -> Hypothesis:
        return hypothesis(self.way, one, tokens, gains, log_prob)


def hypothesis(
    way: DecodingSpec, one: RequestState, tokens: list[int], gains: list[float], log_prob: float
) -> Hypothesis:
    ended = tokens[-1] in (way.eos, *way.ends)
    stopped = ended or stops(one, tokens)
    end = None if stopped else cut(tokens, way.decoding)
    if end is not None and end < len(tokens):
        tokens, gains = tokens[:end], gains[:end]
        log_prob = sum(gains)
    score = log_prob / way.decoding.normalise(len(tokens) + way.counted)
    return Hypothesis(tokens[:-1] if ended else tokens, score, log_prob, gains, stopped, end is not None)


def stops(one: RequestState, tokens: Sequence[int]) -> bool:
    """Whether what was said ends with what it was to stop at."""
    stop = one.request.stop
    return stop is not None and stop(tokens[-stop.reach :])
