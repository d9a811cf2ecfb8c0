"""One batch being decoded, token by token, over the model's States."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from allyouneed.infer.decoding import Candidates, Decoding, draw, expand, keep_likely
from allyouneed.infer.penalties import Penalties
from allyouneed.nn.batch import Rows
from allyouneed.nn.state import States

LEAVERS = 8  # a row that is done leaves when one in so many can leave with it, for leaving copies the states


class Decoder(Protocol):
    """What decoding asks of a model."""

    head: Any  # hidden states -> logits

    def start(self, source: Any) -> States:
        """`source`: what to read first; or how many texts to write, for a model that reads nothing."""

    def advance(self, new: Rows, states: States, last: bool = False) -> Tensor: ...


class Stops(Protocol):
    """Whether a text is over, by the last tokens of it."""

    reach: int  # how many of them it looks at

    def __call__(self, tokens: Sequence[int]) -> bool: ...


@dataclass(frozen=True)
class Hypothesis:
    """One answer. `tokens` are without begin and end mark; `finished` says whether the model set the end mark itself,
    or said what it was told to stop at.

    `score` is `log_prob` divided by the length penalty; `log_probs` has one entry a token, and one for the end mark.
    """

    tokens: list[int]
    score: float
    log_prob: float
    log_probs: list[float]
    finished: bool


@dataclass(frozen=True)
class Job:
    """What to decode: the model's states after it has read all that is given, and how long each answer may get.

    `given`: the prompts, for penalties. `ends`: tokens that end an answer as `eos` does. `counted`: so many tokens of
    the prompt count as said, where lengths matter. `ended`: an answer that reaches its limit ends there with `eos`, for
    nothing. `rules(scores, said)` may change the scores (rows, vocab) of the next token, before anything is made of
    them, by what each row has said (rows, time).
    """

    model: Decoder
    states: States
    last: Tensor  # hidden states of the last token of each prompt (sources, width)
    limits: list[int]
    names: list[tuple[int, ...]]  # what makes each source's samples its own
    decoding: Decoding
    eos: int
    forbidden: Sequence[int]
    given: Sequence[Sequence[int]] | None = None
    stops: Stops | None = None
    ends: Sequence[int] = ()
    counted: int = 0
    ended: bool = False
    rules: Callable[[Tensor, Tensor], Tensor] | None = None


def search(job: Job) -> list[list[Hypothesis]]:
    """The best hypotheses of each source, best first."""
    beams = job.decoding.method == "beam" and job.decoding.beam > 1
    return Beams(job).run() if beams else Lines(job).run()


class Search(ABC):
    """All rows have as many new tokens (`time`); the rows of one source are neighbours."""

    def __init__(self, job: Job) -> None:
        self.model, self.states, self.decoding = job.model, job.states, job.decoding
        self.stops, self.rules = job.stops, job.rules
        self.penalties = Penalties.of(job.decoding, job.given or [() for _ in job.limits])
        self.eos, self.ends = job.eos, {job.eos, *job.ends}
        self.counted, self.forced = job.counted, job.ended
        self.device = job.last.device
        self.last = job.last
        self.found: list[list[Hypothesis]] = [[] for _ in job.limits]
        self.group = self.decoding.rows
        self.limits = torch.tensor(job.limits, device=self.device)  # of each source still in the batch
        rows, longest = len(job.limits) * self.group, max(job.limits)
        self.tokens = torch.empty(rows, longest, dtype=torch.long, device=self.device)  # what each row has said
        self.gains = torch.empty(rows, longest, device=self.device)  # and the log-probability of each token
        self.time = 0
        never = [token for token in job.forbidden if token not in self.ends]
        self._ends = torch.tensor(sorted(self.ends), device=self.device)
        self._never = torch.tensor(never, dtype=torch.long, device=self.device)
        self._not_yet = torch.tensor([*never, *self.ends], dtype=torch.long, device=self.device)

    @abstractmethod
    def run(self) -> list[list[Hypothesis]]: ...

    def banned(self) -> Tensor | None:
        ids = self._not_yet if self.time + self.counted < self.decoding.min_length else self._never
        return ids if len(ids) else None

    def logits(self) -> Tensor:
        scores: Tensor = self.model.head(self.last).float()
        return scores if self.rules is None else self.rules(scores, self.tokens[: len(scores), : self.time])

    def say(self, tokens: Tensor, gains: Tensor) -> None:
        self.tokens[:, self.time] = tokens
        self.gains[:, self.time] = gains
        self.time += 1
        if self.penalties is not None:
            self.penalties.say(tokens.tolist())

    def fan(self, count: int) -> None:
        """From here on so many rows for each source."""
        self.states.fan(count)
        if self.penalties is not None:
            self.penalties.fan(count)

    def ending(self, tokens: Tensor) -> Tensor:
        return tokens == self.eos if len(self.ends) == 1 else torch.isin(tokens, self._ends)

    def read(self) -> None:
        """Give the model what was just said."""
        new = Rows(self.tokens[:, self.time - 1 : self.time])
        self.last = self.model.advance(new, self.states)[:, -1]

    def reorder(self, order: list[int]) -> None:
        """Row i goes on with the past of row `order[i]`. Nothing moves when nothing changes."""
        if order != list(range(len(self.tokens))):
            self.states.select(order)
            index = torch.tensor(order, device=self.device)
            self.tokens, self.gains = self.tokens.index_select(0, index), self.gains.index_select(0, index)
            if self.penalties is not None:
                self.penalties.select(order)

    def stopped(self, tokens: Sequence[int]) -> bool:
        """Whether what was said ends with what it was to stop at."""
        return self.stops is not None and self.stops(tokens[-self.stops.reach :])

    def hypothesis(self, tokens: list[int], gains: list[float], log_prob: float) -> Hypothesis:
        ended = tokens[-1] in self.ends
        score = log_prob / self.decoding.normalise(len(tokens) + self.counted)
        return Hypothesis(tokens[:-1] if ended else tokens, score, log_prob, gains, ended or self.stopped(tokens))


class Lines(Search):
    """Greedy and sampling: every row goes its own way and chooses one token at a time."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        if self.decoding.method != "sample":  # a beam of one
            self.group = 1
        self.owners = torch.arange(len(job.limits), device=self.device).repeat_interleave(self.group)
        self.limits = self.limits.repeat_interleave(self.group)  # of each row
        self.over = torch.zeros_like(self.limits, dtype=torch.bool)
        self.chances: Tensor | None = None
        if self.decoding.method == "sample":
            keys = [(self.decoding.seed, line, *name) for name in job.names for line in range(self.group)]
            self.chances = torch.stack([chances(key, self.tokens.shape[1]) for key in keys]).to(self.device)

    def run(self) -> list[list[Hypothesis]]:
        for _ in self.steps():
            pass
        return [sorted(found, key=lambda h: -h.score) for found in self.found]

    def steps(self) -> Iterator[Tensor]:
        """The token of each row that is still in the batch, step after step."""
        if self.group > 1:
            self.fan(self.group)
            self.last = self.last.repeat_interleave(self.group, 0)
        while True:
            raw = self.logits()
            chosen = self.choose(raw)
            gains = raw.gather(1, chosen[:, None])[:, 0] - raw.logsumexp(-1)
            if self.forced:
                last = self.limits == self.time + 1
                chosen, gains = chosen.masked_fill(last, self.eos), gains.masked_fill(last, 0.0)
            self.say(chosen, gains)
            ended = (self.ending(chosen) | (self.limits <= self.time) | self.at_stop()) & ~self.over
            some = bool(ended.any())
            if some:
                self.collect(ended.nonzero()[:, 0])
                self.over |= ended
            yield chosen
            if some and bool(self.over.all()):
                return
            if some:
                self.leave()
            self.read()

    def choose(self, logits: Tensor) -> Tensor:
        if self.penalties is not None:
            logits = self.penalties.changed(logits)
        banned = self.banned()
        if banned is not None:
            logits = logits.index_fill(-1, banned, -torch.inf)
        if self.chances is None:
            return logits.argmax(-1)
        asked = self.decoding
        likely = keep_likely(logits / asked.temperature, asked.top_k, asked.top_p, asked.min_p)
        return draw(likely, self.chances[:, self.time])

    def at_stop(self) -> Tensor:
        if self.stops is None:
            return torch.zeros_like(self.over)
        last = self.tokens[:, max(0, self.time - self.stops.reach) : self.time].tolist()
        return torch.tensor([self.stopped(tokens) for tokens in last], device=self.device)

    def collect(self, rows: Tensor) -> None:
        said, gains = self.tokens[rows, : self.time].tolist(), self.gains[rows, : self.time].tolist()
        for owner, tokens, gain in zip(self.owners[rows].tolist(), said, gains, strict=True):
            self.found[owner].append(self.hypothesis(tokens, gain, sum(gain)))

    def leave(self) -> None:
        gone = self.over.view(-1, self.group).all(1)
        if LEAVERS * int(gone.sum()) < len(gone):
            return
        stay = (~gone).repeat_interleave(self.group).nonzero()[:, 0]
        self.reorder(stay.tolist())
        self.owners, self.limits, self.over = self.owners[stay], self.limits[stay], self.over[stay]
        self.chances = None if self.chances is None else self.chances[stay]


class Beams(Search):
    """Of twice as many candidates as beams, those in the first half that end are finished; the best of those that do
    not end go on. A source is done when it has as many finished hypotheses as beams and its best running one, scored
    as if it ended here, would not be among them (what Hugging Face calls `early_stopping=False`); or, with `early`, as
    soon as it has as many."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.sources = list(range(len(job.limits)))  # those still in the batch

    def run(self) -> list[list[Hypothesis]]:
        beams = self.group
        scores = torch.zeros(len(self.sources), 1, device=self.device)  # one hypothesis a source: nothing said
        while True:
            logits, mass = self.logits(), None
            if self.penalties is not None:  # as others do: log-probabilities are penalised, not logits
                logits = self.penalties.changed(logits.log_softmax(-1))
                mass = logits.new_zeros(len(self.sources), 1, 1)
            logits = logits.unflatten(0, (len(self.sources), -1))  # (sources, beams, vocab)
            if self.forced:
                logits = self.at_last(logits if mass is not None else logits.log_softmax(-1))
                mass = logits.new_zeros(len(self.sources), 1, 1)
            found = expand(logits, scores, 2 * beams, self.banned(), mass)
            ended = self.ending(found.tokens) | (self.limits <= self.time + 1)[:, None] | self.at_stop(found)
            finished = (ended & found.scores.isfinite())[:, :beams]
            if bool(finished.any()):
                self.collect(finished, found)
            scores, picked = found.scores.masked_fill(ended, -torch.inf).topk(beams)
            parents, tokens, gains = (part.gather(1, picked) for part in found[1:])
            if self.time == 0:  # the first tokens all continue the same nothing
                self.fan(beams)
                parents = torch.arange(beams, device=self.device).expand_as(parents)
            stay = self.hopeful(scores[:, 0])
            if not stay:
                return [answers[: self.decoding.best] for answers in self.found]
            kept = torch.tensor(stay, device=self.device)
            self.reorder((kept[:, None] * beams + parents[kept]).flatten().tolist())
            self.say(tokens[kept].flatten(), gains[kept].flatten())
            self.sources = [self.sources[place] for place in stay]
            scores, self.limits = scores[kept], self.limits[kept]
            self.read()

    def collect(self, finished: Tensor, candidates: Candidates) -> None:
        places, ranks = finished.nonzero(as_tuple=True)
        scores, parents, tokens, gains = (part[places, ranks] for part in candidates)
        rows = places * self.group + parents
        past = self.tokens[rows, : self.time].tolist(), self.gains[rows, : self.time].tolist()
        new = tokens.tolist(), gains.tolist(), scores.tolist()
        for place, said, won, token, gain, score in zip(places.tolist(), *past, *new, strict=True):
            answers = self.found[self.sources[place]]
            insort(answers, self.hypothesis([*said, token], [*won, gain], score), key=lambda h: -h.score)
            del answers[self.group :]

    def at_last(self, logits: Tensor) -> Tensor:
        """Where a source reaches its limit, only the end mark, for certain."""
        only = torch.full_like(logits[0, 0], -torch.inf)
        only[self.eos] = 0
        return torch.where((self.limits == self.time + 1)[:, None, None], only, logits)

    def at_stop(self, found: Candidates) -> Tensor:
        """(sources, candidates)"""
        if self.stops is None:
            return torch.zeros_like(found.tokens, dtype=torch.bool)
        past = self.tokens[:, max(0, self.time - self.stops.reach) : self.time].tolist()
        ways = zip(found.parents.tolist(), found.tokens.tolist(), strict=True)
        stopped = [
            [self.stopped([*past[place * self.group + parent], token]) for parent, token in zip(*way, strict=True)]
            for place, way in enumerate(ways)
        ]
        return torch.tensor(stopped, device=self.device)

    def hopeful(self, best: Tensor) -> list[int]:
        """The sources, by their place in the batch, that may still find something better."""
        divisor = self.decoding.normalise(self.time + 1 + self.counted)
        stay = []
        for place, score in enumerate((best / divisor).tolist()):
            answers = self.found[self.sources[place]]
            worst = answers[-1].score if len(answers) == self.group else float("-inf")
            enough = self.decoding.early and len(answers) == self.group
            if score > worst and not enough:
                stay.append(place)
        return stay


def chances(key: tuple[int, ...], count: int) -> Tensor:
    """Uniform numbers in [0, 1) that depend on the key alone; a longer stream begins like a shorter one."""
    from numpy.random import PCG64, Generator, SeedSequence

    return torch.from_numpy(Generator(PCG64(SeedSequence(key))).random(count))
