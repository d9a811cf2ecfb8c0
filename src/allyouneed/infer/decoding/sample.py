"""Greedy and sampling: every row goes its own way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from allyouneed.infer.decoding.base import DecodingSpec, RequestState, Search, stops
from allyouneed.infer.decoding.options import Decoding, draw, keep_likely
from allyouneed.infer.decoding.repetition import looping
from allyouneed.infer.decoding.topk import best, best_place, log_chance
from allyouneed.nn.states.base import concat_rows

LEAVERS = 8  # a row that is done leaves when one in so many can leave with it, for leaving copies the states


class IndependentSearch(Search):
    """Each row chooses one token at a time."""

    def __init__(self, way: DecodingSpec, asked: Sequence[RequestState], device: torch.device) -> None:
        super().__init__(way, asked, device)
        self.over = torch.zeros(len(self.tokens), dtype=torch.bool, device=device)
        self.chances: Tensor | None = None
        if self.decoding.method == "sample":
            keys = [(one, (one.seed, line, *one.request.sample_key)) for one in asked for line in range(self.group)]
            self.chances = torch.zeros(self.tokens.shape, dtype=torch.double)
            for row, (one, key) in enumerate(keys):
                self.chances[row, : one.limit] = chances(key, one.limit)
            self.chances = self.chances.to(device)

    @staticmethod
    def rows_each(decoding: Decoding) -> int:
        return decoding.best if decoding.method == "sample" else 1  # a beam of one

    def settle(self) -> None:
        super().settle()
        if self.group > 1:  # of each row
            self.limits, self.births = (x.repeat_interleave(self.group) for x in (self.limits, self.births))

    def join(self, other: Self) -> None:
        super().join(other)
        self.over = concat_rows(self.over, other.over)
        if self.chances is not None and other.chances is not None:
            self.chances = concat_rows(self.chances, other.chances)

    def step(self, logits: Tensor, tight: bool = False) -> list[int] | None:
        if self.fresh and self.group > 1:
            logits = logits.repeat_interleave(self.group, 0)
            if self.penalties is not None:
                self.penalties.repeat_rows(self.group)
        self.fresh, ages = False, self.ages
        raw = self.ruled(logits)
        short = self.short()
        if self.chances is None and self.penalties is None and short != "some":
            chosen, gains = best(raw, self.never if short == "none" else self.banned)
        else:
            chosen = self.choose(raw, ages)
            gains = log_chance(raw, chosen)
        if self.way.ended:
            last = self.limits == ages + 1
            chosen, gains = chosen.masked_fill(last, self.way.eos), gains.masked_fill(last, 0.0)
        self.say(chosen, gains, ages)
        if self.group == 1 and any(one.streams for one in self.requests):
            self.tell(chosen.tolist())
        ended = self.ending(chosen)
        if self.at_limit():
            ended = ended | (self.limits <= ages + 1)
        if any(one.request.stop is not None for one in self.requests):
            ended = ended | self.at_stop(ages + 1)
        if looked_at := self.looked_at():
            ended = ended | self.in_loops(looked_at)
        ended = ended & ~self.over
        if bool(ended.any()):
            self.collect(ended.nonzero()[:, 0].tolist())
            self.over |= ended
        elif not tight and not any(one.cancelled for one in self.requests):
            return None
        return self.drop_finished(tight)

    def choose(self, logits: Tensor, ages: Tensor) -> Tensor:
        if self.penalties is not None:
            logits = self.penalties.changed(logits)
        if self.never is not None:
            logits = logits.index_fill(-1, self.never, -torch.inf)
        logits = self.unending(logits, ages)
        if self.chances is None:
            return best_place(logits)
        asked = self.decoding
        likely = keep_likely(logits / asked.temperature, asked.top_k, asked.top_p, asked.min_p)
        return draw(likely, self.chances.gather(1, ages.clamp(max=self.chances.shape[1] - 1)[:, None])[:, 0])

    def tell(self, tokens: list[int]) -> None:
        for one, token in zip(self.requests, tokens, strict=True):
            if one.streams and not one.done and not one.cancelled and token not in self.ends:
                one.emit(token)

    def at_stop(self, ages: Tensor) -> Tensor:
        reach = max((one.request.stop.reach for one in self.requests if one.request.stop is not None), default=0)
        if not reach:
            return torch.zeros_like(self.over)
        past = self.past(ages, reach)
        return torch.tensor([stops(self.owner(row), said) for row, said in enumerate(past)], device=self.device)

    def in_loops(self, places: Sequence[int]) -> Tensor:
        rows = [place * self.group + line for place in places for line in range(self.group)]
        found = torch.zeros(len(self.tokens), dtype=torch.bool)
        for row, said in zip(rows, self.tokens[rows, : self.clock].tolist(), strict=True):
            found[row] = looping(said[: self.age(row // self.group)], self.decoding)
        return found.to(self.device)

    def owner(self, row: int) -> RequestState:
        return self.requests[row // self.group]

    def collect(self, rows: list[int]) -> None:
        said, gains = self.tokens[rows].tolist(), self.gains[rows].tolist()
        for row, tokens, gain in zip(rows, said, gains, strict=True):
            one, age = self.owner(row), self.age(row // self.group)
            one.hypotheses.append(self.hypothesis(one, tokens[:age], gain[:age], sum(gain[:age])))
            if len(one.hypotheses) == self.group:
                one.hypotheses.sort(key=lambda h: -h.score)
                one.done = True

    def drop_finished(self, tight: bool) -> list[int] | None:
        gone = [one.done or one.cancelled for one in self.requests]
        if not any(gone) or (LEAVERS * sum(gone) < len(gone) and not tight):
            return None
        places = [place for place, left in enumerate(gone) if not left]
        return self.keep_requests(places)

    def keep_requests(self, places: Sequence[int]) -> list[int]:
        order = super().keep_requests(places)
        index = torch.tensor(order, dtype=torch.long, device=self.device)
        self.over = self.over.index_select(0, index)
        self.chances = None if self.chances is None else self.chances.index_select(0, index)
        return order


def chances(key: tuple[int, ...], count: int) -> Tensor:
    """Uniform numbers in [0, 1) that depend on the key alone; a longer stream begins like a shorter one."""
    from numpy.random import PCG64, Generator, SeedSequence

    return torch.from_numpy(Generator(PCG64(SeedSequence(key))).random(count))
