"""Who guesses what comes next: a smaller model, or the text itself, which may have said it before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import inverted
from allyouneed.infer.request import Request
from allyouneed.infer.speculative.acceptance import Odds
from allyouneed.nn.batch import Rows
from allyouneed.nn.states.window import MAX_TRIM

if TYPE_CHECKING:
    from allyouneed.data.tokenizers.base import Tokenizer
    from allyouneed.infer.model_runner import ModelRunner
    from allyouneed.infer.predictors.base import Predictor

AHEAD, LOOKED = 4, 8  # guesses a pass: of a model, and of those that cost nothing
LONGEST, SHORTEST = 4, 2  # tokens that must have been said before for what followed them to be guessed


@dataclass(eq=False)
class Text:
    """One text that is written: all its tokens, what was `given` counted; `chances` decide what is drawn, three numbers
    for each token that is said: one for the guess, one for whether it is taken, one for what is said instead."""

    tokens: list[int]
    given: int
    chances: Tensor | None = None  # (tokens that may be said, 3)

    @property
    def said(self) -> int:
        return len(self.tokens) - self.given


class Guess(NamedTuple):
    """Tokens that may come next. `chances` (tokens, vocab): those they were drawn with; None: they were not drawn."""

    tokens: list[int]
    chances: Tensor | None = None


class Guesser(ABC):
    """Guesses for the rows of one batch."""

    @abstractmethod
    def guess(self, texts: Sequence[Text], counts: Sequence[int]) -> list[Guess]:
        """How each text may go on, by at most so many tokens."""

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Only these rows stay, in this order."""


class Draft(ABC):
    """`ahead`: so many tokens are guessed at a time."""

    def __init__(self, ahead: int) -> None:
        if not 1 <= ahead <= MAX_TRIM - 1:  # what a state can take back
            raise UserError(f"ahead={ahead}: from 1 to {MAX_TRIM - 1} tokens can be guessed at a time")
        self.ahead = ahead

    @abstractmethod
    def begin(self, requests: Sequence[Request], group: int, odds: Odds, vocab: int) -> Guesser:
        """For these, `group` rows each, by the odds that the model itself follows over so many tokens."""


# --- the text itself ------------------------------------------------------------------------------------------------


class Lookup(Draft):
    """What followed the last few tokens when they came before, in what was read or said (prompt look-up, Saxena 2023).
    `source`: sources are in the words of what is written, and are looked through as well."""

    def __init__(self, ahead: int = LOOKED, source: bool = True) -> None:
        super().__init__(ahead)
        self.source = source

    def begin(self, requests: Sequence[Request], group: int, odds: Odds, vocab: int) -> Guesser:
        sources = [list(one.source or ()) if self.source else [] for one in requests]
        return Seen([source for source in sources for _ in range(group)])


class Runs:
    """Where each run of tokens of a text that grows ended last, with something behind it."""

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], int] = {}
        self.read = 0

    def learn(self, text: Sequence[int]) -> None:
        for end in range(max(self.read, SHORTEST), len(text)):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self.ends[tuple(text[end - size : end])] = end
        self.read = len(text)


class Places:
    """What came after the same tokens before: in the text itself, else in its source. Of a source, whose words come in
    much the same order, one token is enough: the one nearest to where the text is now."""

    def __init__(self, source: Sequence[int]) -> None:
        self.source, self.there, self.here = source, Runs(), Runs()
        self.there.learn(source)
        self.words: dict[int, list[int]] = {}
        for place, token in enumerate(source[:-1]):
            self.words.setdefault(token, []).append(place)

    def followed(self, text: Sequence[int], count: int) -> list[int]:
        """After the longest run of last tokens that was there before."""
        self.here.learn(text)
        for size in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
            run = tuple(text[-size:])
            if (at := self.here.ends.get(run)) is not None:
                found = list(text[at : at + count])
                while len(found) < count:  # what repeats itself up to here goes on so
                    found += found[: count - len(found)]
                return found
            if (at := self.there.ends.get(run)) is not None:
                return list(self.source[at : at + count])
        places = self.words.get(text[-1], ()) if text else ()
        near = min(places, key=lambda place: abs(place + 1 - len(text)), default=None)
        return [] if near is None else list(self.source[near + 1 : near + 1 + count])


class Seen(Guesser):
    def __init__(self, sources: Sequence[Sequence[int]]) -> None:
        self.places = [Places(source) for source in sources]

    def guess(self, texts: Sequence[Text], counts: Sequence[int]) -> list[Guess]:
        found = []
        for places, text, count in zip(self.places, texts, counts, strict=True):
            found.append(Guess(places.followed(text.tokens, count) if count else []))
        return found

    def select(self, rows: Sequence[int]) -> None:
        self.places = [self.places[row] for row in rows]


# --- a smaller model ------------------------------------------------------------------------------------------------


class Smaller(Draft):
    """Another engine, whose model has the same vocabulary."""

    def __init__(self, engine: ModelRunner, ahead: int = AHEAD) -> None:
        super().__init__(ahead)
        self.engine = engine

    def begin(self, requests: Sequence[Request], group: int, odds: Odds, vocab: int) -> Guesser:
        return Speaker(self.engine, requests, group, odds, vocab)


class Speaker(Guesser):
    """Reads what was said since it was asked last, and says a few tokens more, which are taken back when it is asked
    again. Texts that it has no place for it leaves to the other."""

    def __init__(self, engine: ModelRunner, requests: Sequence[Request], group: int, odds: Odds, vocab: int) -> None:
        self.engine, self.odds, self.vocab = engine, odds, vocab
        engine.model.eval()
        fits = [self._fits(one) for one in requests]
        some = [one if fit else _shortest(one) for one, fit in zip(requests, fits, strict=True)]
        self.states, _ = engine.prefill(some)
        if group > 1:
            self.states.repeat_rows(group)
        self.fits = [fit for fit in fits for _ in range(group)]

    def _fits(self, request: Request) -> bool:
        config, limit = getattr(self.engine.model, "config", None), self.engine.limit
        heard = getattr(config, "source_limit", None)
        return (limit is None or len(request.prompt) <= limit) and (heard is None or len(request.source or ()) <= heard)

    def guess(self, texts: Sequence[Text], counts: Sequence[int]) -> list[Guess]:
        self._take_back(texts)
        counts = [count if fits else 0 for count, fits in zip(map(self._room, texts, counts), self.fits, strict=True)]
        written = [list(text.tokens) for text in texts]
        chances: list[list[Tensor]] = [[] for _ in texts]
        for step in range(max(counts, default=0)):
            asked = [row for row, count in enumerate(counts) if count > step]
            shaped = self._read(asked, texts, written)
            tokens, odds = self._chosen(shaped, [(texts[row], written[row]) for row in asked])
            for number, (row, token) in enumerate(zip(asked, tokens.tolist(), strict=True)):
                written[row].append(token)
                if odds is not None:
                    chances[row].append(odds[number])
        return [
            Guess(all_[len(text.tokens) :], torch.stack(some) if some else None)
            for text, all_, some in zip(texts, written, chances, strict=True)
        ]

    def _room(self, text: Text, count: int) -> int:
        """How many of so many guesses it has places for; the last one is not read."""
        limit = self.engine.limit
        return count if limit is None else max(0, min(count, limit + 1 - len(text.tokens)))

    def _take_back(self, texts: Sequence[Text]) -> None:
        """Of guesses that were read those that were not taken: all of a text but its last token is settled."""
        seen = self.states.lengths
        settled = [
            min(count, len(text.tokens) - 1) if fits else count
            for text, count, fits in zip(texts, seen, self.fits, strict=True)
        ]
        if settled != seen:
            self.states.trim(settled)

    def _read(self, asked: Sequence[int], texts: Sequence[Text], written: Sequence[list[int]]) -> Tensor:
        """What these rows may say next, when all that is written of them has been read: (asked, vocab)."""
        engine, seen = self.engine, self.states.lengths
        new: list[list[int]] = [[] for _ in written]
        for row in asked:
            new[row] = written[row][seen[row] :]
        last = engine.decoder.advance(Rows.of(new, engine.pad).to(self.states.device), self.states, last=True)[:, 0]
        scores = engine.decoder.head(last if len(asked) == len(new) else last[list(asked)]).float()
        scores = nn.functional.pad(scores, (0, self.vocab - scores.shape[1]), value=-torch.inf)  # or cut
        ages = [len(written[row]) - texts[row].given for row in asked]
        return self.odds.shaped(scores, ages, [written[row] for row in asked])

    def _chosen(self, shaped: Tensor, asked: Sequence[tuple[Text, list[int]]]) -> tuple[Tensor, Tensor | None]:
        if not self.odds.draws:
            return self.odds.best(shaped), None
        odds, numbers = self.odds.chances(shaped), []
        for text, written in asked:
            assert text.chances is not None
            numbers.append(text.chances[len(written) - text.given, 0])
        return inverted(odds, torch.stack(numbers)), odds

    def select(self, rows: Sequence[int]) -> None:
        self.states.select(rows)
        self.fits = [self.fits[row] for row in rows]


def _shortest(request: Request) -> Request:
    """In place of one that there is no place for, so that rows stay where they are."""
    return replace(request, prompt=request.prompt[:1], source=None if request.source is None else request.source[:1])


# --- as a user names them -------------------------------------------------------------------------------------------


def draft_for(model: Predictor, draft: Any, ahead: int | None, engine: Callable[[Any], ModelRunner]) -> Draft | None:
    """What a user names as `draft`: "lookup", or a model that was loaded. `engine` makes one of such a model."""
    if draft is None:
        if ahead is not None:
            raise UserError(
                f'ahead={ahead}: so many tokens are guessed by a draft; name one: "lookup", or a smaller model'
            )
        return None
    more = {} if ahead is None else {"ahead": ahead}
    own = model.folder.tokenizers
    if draft == "lookup":
        return Lookup(**more, source=own.joint)
    if not hasattr(draft, "folder"):
        raise UserError(f'draft={draft!r}: it is "lookup", or a model: draft=ayn.load(FOLDER)')
    theirs = draft.folder.tokenizers
    where = draft.folder.path or "this model"
    if type(draft) is not type(model):
        raise UserError(f"draft: {where} is for {draft.folder.task.get('kind')}; take a model for the same task")
    known = draft.model.config.vocabs.target >= own.target.size
    if not (known and _alike(own.target, theirs.target) and _alike(own.source, theirs.source)):
        raise UserError(
            f"draft: {where} has another vocabulary ({theirs.target.size} tokens, not {own.target.size} or "
            "others); train it with the same tokenizer"
        )
    return Smaller(engine(draft), **more)


def _alike(ours: Tokenizer, theirs: Tokenizer) -> bool:
    marks = (ours.pad, ours.bos, ours.eos) == (theirs.pad, theirs.bos, theirs.eos)
    every = range(ours.size)
    return (
        marks and ours.size == theirs.size and (ours.hash == theirs.hash or ours.tokens(every) == theirs.tokens(every))
    )
