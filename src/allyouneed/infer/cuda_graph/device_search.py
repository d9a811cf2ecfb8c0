"""What is said next, decided on the device, and heard by the host some steps later. The device goes on without waiting:
whether an answer is over does not change how it goes on, only how long anybody listens. What was said in a run of steps
comes to the host as one record; a search (decoding/base.py) is what it is held to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allyouneed.infer.decoding.base import DecodingSpec, RequestState, hypothesis, stops
from allyouneed.infer.decoding.options import Candidates, among, draw, expand, keep_likely
from allyouneed.infer.decoding.repetition import due, looked, looks, looping
from allyouneed.infer.decoding.sample import chances
from allyouneed.infer.decoding.topk import best_place, log_chance
from allyouneed.kernels import usable
from allyouneed.runtime.cuda.static_cache import StaticStates

RUN_STEPS = 8  # steps between two looks at what was said


@dataclass(eq=False, slots=True)
class Seated:
    """Who sits in a seat, and in which step it began."""

    request: RequestState
    birth: int


class Past:
    """What was said, step by step, since the oldest of those who are still here began."""

    def __init__(self) -> None:
        self.begin = 0
        self.steps: NDArray[np.float32] = np.empty(0, dtype=np.float32)

    def add(self, first: int, record: NDArray[np.float32], oldest: int) -> None:
        """What was said from step `first` on. After steps that nobody listened to, it begins anew."""
        if first != self.begin + len(self.steps):
            self.begin, self.steps = first, self.steps[:0]
        if oldest - self.begin > max(256, len(self.steps) // 2):
            self.steps, self.begin = self.steps[oldest - self.begin :], oldest
        self.steps = np.concatenate([self.steps, record]) if len(self.steps) else record.copy()

    def since(self, birth: int, count: int) -> NDArray[np.float32]:
        return self.steps[birth - self.begin : birth - self.begin + count]


class DeviceSearch(ABC):
    """`last_tokens` (rows,): what was said last. `record` (RUN_STEPS, …): what the host will hear. `occupied`: by seat."""

    def __init__(self, way: DecodingSpec, states: StaticStates, vocab: int) -> None:
        self.way, self.decoding, self.states = way, way.decoding, states
        self.device = states.device
        self.ends = {way.eos, *way.ends}
        self.endings = torch.tensor(sorted(self.ends), device=self.device)
        never = [token for token in way.forbidden if token not in self.ends]
        self.never = torch.tensor(never, dtype=torch.long, device=self.device) if never else None
        self.least = way.decoding.min_length - way.counted  # an answer of fewer tokens does not end
        self.last_tokens = torch.zeros(states.rows, dtype=torch.long, device=self.device)
        self.ages = torch.zeros(states.slot_count, dtype=torch.long, device=self.device)
        self.limits = torch.ones(states.slot_count, dtype=torch.long, device=self.device)
        self.bans = torch.zeros(2, vocab, device=self.device)  # of those that may end, and of those that may not yet
        if self.never is not None:
            self.bans[:, self.never] = -torch.inf
        self.bans[1, self.endings] = -torch.inf
        self.record_step = torch.zeros(1, dtype=torch.long, device=self.device)
        self.occupied: dict[int, Seated] = {}
        self.births, self.most = np.zeros(
            (2, states.slot_count), dtype=np.int64
        )  # by seat: when it began, and its limit
        self.taken = np.zeros(states.slot_count, dtype=bool)
        self.past = Past()

    record: Tensor

    @abstractmethod
    def step(self, scores: Tensor) -> None:
        """Say one more token by these scores (rows, vocab). Nothing is asked of the host."""

    @abstractmethod
    def process(self, first: int, record: NDArray[np.float32]) -> list[int]:
        """What was said in some steps, of which this is the number of the first; the seats that are free now."""

    def reset_slots(self, chairs: Tensor, limits: Tensor, last: Tensor) -> None:
        """These seats are taken by texts that go on from their `last` tokens. Nothing is asked of the host."""
        self.ages.index_fill_(0, chairs, 0)
        self.limits[chairs] = limits
        newest = self.last_tokens.view(self.states.slot_count, -1)
        newest[chairs] = last[:, None].expand(-1, newest.shape[1])

    def assign(self, seats: Sequence[int], asked: Sequence[RequestState], birth: int) -> None:
        """Who they are."""
        self.occupied |= {seat: Seated(one, birth) for seat, one in zip(seats, asked, strict=True)}
        self.births[seats], self.most[seats], self.taken[seats] = birth, [one.limit for one in asked], True

    def release(self, seats: list[int]) -> None:
        for seat in seats:
            del self.occupied[seat]
        self.taken[seats] = False

    def keep(self, said: Tensor) -> None:
        """Into the record, at the step that it is."""
        self.record.index_copy_(0, self.record_step, said[None])
        self.record_step.add_(1)

    def remember(self, first: int, record: NDArray[np.float32]) -> None:
        oldest = int(self.births[self.taken].min()) if self.occupied else first
        self.past.add(first, record, min(first, oldest))

    def steps_left(self, now: int) -> int:
        """So many more steps somebody may need."""
        return int((self.births + self.most)[self.taken].max()) - now if self.occupied else 0


class DeviceIndependentSearch(DeviceSearch):
    """Greedy and sampling: every row its own way. A record has tokens and their log-probabilities (2, rows)."""

    def __init__(self, way: DecodingSpec, states: StaticStates, vocab: int) -> None:
        super().__init__(way, states, vocab)
        self.group = states.group
        self.record = torch.zeros(RUN_STEPS, 2, states.rows, device=self.device)
        self.chances: Tensor | None = None
        if self.decoding.method == "sample":
            self.chances = torch.zeros(states.rows, states.capacity, dtype=torch.double, device=self.device)
        self.going = np.zeros(states.rows, dtype=bool)  # rows that are not over
        self.watched = np.zeros(states.rows, dtype=bool)  # rows whose every token somebody wants to know

    def assign(self, seats: Sequence[int], asked: Sequence[RequestState], birth: int) -> None:
        super().assign(seats, asked, birth)
        self.going.reshape(-1, self.group)[seats] = True
        watched = [[one.request.stop is not None or one.streams] for one in asked]
        self.watched.reshape(-1, self.group)[seats] = watched
        if self.chances is None:
            return
        drawn = torch.zeros(len(seats), self.group, self.states.capacity, dtype=torch.double)
        for place, one in enumerate(asked):
            for line in range(self.group):
                count = min(one.limit, self.states.capacity)
                drawn[place, line, :count] = chances((one.seed, line, *one.request.sample_key), count)
        chairs = torch.tensor(list(seats), device=self.device)
        self.chances.view(self.states.slot_count, self.group, -1)[chairs] = drawn.to(self.device)

    def step(self, scores: Tensor) -> None:
        if self.chances is None and self.group == 1 and not self.way.ended and usable(scores):
            from allyouneed.kernels.triton.topk import argmax_step

            argmax_step(scores, self.bans, self.ages, self.least, self.last_tokens, self.record, self.record_step)
            self.record_step.add_(1)
            return
        ages, limits = self.ages, self.limits
        if self.group > 1:
            ages, limits = (x.repeat_interleave(self.group) for x in (ages, limits))
        scores = scores.float()
        tokens = self.choose(scores, ages)
        gains = log_chance(scores, tokens)
        if self.way.ended:
            last = limits == ages + 1
            tokens, gains = tokens.masked_fill(last, self.way.eos), gains.masked_fill(last, 0.0)
        self.last_tokens.copy_(tokens)
        self.ages.add_(1)
        self.keep(torch.stack((tokens.to(gains.dtype), gains)))

    def choose(self, scores: Tensor, ages: Tensor) -> Tensor:
        allowed = scores + (self.bans[(ages < self.least).long()] if self.least > 0 else self.bans[0])
        if self.chances is None:
            return best_place(allowed)
        asked = self.decoding
        likely = keep_likely(allowed / asked.temperature, asked.top_k, asked.top_p, asked.min_p)
        return draw(likely, self.chances.gather(1, ages.clamp(max=self.chances.shape[1] - 1)[:, None])[:, 0])

    def process(self, first: int, record: NDArray[np.float32]) -> list[int]:
        self.remember(first, record)
        births, most = (np.repeat(each, self.group) for each in (self.births, self.most))
        ages = first - births
        here = self.going & (ages >= 0)  # others came when these steps were on their way
        counts = np.minimum(len(record), most - ages)
        ending = np.isin(record[:, 0], list(self.ends))  # (steps, rows)
        said = np.where(ending.any(0), ending.argmax(0) + 1, len(record) + 1)
        over = (said <= counts) | (ages + counts >= most)
        said = ages + np.minimum(said, counts)
        # rows are looked at one by one only where something happens to them
        for row in np.flatnonzero(here & (self.watched | looked(ages, said, self.decoding))).tolist():
            before, count = int(ages[row]), int(said[row])
            count, stopped = self.unlooped(row, before, count)
            count, left = self.told(row, before, count)
            said[row], over[row] = count, over[row] or stopped or left
        self.collect(np.flatnonzero(here & over), births, said)
        self.going &= ~(here & over)
        gone = [seat for seat, sitter in self.occupied.items() if sitter.request.cancelled]
        done = np.flatnonzero(self.taken & ~self.going.reshape(-1, self.group).any(1)).tolist()
        for seat in done:
            one = self.occupied[seat].request
            one.hypotheses.sort(key=lambda h: -h.score)
            one.done = not one.cancelled
        free = list(dict.fromkeys([*done, *gone]))
        self.release(free)
        return free

    def release(self, seats: list[int]) -> None:
        super().release(seats)
        self.going.reshape(-1, self.group)[seats] = False

    def unlooped(self, row: int, before: int, said: int) -> tuple[int, bool]:
        """How many tokens a row has said, of so many, before it is seen to repeat itself, and whether it is."""
        for count in looks(before, said, self.decoding):
            if looping(self.text(row, count), self.decoding):
                return count, True
        return said, False

    def text(self, row: int, count: int) -> list[int]:
        found: list[int] = (
            self.past.since(self.occupied[row // self.group].birth, count)[:, 0, row].astype(int).tolist()
        )
        return found

    def told(self, row: int, before: int, said: int) -> tuple[int, bool]:
        """Tell its tokens to who listens, one by one, up to what it was to stop at."""
        one = self.occupied[row // self.group].request
        if one.request.stop is None and not one.streams:
            return said, False
        tokens = self.text(row, said)
        for count in range(before + 1, said + 1):
            token = tokens[count - 1]
            if one.streams and self.group == 1 and not one.cancelled and token not in self.ends:
                one.emit(token)
            if one.cancelled or stops(one, tokens[:count]):
                return count, True
        return said, False

    def collect(self, rows: NDArray[np.int64], births: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """These rows have come to an end, with so many tokens; those that began and ended together at once."""
        for birth, count in set(zip(births[rows].tolist(), counts[rows].tolist(), strict=True)):
            alike = rows[(births[rows] == birth) & (counts[rows] == count)]
            tokens, gains = self.past.since(birth, count)[:, :, alike].transpose(1, 2, 0)
            for row, text, won in zip(alike.tolist(), tokens.astype(int).tolist(), gains.tolist(), strict=True):
                one = self.occupied[row // self.group].request
                one.hypotheses.append(hypothesis(self.way, one, text, won, sum(won)))


class DeviceBeamSearch(DeviceSearch):
    """Beam search: see decoding/beam.py. A record has, for each seat and beam, a candidate that may have ended (its score, its
    parent, its token and that one's log-probability, whether it has) and who goes on (parent, token, log-probability,
    score of all of it)."""

    def __init__(self, way: DecodingSpec, states: StaticStates, vocab: int) -> None:
        super().__init__(way, states, vocab)
        self.beams = states.group
        self.record = torch.zeros(RUN_STEPS, states.slot_count, self.beams, 9, device=self.device)
        self.scores = torch.zeros(states.slot_count, self.beams, device=self.device)
        self.leaders = torch.arange(states.slot_count, device=self.device)[:, None] * self.beams
        self.only = torch.full((vocab,), -torch.inf, device=self.device)
        self.only[way.eos] = 0

    def reset_slots(self, chairs: Tensor, limits: Tensor, last: Tensor) -> None:
        super().reset_slots(chairs, limits, last)
        self.scores.index_fill_(0, chairs, -torch.inf)  # all beams are the same as yet: only the first goes on
        self.scores[:, 0].index_fill_(0, chairs, 0.0)

    def candidates(self, scores: Tensor) -> Candidates:
        """The best candidates of each seat, twice as many as there are beams."""
        beams, ages, count = self.beams, self.ages, 2 * self.beams
        if usable(scores) and not self.way.ended and count.bit_count() == 1 and count <= min(32, scores.shape[1]):
            from allyouneed.kernels.triton.topk import topk

            best, tokens, mass = topk(scores, self.bans, ages, self.least, count)
            gains, tokens = (part.unflatten(0, (-1, beams)) for part in (best - mass, tokens))
            return among(gains, tokens, self.scores, count)
        logits, whole = scores.float().unflatten(0, (-1, beams)), None  # (seats, beams, vocab)
        if self.way.ended:
            last = (self.limits == ages + 1)[:, None, None]
            logits = torch.where(last, self.only, logits.log_softmax(-1))
            whole = torch.zeros_like(logits[:, :1, :1])
        if self.least > 0:  # the end mark gets no chance, but keeps its share
            whole = logits.logsumexp(-1, keepdim=True) if whole is None else whole
            young = (ages < self.least)[:, None, None]
            logits = torch.where(young, logits.index_fill(-1, self.endings, -torch.inf), logits)
        return expand(logits, self.scores, count, self.never, whole)

    def step(self, scores: Tensor) -> None:
        beams, ages = self.beams, self.ages
        found = self.candidates(scores)
        ended = torch.isin(found.tokens, self.endings) | (self.limits <= ages + 1)[:, None]
        finished = (ended & found.scores.isfinite())[:, :beams]
        running, picked = found.scores.masked_fill(ended, -torch.inf).topk(beams)
        parents, tokens, gains = (part.gather(1, picked) for part in found[1:])
        self.scores.copy_(running)
        self.states.reorder((self.leaders + parents).flatten())
        self.last_tokens.copy_(tokens.flatten())
        self.ages.add_(1)
        candidates = [part[:, :beams].float() for part in (*found, finished)]
        self.keep(torch.stack([*candidates, parents.float(), tokens.float(), gains, running], -1))

    def process(self, first: int, record: NDArray[np.float32]) -> list[int]:
        self.remember(first, record)
        free: list[int] = []
        for number, step in enumerate(record):  # (seats, beams, 9)
            ages = first + number - self.births
            here = self.taken & (ages >= 0)
            ended = step[..., 4].astype(bool) & here[:, None]
            for birth in set(self.births[ended.any(1)].tolist()):
                self.collect(birth, ended & (self.births == birth)[:, None], first + number - birth, step)
            best, looking = step[:, 0, 8], looked(ages, ages + 1, self.decoding)
            waiting = [
                not sitter.request.cancelled and not sitter.request.hypotheses for sitter in self.occupied.values()
            ]
            calm = np.zeros_like(here)  # nothing has come to an end, and all may go on
            calm[list(self.occupied)] = waiting
            for seat in np.flatnonzero(here & ~(calm & (best > -np.inf) & ~looking)).tolist():
                sitter, age = self.occupied[seat], int(ages[seat])
                one = sitter.request
                if one.cancelled or not self.hopeful(one, float(best[seat]), age) or self.looped(sitter, seat, age + 1):
                    one.done = not one.cancelled
                    del one.hypotheses[self.decoding.best :]
                    self.release([seat])
                    free.append(seat)
        return free

    def looped(self, sitter: Seated, seat: int, age: int) -> bool:
        """Whether its best hypothesis repeats itself; where none has come to an end, they end as they are."""
        one = sitter.request
        if one.done or not due(age, self.decoding):
            return False
        every = np.arange(self.beams)
        said, won = (each.tolist() for each in self.said(sitter.birth, age, np.full_like(every, seat), every))
        if not looping(said[0], self.decoding):
            return False
        if not one.hypotheses:
            scores = self.past.since(sitter.birth, age)[-1, seat, :, 8].tolist()
            ways = [way for way in zip(said, won, scores, strict=True) if way[2] > float("-inf")]
            one.hypotheses = [hypothesis(self.way, one, *way) for way in ways]
            one.hypotheses.sort(key=lambda h: -h.score)
        return True

    def said(
        self, birth: int, age: int, seats: NDArray[np.int64], beams: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens of hypotheses when there were so many of each, and their log-probabilities (hypotheses, age)."""
        said, won = np.empty((len(seats), age), np.int64), np.empty((len(seats), age), np.float32)
        for number, step in reversed(list(enumerate(self.past.since(birth, age)))):
            then = step[seats, beams]  # (hypotheses, 9)
            said[:, number], won[:, number], beams = then[:, 6], then[:, 7], then[:, 5].astype(int)
        return said, won

    def collect(self, birth: int, ended: NDArray[np.bool_], age: int, step: NDArray[np.float32]) -> None:
        """Hypotheses (seats, beams) that have come to an end, of those who began then."""
        seats, beams = ended.nonzero()
        scores, parents, tokens, gains, _ = step[seats, beams, :5].T
        said, won = self.said(birth, age, seats, parents.astype(int))
        texts = np.column_stack((said, tokens.astype(int))).tolist()
        gained = np.column_stack((won, gains)).tolist()
        for seat, text, own, score in zip(seats.tolist(), texts, gained, scores.tolist(), strict=True):
            one = self.occupied[seat].request
            insort(one.hypotheses, hypothesis(self.way, one, text, own, score), key=lambda h: -h.score)
            del one.hypotheses[self.beams :]

    def hopeful(self, one: RequestState, best: float, age: int) -> bool:
        """Whether it may still find something better. `best`: of those that go on."""
        full = len(one.hypotheses) == self.beams
        if not full:
            return best > float("-inf")
        worst = one.hypotheses[-1].score
        running = best / self.decoding.normalise(age + 1 + self.way.counted)
        return running > worst and not self.decoding.early


def device_search(way: DecodingSpec, states: StaticStates, vocab: int) -> DeviceSearch:
    beams = way.decoding.method == "beam" and way.decoding.beam > 1
    return (DeviceBeamSearch if beams else DeviceIndependentSearch)(way, states, vocab)
