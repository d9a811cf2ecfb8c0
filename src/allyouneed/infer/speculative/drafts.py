"""Drafts: a smaller model, or a look-up in the text itself, proposes the next tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from allyouneed.errors import UserError
from allyouneed.infer.decoding.sampling import invert_cdf, token_probs
from allyouneed.infer.decoding.topk import argmax
from allyouneed.infer.request import Request
from allyouneed.infer.speculative.acceptance import PositionRules
from allyouneed.nn.batch import Rows
from allyouneed.nn.states.window import MAX_TRIM

if TYPE_CHECKING:
    from allyouneed.data.tokenizers.base import Tokenizer
    from allyouneed.infer.model_runner import ModelRunner

MODEL_AHEAD, LOOKUP_AHEAD = 4, 8  # draft tokens per pass: of a model, and of a look-up, which costs nothing
MAX_NGRAM, MIN_NGRAM = 4, 2  # tokens that must have occurred before for their continuation to be proposed


@dataclass(eq=False)
class DraftRow:
    """One text: all its tokens, beginning with a prompt of `prompt_length` tokens. `uniforms` decide what is sampled:
    for each token one to draw the draft token, one to accept it, one to draw the model's own."""

    tokens: list[int]
    prompt_length: int
    uniforms: Tensor | None = None  # (most tokens, 3)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length


class DraftTokens(NamedTuple):
    """Proposed tokens. `probs` (tokens, vocab): the distributions they were drawn from; None: they were not drawn."""

    tokens: list[int]
    probs: Tensor | None = None


class Drafter(ABC):
    """Proposes tokens for the rows of one batch."""

    @abstractmethod
    def propose(self, rows: Sequence[DraftRow], counts: Sequence[int]) -> list[DraftTokens]:
        """Draft at most `counts` tokens for each row."""

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""


class Draft(ABC):
    """`ahead`: tokens proposed per pass."""

    def __init__(self, ahead: int) -> None:
        if not 1 <= ahead <= MAX_TRIM - 1:  # what `States.trim` can remove
            raise UserError(f"ahead={ahead}: must be from 1 to {MAX_TRIM - 1}")
        self.ahead = ahead

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for drafts that propose the same, so that their requests share a batch, and batches their graphs."""
        return (id(self),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Draft) and type(other) is type(self) and other.key == self.key

    def __hash__(self) -> int:
        return hash((type(self), self.key))

    @abstractmethod
    def start(self, requests: Sequence[Request], group: int, rules: PositionRules, vocab: int) -> Drafter:
        """A drafter for these requests, `group` rows each, under the rules of a model with `vocab` tokens."""


# --- look-up --------------------------------------------------------------------------------------------------------


class PromptLookup(Draft):
    """What followed the last few tokens where they occurred before, in the prompt or the text (prompt look-up, Saxena
    2023). `source`: source and target share a vocabulary, so sources are searched as well."""

    def __init__(self, ahead: int = LOOKUP_AHEAD, source: bool = True) -> None:
        super().__init__(ahead)
        self.source = source

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.ahead, self.source) if type(self) is PromptLookup else super().key

    def start(self, requests: Sequence[Request], group: int, rules: PositionRules, vocab: int) -> Drafter:
        sources = [list(request.source or ()) if self.source else [] for request in requests]
        return LookupDrafter([source for source in sources for _ in range(group)])


class NgramIndex:
    """Where each n-gram of a growing text ended last, with a token after it."""

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], int] = {}
        self.read = 0

    def update(self, tokens: Sequence[int]) -> None:
        for end in range(max(self.read, MIN_NGRAM), len(tokens)):
            for size in range(MIN_NGRAM, min(MAX_NGRAM, end) + 1):
                self.ends[tuple(tokens[end - size : end])] = end
        self.read = len(tokens)


class LookupIndex:
    """Finds what followed the same tokens before: in the text itself, else in its source. In a source, whose order is
    much the same, one matching token is enough: the one nearest to the current position."""

    def __init__(self, source: Sequence[int]) -> None:
        self.source, self.source_ngrams, self.text_ngrams = source, NgramIndex(), NgramIndex()
        self.source_ngrams.update(source)
        self.positions: dict[int, list[int]] = {}
        for position, token in enumerate(source[:-1]):
            self.positions.setdefault(token, []).append(position)

    def continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """What followed the longest n-gram of last tokens that occurred before."""
        self.text_ngrams.update(tokens)
        for size in range(min(MAX_NGRAM, len(tokens)), MIN_NGRAM - 1, -1):
            ngram = tuple(tokens[-size:])
            if (at := self.text_ngrams.ends.get(ngram)) is not None:
                found = list(tokens[at : at + count])
                while len(found) < count:  # a repetition up to here continues
                    found += found[: count - len(found)]
                return found
            if (at := self.source_ngrams.ends.get(ngram)) is not None:
                return list(self.source[at : at + count])
        positions = self.positions.get(tokens[-1], ()) if tokens else ()
        near = min(positions, key=lambda position: abs(position + 1 - len(tokens)), default=None)
        return [] if near is None else list(self.source[near + 1 : near + 1 + count])


class LookupDrafter(Drafter):
    def __init__(self, sources: Sequence[Sequence[int]]) -> None:
        self.indexes = [LookupIndex(source) for source in sources]

    def propose(self, rows: Sequence[DraftRow], counts: Sequence[int]) -> list[DraftTokens]:
        return [
            DraftTokens(index.continuation(row.tokens, count) if count else [])
            for index, row, count in zip(self.indexes, rows, counts, strict=True)
        ]

    def select(self, rows: Sequence[int]) -> None:
        self.indexes = [self.indexes[row] for row in rows]


# --- a smaller model ------------------------------------------------------------------------------------------------


class DraftModel(Draft):
    """Another engine, whose model has the same vocabulary."""

    def __init__(self, runner: ModelRunner, ahead: int = MODEL_AHEAD) -> None:
        super().__init__(ahead)
        self.runner = runner

    @property
    def key(self) -> tuple[Any, ...]:
        own = (self.ahead, id(self.runner.model), self.runner.limit)
        return own if type(self) is DraftModel else super().key

    def start(self, requests: Sequence[Request], group: int, rules: PositionRules, vocab: int) -> Drafter:
        return ModelDrafter(self.runner, requests, group, rules, vocab)


class ModelDrafter(Drafter):
    """Reads the tokens generated since its last call and generates a few more, which the next call trims. It proposes
    nothing for texts longer than its model supports."""

    def __init__(
        self, runner: ModelRunner, requests: Sequence[Request], group: int, rules: PositionRules, vocab: int
    ) -> None:
        self.runner, self.rules, self.vocab = runner, rules, vocab
        runner.model.eval()
        some, fits = fit_requests(runner, requests)
        self.states, _ = runner.prefill(some)
        if group > 1:
            self.states.repeat_rows(group)
        self.fits = [fit for fit in fits for _ in range(group)]

    def propose(self, rows: Sequence[DraftRow], counts: Sequence[int]) -> list[DraftTokens]:
        self._trim(rows)
        counts = [count if fits else 0 for count, fits in zip(map(self._room, rows, counts), self.fits, strict=True)]
        texts = [list(row.tokens) for row in rows]
        probs: list[list[Tensor]] = [[] for _ in rows]
        for step in range(max(counts, default=0)):
            active = [number for number, count in enumerate(counts) if count > step]
            logits = self._advance(active, rows, texts)
            tokens, drawn = self._choose(logits, [(rows[number], texts[number]) for number in active])
            for index, (number, token) in enumerate(zip(active, tokens.tolist(), strict=True)):
                texts[number].append(token)
                if drawn is not None:
                    probs[number].append(drawn[index])
        return [
            DraftTokens(text[len(row.tokens) :], torch.stack(some) if some else None)
            for row, text, some in zip(rows, texts, probs, strict=True)
        ]

    def _room(self, row: DraftRow, count: int) -> int:
        """How many of `count` tokens its model has positions for; the last one is not read."""
        limit = self.runner.limit
        return count if limit is None else max(0, min(count, limit + 1 - len(row.tokens)))

    def _trim(self, rows: Sequence[DraftRow]) -> None:
        """Remove draft tokens that were rejected: all of a text but its last token is final."""
        seen = self.states.lengths
        kept = [
            min(count, len(row.tokens) - 1) if fits else count
            for row, count, fits in zip(rows, seen, self.fits, strict=True)
        ]
        if kept != seen:
            self.states.trim(kept)

    def _advance(self, active: Sequence[int], rows: Sequence[DraftRow], texts: Sequence[list[int]]) -> Tensor:
        """Logits (active, vocab) of the token after these texts, under the model's rules."""
        runner, seen = self.runner, self.states.lengths
        new: list[list[int]] = [[] for _ in texts]
        for number in active:
            new[number] = texts[number][seen[number] :]
        last = runner.decoder.advance(Rows.of(new, runner.pad).to(self.states.device), self.states, last=True)[:, 0]
        logits = runner.decoder.head(last if len(active) == len(new) else last[list(active)]).float()
        logits = nn.functional.pad(logits, (0, self.vocab - logits.shape[1]), value=-torch.inf)  # or cut
        lengths = [len(texts[number]) - rows[number].prompt_length for number in active]
        return self.rules.apply(logits, lengths, [texts[number] for number in active])

    def _choose(self, logits: Tensor, active: Sequence[tuple[DraftRow, list[int]]]) -> tuple[Tensor, Tensor | None]:
        if not self.rules.samples:
            return argmax(logits), None
        probs, numbers = token_probs(logits, self.rules.options), []
        for row, text in active:
            assert row.uniforms is not None
            numbers.append(row.uniforms[len(text) - row.prompt_length, 0])
        return invert_cdf(probs, torch.stack(numbers)), probs

    def select(self, rows: Sequence[int]) -> None:
        self.states.select(rows)
        self.fits = [self.fits[row] for row in rows]


def fit_requests(runner: ModelRunner, requests: Sequence[Request]) -> tuple[list[Request], list[bool]]:
    """Requests that a draft model can read, and which of them are the given ones; for the others it drafts nothing."""
    fits = [_fits(runner, request) for request in requests]
    return [request if fit else _shorten(request) for request, fit in zip(requests, fits, strict=True)], fits


def _fits(runner: ModelRunner, request: Request) -> bool:
    source_limit = getattr(getattr(runner.model, "config", None), "source_limit", None)
    if runner.limit is not None and len(request.prompt) > runner.limit:
        return False
    return source_limit is None or len(request.source or ()) <= source_limit


def _shorten(request: Request) -> Request:
    """A stand-in for a request that is too long, so that row numbers stay."""
    source = None if request.source is None else request.source[:1]
    return request._replace(prompt=request.prompt[:1], source=source, media=())


# --- by name --------------------------------------------------------------------------------------------------------


def draft_for(model: Any, draft: Any, ahead: int | None, engine: Callable[[Any], ModelRunner]) -> Draft | None:
    """The draft a user names: "lookup", or a loaded model, which `engine` makes an engine of."""
    if draft is None:
        if ahead is not None:
            raise UserError(f'ahead={ahead} requires a draft; set draft to "lookup" or a smaller model')
        return None
    more = {} if ahead is None else {"ahead": ahead}
    own = model.folder.tokenizers
    if draft == "lookup":
        return PromptLookup(**more, source=own.joint)
    if not hasattr(draft, "folder"):
        raise UserError(f'draft={draft!r}: must be "lookup" or a loaded model, draft=ayn.load(FOLDER)')
    theirs = draft.folder.tokenizers
    where = draft.folder.path or "this model"
    if type(draft) is not type(model):
        raise UserError(f"draft: {where} is for {draft.folder.task.get('kind')}; use a model for the same task")
    known = draft.model.config.vocabs.target >= own.target.size
    if not (known and _is_same(own.target, theirs.target) and _is_same(own.source, theirs.source)):
        raise UserError(
            f"draft: {where} has a different vocabulary ({theirs.target.size} tokens; this model has "
            f"{own.target.size}); train it with the same tokenizer"
        )
    return DraftModel(engine(draft), **more)


def _is_same(ours: Tokenizer, theirs: Tokenizer) -> bool:
    marks = (ours.pad, ours.bos, ours.eos) == (theirs.pad, theirs.bos, theirs.eos)
    ids = range(ours.size)
    return marks and ours.size == theirs.size and (ours.hash == theirs.hash or ours.tokens(ids) == theirs.tokens(ids))
