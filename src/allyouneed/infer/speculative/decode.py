"""Guessing ahead: more than one token in a pass of the model (speculative decoding, Leviathan et al. 2023).

Somebody cheap guesses how a text goes on (drafts.py). The model reads all the guesses in one pass, as it reads a
prompt: its states have one meaning at every tempo. Guesses are taken from the left, as far as the model agrees
(acceptance.py); one more token is the model's own; and what was read for nothing is taken back, of each row as much as
it likes (`States.trim`). So what is said is what would have been said without guesses: the same tokens of a greedy
search, and of samples whose guesses were not drawn; the same chances of all other samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from allyouneed.errors import UserError
from allyouneed.infer.decoding.base import Hypothesis, RequestState, hypothesis, stops
from allyouneed.infer.decoding.options import Decoding, inverted
from allyouneed.infer.decoding.repetition import looping
from allyouneed.infer.decoding.sample import LEAVERS, chances
from allyouneed.infer.decoding.topk import log_chance
from allyouneed.infer.prefill import Decoder
from allyouneed.infer.speculative.acceptance import Odds, instead, taken
from allyouneed.infer.speculative.drafts import Draft, Guess, Text
from allyouneed.nn.batch import Rows
from allyouneed.nn.states.base import States


@dataclass(frozen=True)
class Guesses:
    """How guessing went: `passes` of the model, tokens that were `guessed`, and how many of them were `right`."""

    passes: int = 0
    guessed: int = 0
    right: int = 0

    def __str__(self) -> str:
        each = (self.passes + self.right) / max(1, self.passes)
        return f"{self.right} of {self.guessed} guesses were right, {each:.1f} tokens a pass"

    def __add__(self, other: Guesses) -> Guesses:
        return Guesses(self.passes + other.passes, self.guessed + other.guessed, self.right + other.right)


@dataclass(frozen=True, slots=True)
class Guessed(Hypothesis):
    guesses: Guesses = Guesses()


def guesses_of(answers: Sequence[Sequence[Hypothesis]]) -> Guesses | None:
    """Of all of them; None: nobody guessed."""
    found = [one.guesses for answer in answers for one in answer if isinstance(one, Guessed)]
    return sum(found, Guesses()) if found else None


@dataclass(eq=False)
class Line(Text):
    """A text that is written, for one who asked."""

    asked: RequestState = field(kw_only=True)
    gains: list[float] = field(default_factory=list)
    over: bool = False
    guesses: Guesses = Guesses()


def refuse(decoding: Decoding) -> None:
    """What cannot be guessed ahead."""
    if decoding.method == "beam" and decoding.beam > 1:
        raise UserError(
            f"draft: a beam search of {decoding.beam} goes on with several texts at once, and guesses are for one; "
            "take the method greedy or sample"
        )


class Speculation:
    """Rows that are written with guesses, `group` of them for each who asks; `step` is one pass of the model."""

    def __init__(self, model: Decoder, states: States, last: Tensor, asked: Sequence[RequestState]) -> None:
        self.model, self.states = model, states
        self.way = asked[0].spec
        draft: Draft = self.way.draft
        self.ahead, self.device, self.odds = draft.ahead, states.device, Odds(self.way, states.device)
        self.group = self.way.decoding.best if self.odds.draws else 1
        scores = model.head(last).float()
        self.lines = [
            Line(list(one.request.prompt), len(one.request.prompt), self._luck(one, number), asked=one)
            for one in asked
            for number in range(self.group)
        ]
        self.guesser = draft.begin([one.request for one in asked], self.group, self.odds, scores.shape[1])
        if self.group > 1:
            self.states.repeat_rows(self.group)
            scores = scores.repeat_interleave(self.group, 0)
        self._say(scores, [Guess([]) for _ in self.lines])

    def _luck(self, asked: RequestState, number: int) -> Tensor | None:
        """The last of each three is what decides a token that nobody guessed: the number it has without guesses."""
        if not self.odds.draws:
            return None
        key = (asked.seed, number, *asked.request.sample_key)
        more = chances((*key, 1), 2 * asked.limit).view(-1, 2)
        return torch.cat((more, chances(key, asked.limit)[:, None]), 1).to(self.device)

    @property
    def active(self) -> bool:
        return not all(line.asked.finished for line in self.lines)

    @property
    def requests(self) -> list[RequestState]:
        return [line.asked for line in self.lines[:: self.group]]

    def close(self) -> None:
        self.states.close()

    def step(self) -> None:
        """Guess, read all guesses in one pass, say what is right and one token more."""
        self._leave()
        room = [0 if line.over else min(self.ahead, line.asked.limit - line.said - 1) for line in self.lines]
        guesses = self.guesser.guess(self.lines, room)
        new = [[] if x.over else [x.tokens[-1], *guess.tokens] for x, guess in zip(self.lines, guesses, strict=True)]
        hidden = self.model.advance(Rows.of(new, self.way.eos).to(self.device), self.states)
        rows = [row for row, some in enumerate(new) for _ in some]
        at = [place for some in new for place in range(len(some))]
        self._say(self.model.head(hidden[rows, at]).float(), guesses)
        seen = self.states.lengths
        kept = [count if x.over else len(x.tokens) - 1 for x, count in zip(self.lines, seen, strict=True)]
        if kept != seen:
            self.states.trim(kept)

    def _say(self, raw: Tensor, guesses: Sequence[Guess]) -> None:
        """By scores (places, vocab): of each row that is not over one for every guess, and one more."""
        going = [(line, guess) for line, guess in zip(self.lines, guesses, strict=True) if not line.over]
        ages = [line.said + place for line, guess in going for place in range(len(guess.tokens) + 1)]
        pasts: list[list[int]] = []
        if self.odds.minds_past:
            pasts = [x.tokens + g.tokens[:place] for x, g in going for place in range(len(g.tokens) + 1)]
        told = self._agreed(self.odds.shaped(raw, ages, pasts), going)
        first = 0
        places: list[int] = []
        for (_, guess), tokens in zip(going, told, strict=True):
            places += range(first, first + len(tokens))
            first += len(guess.tokens) + 1
        flat = torch.tensor([token for tokens in told for token in tokens], device=raw.device)
        gains = iter(log_chance(raw if len(places) == len(raw) else raw[places], flat).tolist())
        for (line, guess), tokens in zip(going, told, strict=True):
            line.guesses += Guesses(1, len(guess.tokens), len(tokens) - 1)
            for token, gain in [(token, next(gains)) for token in tokens]:
                if not line.over:  # what was right after the end is not said
                    self._add(line, token, gain)

    def _agreed(self, shaped: Tensor, going: Sequence[tuple[Line, Guess]]) -> list[list[int]]:
        """The guesses of each row that are taken, and the model's own token after them."""
        if not self.odds.draws:
            own = iter(self.odds.best(shaped).tolist())
        elif any(guess.chances is not None for _, guess in going):
            return self._accepted(self.odds.chances(shaped), going)
        else:
            luck = torch.cat([_luck(line, len(guess.tokens) + 1)[:, 2] for line, guess in going])
            own = iter(inverted(self.odds.chances(shaped), luck).tolist())
        found = []
        for _, guess in going:
            says = [next(own) for _ in range(len(guess.tokens) + 1)]
            right = next((n for n, token in enumerate(guess.tokens) if token != says[n]), len(guess.tokens))
            found.append(says[: right + 1])
        return found

    def _accepted(self, ours: Tensor, going: Sequence[tuple[Line, Guess]]) -> list[list[int]]:
        """Guesses that were drawn are taken by chance; in place of the first that is not, what was too seldom guessed
        is drawn."""
        found, at, against, numbers, first = [], [], [], [], 0
        for line, guess in going:
            count, luck = len(guess.tokens), _luck(line, len(guess.tokens) + 1)
            right = 0
            if guess.chances is not None:
                index = torch.tensor(guess.tokens, device=ours.device)[:, None]
                both = [odds.gather(1, index)[:, 0] for odds in (guess.chances, ours[first : first + count])]
                right = int(taken(luck[:count, 1], both[0], both[1]).long().cumprod(0).sum())
            found.append(guess.tokens[:right])
            at.append(first + right)
            against.append(guess.chances[right] if guess.chances is not None and right < count else None)
            numbers.append(luck[right, 2])
            first += count + 1
        theirs = torch.stack([ours.new_zeros(ours.shape[1]) if odds is None else odds for odds in against])
        own = instead(ours[at], theirs, torch.stack(numbers)).tolist()
        return [[*tokens, token] for tokens, token in zip(found, own, strict=True)]

    def _add(self, line: Line, token: int, gain: float) -> None:
        one = line.asked
        if self.way.ended and line.said + 1 == one.limit:
            token, gain = self.way.eos, 0.0
        line.tokens.append(token)
        line.gains.append(gain)
        ends = token in (self.way.eos, *self.way.ends)
        if one.streams and not ends:
            one.emit(token)
        line.over = (
            ends or line.said >= one.limit or (one.request.stop is not None and stops(one, line.tokens[line.given :]))
        )
        line.over = line.over or looping(line.tokens[line.given :], self.way.decoding)
        if line.over:
            answer = hypothesis(self.way, one, line.tokens[line.given :], line.gains, sum(line.gains))
            known = {part.name: getattr(answer, part.name) for part in fields(answer)}
            one.hypotheses.append(Guessed(**known, guesses=line.guesses))
            if len(one.hypotheses) == self.group:
                one.hypotheses.sort(key=lambda h: -h.score)
                one.done = True

    def _leave(self) -> None:
        """Sources that are done leave when enough of them can leave together, for leaving copies the states."""
        asked = [line.asked for line in self.lines[:: self.group]]
        stay = [place for place, one in enumerate(asked) if not one.done]
        if LEAVERS * (len(asked) - len(stay)) < len(asked) or len(stay) == len(asked):
            return
        rows = [place * self.group + number for place in stay for number in range(self.group)]
        self.states.select(rows)
        self.guesser.select(rows)
        self.lines = [self.lines[row] for row in rows]


def _luck(line: Line, count: int) -> Tensor:
    """(count, 3): of the next so many tokens."""
    assert line.chances is not None
    return line.chances[line.said : line.said + count]
