"""Beam search: the rows of a source are its best hypotheses so far."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from allyouneed.infer.decoding.base import DecodingSpec, RequestState, Search, stops
from allyouneed.infer.decoding.options import Candidates, Decoding, expand
from allyouneed.infer.decoding.repetition import looping
from allyouneed.nn.states.base import concat_rows


class BeamSearch(Search):
    """Of twice as many candidates as beams, those in the first half that end are finished; the best of those that do
    not end go on. A source is done when it has as many finished hypotheses as beams and its best running one, scored
    as if it ended here, would not be among them (what Hugging Face calls `early_stopping=False`); or, with `early`, as
    soon as it has as many."""

    def __init__(self, way: DecodingSpec, asked: Sequence[RequestState], device: torch.device) -> None:
        super().__init__(way, asked, device)
        self.scores = torch.zeros(len(asked), 1, device=device)  # one hypothesis a source: nothing said

    @staticmethod
    def rows_each(decoding: Decoding) -> int:
        return decoding.beam

    def join(self, other: Self) -> None:
        super().join(other)
        self.scores = concat_rows(self.scores, other.scores)

    def keep_requests(self, places: Sequence[int]) -> list[int]:
        order = super().keep_requests(places)
        self.scores = self.scores[list(places)]
        return order

    def step(self, logits: Tensor, tight: bool = False) -> list[int] | None:
        beams, ages, fresh = self.group, self.ages, self.fresh
        over = self.in_loops()
        logits, mass = self.ruled(logits), None
        if self.penalties is not None:  # as others do: log-probabilities are penalised, not logits
            logits = self.penalties.changed(logits.log_softmax(-1))
            mass = logits.new_zeros(len(self.requests), 1, 1)
        logits = logits.unflatten(0, (len(self.requests), -1))  # (sources, beams, vocab)
        if self.way.ended:
            logits = self.at_last(logits if mass is not None else logits.log_softmax(-1), ages)
            mass = logits.new_zeros(len(self.requests), 1, 1)
        short = self.short()
        if short == "some":  # the end mark gets no chance, but keeps its share
            mass = logits.logsumexp(-1, keepdim=True) if mass is None else mass
            logits = self.unending(logits, ages[:, None].expand(logits.shape[:2]))
        found = expand(logits, self.scores, 2 * beams, self.banned if short == "all" else self.never, mass)
        ended = self.ending(found.tokens)
        if self.at_limit():
            ended = ended | (self.limits <= ages + 1)[:, None]
        if any(one.request.stop is not None for one in self.requests):
            ended = ended | self.at_stop(found, ages)
        finished = (ended & found.scores.isfinite())[:, :beams]
        finished[over] = False
        if bool(finished.any()):
            self.collect(finished, found)
        scores, picked = found.scores.masked_fill(ended, -torch.inf).topk(beams)
        parents, tokens, gains = (part.gather(1, picked) for part in found[1:])
        if fresh:  # the first tokens all continue the same nothing
            if self.penalties is not None:
                self.penalties.repeat_rows(beams)
            parents = torch.arange(beams, device=self.device).expand_as(parents)
        self.fresh = False
        stay = self.hopeful(scores[:, 0])
        kept = torch.tensor(stay, dtype=torch.long, device=self.device)
        order = (kept[:, None] * beams + parents[kept]).flatten().tolist()
        moves = order != list(range(len(self.tokens)))
        if moves:
            self.reorder(order)
        self.keep(stay)
        self.scores = scores[kept]
        if stay:
            ages = ages[kept].repeat_interleave(beams)
            self.say(tokens[kept].flatten(), gains[kept].flatten(), ages)
        return order if moves else None

    def collect(self, finished: Tensor, candidates: Candidates) -> None:
        places, ranks = finished.nonzero(as_tuple=True)
        scores, parents, tokens, gains = (part[places, ranks] for part in candidates)
        rows = places * self.group + parents
        past = self.tokens[rows].tolist(), self.gains[rows].tolist()
        new = tokens.tolist(), gains.tolist(), scores.tolist()
        for place, said, won, token, gain, score in zip(places.tolist(), *past, *new, strict=True):
            one, age = self.requests[place], self.age(place)
            answer = self.hypothesis(one, [*said[:age], token], [*won[:age], gain], score)
            insort(one.hypotheses, answer, key=lambda h: -h.score)
            del one.hypotheses[self.group :]

    def in_loops(self) -> list[int]:
        """Sources whose best hypothesis repeats itself. Those that found an end have it; the others end as they are."""
        over = []
        for place in [] if self.fresh else self.looked_at():
            one, age, rows = self.requests[place], self.age(place), slice(place * self.group, (place + 1) * self.group)
            said, gains = self.tokens[rows, :age].tolist(), self.gains[rows, :age].tolist()
            if not looping(said[0], self.decoding):
                continue
            if not one.hypotheses:
                ways = zip(said, gains, self.scores[place].tolist(), strict=True)
                one.hypotheses = [self.hypothesis(one, *way) for way in ways if way[2] > float("-inf")]
                one.hypotheses.sort(key=lambda h: -h.score)
            del one.hypotheses[self.decoding.best :]
            one.done = True
            over.append(place)
        return over

    def at_last(self, logits: Tensor, ages: Tensor) -> Tensor:
        """Where a source reaches its limit, only the end mark, for certain."""
        only = torch.full_like(logits[0, 0], -torch.inf)
        only[self.way.eos] = 0
        return torch.where((self.limits == ages + 1)[:, None, None], only, logits)

    def at_stop(self, found: Candidates, ages: Tensor) -> Tensor:
        """(sources, candidates)"""
        reach = max((one.request.stop.reach for one in self.requests if one.request.stop is not None), default=0)
        if not reach:
            return torch.zeros_like(found.tokens, dtype=torch.bool)
        past = self.past(ages.repeat_interleave(self.group), reach)
        ways = zip(self.requests, found.parents.tolist(), found.tokens.tolist(), strict=True)
        stopped = [
            [stops(one, [*past[place * self.group + parent], token]) for parent, token in zip(*way, strict=True)]
            for place, (one, *way) in enumerate(ways)
        ]
        return torch.tensor(stopped, device=self.device)

    def hopeful(self, best: Tensor) -> list[int]:
        """The sources, by their place in the batch, that may still find something better; the others are done."""
        stay = []
        for place, (one, score) in enumerate(zip(self.requests, best.tolist(), strict=True)):
            full = len(one.hypotheses) == self.group
            worst = one.hypotheses[-1].score if full else float("-inf")
            running = score / self.decoding.normalise(self.age(place) + 1 + self.way.counted)
            if one.cancelled or one.done:
                continue
            if running > worst and not (self.decoding.early and full):
                stay.append(place)
            else:
                del one.hypotheses[self.decoding.best :]
                one.done = True
        return stay
