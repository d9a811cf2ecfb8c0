"""What is said next, decided on the device, and heard by the host some steps later. The device goes on without waiting:
whether an answer is over does not change how it goes on, only how long anybody listens. What was said in a run of steps
comes to the host as one record; a search (search.py) is what it is held to.
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

from allyouneed.infer.decoding import Candidates, among, draw, expand, keep_likely
from allyouneed.infer.likeliest import best_place, log_chance
from allyouneed.infer.lines import chances
from allyouneed.infer.loops import due, looping
from allyouneed.infer.search import Asked, Way, hypothesis, stops
from allyouneed.kernels import usable
from allyouneed.nn.static import StaticStates

RUN = 8  # steps between two looks at what was said


@dataclass(eq=False)
class Seated:
    """Who sits in a seat, and in which step it began."""

    one: Asked
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


class Saying(ABC):
    """`newest` (rows,): what was said last. `record` (RUN, …): what the host will hear. `seated`: by seat."""

    def __init__(self, way: Way, states: StaticStates, vocab: int) -> None:
        self.way, self.decoding, self.states = way, way.decoding, states
        self.device = states.device
        self.ends = {way.eos, *way.ends}
        self.endings = torch.tensor(sorted(self.ends), device=self.device)
        never = [token for token in way.forbidden if token not in self.ends]
        self.never = torch.tensor(never, dtype=torch.long, device=self.device) if never else None
        self.least = way.decoding.min_length - way.counted  # an answer of fewer tokens does not end
        self.newest = torch.zeros(states.rows, dtype=torch.long, device=self.device)
        self.ages = torch.zeros(states.seats, dtype=torch.long, device=self.device)
        self.limits = torch.ones(states.seats, dtype=torch.long, device=self.device)
        self.bans = torch.zeros(2, vocab, device=self.device)  # of those that may end, and of those that may not yet
        if self.never is not None:
            self.bans[:, self.never] = -torch.inf
        self.bans[1, self.endings] = -torch.inf
        self.clock = torch.zeros(1, dtype=torch.long, device=self.device)
        self.seated: dict[int, Seated] = {}
        self.past = Past()

    record: Tensor

    @abstractmethod
    def step(self, scores: Tensor) -> None:
        """Say one more token by these scores (rows, vocab). Nothing is asked of the host."""

    @abstractmethod
    def hear(self, first: int, record: NDArray[np.float32]) -> list[int]:
        """What was said in some steps, of which this is the number of the first; the seats that are free now."""

    def sit(self, seats: Sequence[int], asked: Sequence[Asked], last: Sequence[int], birth: int) -> None:
        """These take seats; `last` is what each has to go on from."""
        chairs = torch.tensor(list(seats), device=self.device)
        self.ages[chairs] = 0
        self.limits[chairs] = torch.tensor([one.limit for one in asked], device=self.device)
        newest = self.newest.view(self.states.seats, -1)
        newest[chairs] = torch.tensor(list(last), device=self.device)[:, None].expand(-1, newest.shape[1])
        self.seated |= {seat: Seated(one, birth) for seat, one in zip(seats, asked, strict=True)}

    def keep(self, said: Tensor) -> None:
        """Into the record, at the step that it is."""
        self.record.index_copy_(0, self.clock, said[None])
        self.clock.add_(1)

    @property
    def oldest(self) -> int:
        return min((sitter.birth for sitter in self.seated.values()), default=1 << 62)

    def left(self, now: int) -> int:
        """So many more steps somebody may need."""
        return max((sitter.birth + sitter.one.limit - now for sitter in self.seated.values()), default=0)


class SayingLines(Saying):
    """Greedy and sampling: every row its own way. A record has tokens and their log-probabilities (2, rows)."""

    def __init__(self, way: Way, states: StaticStates, vocab: int) -> None:
        super().__init__(way, states, vocab)
        self.group = states.group
        self.record = torch.zeros(RUN, 2, states.rows, device=self.device)
        self.chances: Tensor | None = None
        if self.decoding.method == "sample":
            self.chances = torch.zeros(states.rows, states.capacity, dtype=torch.double, device=self.device)
        self.found: dict[int, set[int]] = {}  # by seat: its rows that are over

    def sit(self, seats: Sequence[int], asked: Sequence[Asked], last: Sequence[int], birth: int) -> None:
        super().sit(seats, asked, last, birth)
        self.found |= {seat: set() for seat in seats}
        if self.chances is None:
            return
        drawn = torch.zeros(len(seats), self.group, self.states.capacity, dtype=torch.double)
        for place, one in enumerate(asked):
            for line in range(self.group):
                count = min(one.limit, self.states.capacity)
                drawn[place, line, :count] = chances((one.seed, line, *one.name), count)
        chairs = torch.tensor(list(seats), device=self.device)
        self.chances.view(self.states.seats, self.group, -1)[chairs] = drawn.to(self.device)

    def step(self, scores: Tensor) -> None:
        if self.chances is None and self.group == 1 and not self.way.ended and usable(scores):
            from allyouneed.kernels.likeliest import say

            say(scores, self.bans, self.ages, self.least, self.newest, self.record, self.clock)
            self.clock.add_(1)
            self.ages.add_(1)
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
        self.newest.copy_(tokens)
        self.ages.add_(1)
        self.keep(torch.stack((tokens.to(gains.dtype), gains)))

    def choose(self, scores: Tensor, ages: Tensor) -> Tensor:
        allowed = scores + (self.bans[(ages < self.least).long()] if self.least > 0 else self.bans[0])
        if self.chances is None:
            return best_place(allowed)
        asked = self.decoding
        likely = keep_likely(allowed / asked.temperature, asked.top_k, asked.top_p, asked.min_p)
        return draw(likely, self.chances.gather(1, ages.clamp(max=self.chances.shape[1] - 1)[:, None])[:, 0])

    def hear(self, first: int, record: NDArray[np.float32]) -> list[int]:
        self.past.add(first, record, min(first, self.oldest))
        ending = np.isin(record[:, 0], list(self.ends))  # (steps, rows)
        place: list[int] = np.where(ending.any(0), ending.argmax(0), len(record)).tolist()
        free = []
        for seat, sitter in list(self.seated.items()):
            one, age = sitter.one, first - sitter.birth
            if age < 0:  # it came when these steps were on their way
                continue
            count = min(len(record), one.limit - age)
            for line in range(self.group):
                row = seat * self.group + line
                if line in self.found[seat]:
                    continue
                said, over = min(place[row] + 1, count), place[row] < count or age + count >= one.limit
                if self.decoding.loops is not None:
                    said, over = self.unlooped(sitter, row, age, said, over)
                if one.stops is not None or one.hear is not None:
                    said, over = self.told(sitter, row, age, said, over)
                if over:
                    self.collect(sitter, row, age + said)
                    self.found[seat].add(line)
            if len(self.found[seat]) == self.group or one.gone:
                one.found.sort(key=lambda h: -h.score)
                one.done = not one.gone
                del self.seated[seat]
                free.append(seat)
        return free

    def unlooped(self, sitter: Seated, row: int, age: int, said: int, over: bool) -> tuple[int, bool]:
        """What it says before it is seen to repeat itself."""
        for count in range(age + 1, age + said + 1):
            if due(count, self.decoding):
                tokens = self.past.since(sitter.birth, count)[:, 0, row].astype(int).tolist()
                if looping(tokens, self.decoding):
                    return count - age, True
        return said, over

    def told(self, sitter: Seated, row: int, age: int, said: int, over: bool) -> tuple[int, bool]:
        """Tell its tokens to who listens, one by one, up to what it was to stop at."""
        tokens = self.past.since(sitter.birth, age + said)[:, 0, row].astype(int).tolist()
        one = sitter.one
        for count in range(age + 1, age + said + 1):
            token = tokens[count - 1]
            if one.hear is not None and self.group == 1 and not one.gone and token not in self.ends:
                one.hear(token)
            if one.gone or stops(one, tokens[:count]):
                return count - age, True
        return said, over

    def collect(self, sitter: Seated, row: int, count: int) -> None:
        tokens, gains = self.past.since(sitter.birth, count)[:, :, row].T
        won = gains.tolist()
        sitter.one.found.append(hypothesis(self.way, sitter.one, tokens.astype(int).tolist(), won, sum(won)))


class SayingBeams(Saying):
    """Beam search: see beams.py. A record has, for each seat and beam, a candidate that may have ended (its score, its
    parent, its token and that one's log-probability, whether it has) and who goes on (parent, token, log-probability,
    score of all of it)."""

    def __init__(self, way: Way, states: StaticStates, vocab: int) -> None:
        super().__init__(way, states, vocab)
        self.beams = states.group
        self.record = torch.zeros(RUN, states.seats, self.beams, 9, device=self.device)
        self.scores = torch.zeros(states.seats, self.beams, device=self.device)
        self.leaders = torch.arange(states.seats, device=self.device)[:, None] * self.beams
        self.only = torch.full((vocab,), -torch.inf, device=self.device)
        self.only[way.eos] = 0

    def sit(self, seats: Sequence[int], asked: Sequence[Asked], last: Sequence[int], birth: int) -> None:
        super().sit(seats, asked, last, birth)
        chairs = torch.tensor(list(seats), device=self.device)
        self.scores[chairs] = -torch.inf  # all beams are the same as yet: only the first may be gone on with
        self.scores[chairs, 0] = 0.0

    def found(self, scores: Tensor) -> Candidates:
        """The best candidates of each seat, twice as many as there are beams."""
        beams, ages, count = self.beams, self.ages, 2 * self.beams
        if usable(scores) and not self.way.ended and count.bit_count() == 1 and count <= min(32, scores.shape[1]):
            from allyouneed.kernels.likeliest import few

            best, tokens, mass = few(scores, self.bans, ages, self.least, count)
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
        found = self.found(scores)
        ended = torch.isin(found.tokens, self.endings) | (self.limits <= ages + 1)[:, None]
        finished = (ended & found.scores.isfinite())[:, :beams]
        running, picked = found.scores.masked_fill(ended, -torch.inf).topk(beams)
        parents, tokens, gains = (part.gather(1, picked) for part in found[1:])
        self.scores.copy_(running)
        self.states.reorder((self.leaders + parents).flatten())
        self.newest.copy_(tokens.flatten())
        self.ages.add_(1)
        candidates = [part[:, :beams].float() for part in (*found, finished)]
        self.keep(torch.stack([*candidates, parents.float(), tokens.float(), gains, running], -1))

    def hear(self, first: int, record: NDArray[np.float32]) -> list[int]:
        self.past.add(first, record, min(first, self.oldest))
        free: list[int] = []
        for number, step in enumerate(record):
            anyone, best = step[..., 4].any(-1).tolist(), step[:, 0, 8].tolist()
            for seat, sitter in list(self.seated.items()):
                one, age = sitter.one, first + number - sitter.birth
                if age < 0:
                    continue
                if anyone[seat]:
                    self.collect(sitter, seat, age, step[seat])
                if one.gone or not self.hopeful(one, best[seat], age) or self.looped(sitter, seat, age + 1):
                    one.done = not one.gone
                    del one.found[self.decoding.best :]
                    del self.seated[seat]
                    free.append(seat)
        return free

    def looped(self, sitter: Seated, seat: int, age: int) -> bool:
        """Whether its best hypothesis repeats itself; where none has come to an end, they end as they are."""
        one = sitter.one
        if one.done or not due(age, self.decoding) or not looping(self.said(sitter, seat, age, 0)[0], self.decoding):
            return False
        if not one.found:
            scores = self.past.since(sitter.birth, age)[-1, seat, :, 8].tolist()
            ways = [(*self.said(sitter, seat, age, beam), score) for beam, score in enumerate(scores)]
            one.found = [hypothesis(self.way, one, *way) for way in ways if way[2] > float("-inf")]
            one.found.sort(key=lambda h: -h.score)
        return True

    def said(self, sitter: Seated, seat: int, age: int, beam: int) -> tuple[list[int], list[float]]:
        """Tokens of a hypothesis when there were so many, and their log-probabilities."""
        said, won = [], []
        for then in self.past.since(sitter.birth, age)[::-1, seat]:  # (beams, 9)
            said.append(int(then[beam, 6]))
            won.append(float(then[beam, 7]))
            beam = int(then[beam, 5])
        return said[::-1], won[::-1]

    def collect(self, sitter: Seated, seat: int, age: int, step: NDArray[np.float32]) -> None:
        for score, parent, token, gain, finished in step[:, :5]:
            if not finished:
                continue
            said, won = self.said(sitter, seat, age, int(parent))
            answer = hypothesis(self.way, sitter.one, [*said, int(token)], [*won, float(gain)], float(score))
            insort(sitter.one.found, answer, key=lambda h: -h.score)
            del sitter.one.found[self.beams :]

    def hopeful(self, one: Asked, best: float, age: int) -> bool:
        """Whether it may still find something better. `best`: of those that go on."""
        full = len(one.found) == self.beams
        if not full:
            return best > float("-inf")
        worst = one.found[-1].score
        running = best / self.decoding.normalise(age + 1 + self.way.counted)
        return running > worst and not self.decoding.early


def saying(way: Way, states: StaticStates, vocab: int) -> Saying:
    beams = way.decoding.method == "beam" and way.decoding.beam > 1
    return (SayingBeams if beams else SayingLines)(way, states, vocab)
