"""Texts that go on: a prompt in, what comes after it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Generator as Coroutine
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

from allyouneed.config import tree_of
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.detokenizer import StopStrings, StreamingDetokenizer, detokenize
from allyouneed.infer.decoding.options import SAMPLING, Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.predictors.base import Judged, checked, spread
from allyouneed.infer.retrieval.predictor import Retrieving
from allyouneed.infer.speculative.decode import DraftStats, check_draft_options, total_stats
from allyouneed.infer.speculative.drafts import Draft, draft_for
from allyouneed.infer.translation.split import quoted

SHOWN = 16  # tokens of a document that a sample of its continuation begins with


@dataclass(frozen=True)
class Continuation:
    """What may come after a prompt. `score`: log-probability over length penalty; `tokens`: how many were added;
    `finished`: the model itself came to an end, or to a string it was to stop at."""

    text: str
    score: float
    tokens: int
    finished: bool


@dataclass(frozen=True)
class Generation:
    """A prompt and how it goes on, best first. `guesses`: how often a draft was right, where there was one."""

    prompt: str
    candidates: list[Continuation]
    notes: list[str] = field(default_factory=list)
    guesses: DraftStats | None = None

    @property
    def text(self) -> str:
        return self.candidates[0].text


class Generator(Retrieving):
    """Goes on with prompts as a language model does. Where it was trained on pairs of prompt and answer, it answers."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder)
        self.prefix = folder.task["kind"] == "prefix-lm"
        self.answers = self.prefix and folder.task.get("reads") == "pairs"

    @cached_property
    def engine(self) -> Engine:
        tokenizer, marks = self.tokenizer, self.tokenizer.template
        specials = [number for number in tokenizer.specials if number != tokenizer.eos]
        return Engine(
            self.model,
            tokenizer.bos,
            tokenizer.eos,
            tokenizer.pad,
            marks.never if tokenizer.foreign else specials,  # theirs may have been trained to say some
            self.limit,
            bidirectional_prompt=self.prefix,
            ends=marks.stops,
            ended=marks.ended,
        )

    @overload
    def generate(self, prompts: str, **options: Any) -> str: ...

    @overload
    def generate(self, prompts: Sequence[str], **options: Any) -> list[str]: ...

    def generate(self, prompts: str | Sequence[str], **options: Any) -> str | list[str]:
        """What comes after a prompt, or after each of a list. `options` are those of `generate_full`:
        `method="greedy"`, `max_length=200`, `temperature=0.8`, `seed=3`, …"""
        many = [prompts] if isinstance(prompts, str) else prompts
        found = [full.text for full in self.generate_full(many, **options)]
        return found[0] if isinstance(prompts, str) else found

    def generate_full(
        self,
        prompts: Sequence[str],
        *,
        specials: bool = False,
        decoding: Decoding | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        first: int = 0,
        draft: Any = None,
        ahead: int | None = None,
        **changes: Any,
    ) -> list[Generation]:
        """The same with scores, several continuations (`best=3`) and notes. `max_length` counts new tokens, `extra` is
        their number when it is not given. `stop`: strings before which a text ends. `specials`: what a prompt spells
        like a special token of an imported model is one. `first`: the place of the first prompt in a longer request;
        samples depend on it and on the seed alone. `draft`: a smaller model, or "lookup", that guesses `ahead` tokens
        at a time, so that they come sooner."""
        texts = checked(prompts, "generate_full")
        self.retrieve_as_trained()
        settled = self._settled(decoding, changes)
        guesser = self._draft(draft, ahead, settled)
        encoded = [self._prompt(text, specials) for text in texts]
        self.engine.exact = self.exact
        answers = self.engine.complete(encoded, settled, on_progress, first, self._stops(settled), guesser)
        return [self._told(*both, settled) for both in zip(texts, encoded, answers, strict=True)]

    def stream(
        self,
        prompt: str,
        *,
        specials: bool = False,
        decoding: Decoding | None = None,
        first: int = 0,
        draft: Any = None,
        ahead: int | None = None,
        **changes: Any,
    ) -> Coroutine[str, None, Generation]:
        """What `generate` says, piece by piece as it comes: whole characters, and nothing of a string to stop at. A
        beam search says all at its end. Read with `yield from`, it gives the whole `Generation` at last."""
        (text,) = checked([prompt], "stream")
        self.retrieve_as_trained()
        settled = self._settled(decoding, changes)
        if settled.best > 1:
            raise UserError(f"best={settled.best}: one text is told as it comes; leave it out, or use generate_full")
        self.engine.exact = self.exact
        return self._pieces(text, self._prompt(text, specials), settled, first, self._draft(draft, ahead, settled))

    def _draft(self, draft: Any, ahead: int | None, settled: Decoding) -> Draft | None:
        found = draft_for(self, draft, ahead, lambda other: other.engine)
        if found is not None:
            check_draft_options(settled)
        return found

    def _pieces(
        self, text: str, prompt: list[int], settled: Decoding, first: int, draft: Draft | None
    ) -> Coroutine[str, None, Generation]:
        spoken = StreamingDetokenizer(self.tokenizer, self._before(prompt), settled.stop)
        tokens = self.engine.stream(prompt, settled, first, self._stops(settled), draft)
        while True:
            try:
                piece = spoken.add(next(tokens))
            except StopIteration as over:
                answer: Hypothesis = over.value
                break
            if piece:
                yield piece
        if rest := spoken.end():
            yield rest
        return self._told(text, prompt, [answer], settled)

    def _settled(self, decoding: Decoding | None, changes: dict[str, Any]) -> Decoding:
        """Who names an option of sampling wants to sample, whatever the model's own way is."""
        if "method" not in changes and any(changes.get(name) is not None for name in (*SAMPLING, "seed")):
            changes = {"method": "sample"} | changes
        return Decoding.of(self.folder.decoding if decoding is None else tree_of(decoding), **changes)

    def _stops(self, settled: Decoding) -> StopStrings | None:
        return StopStrings(self.tokenizer, settled.stop) if settled.stop else None

    def _prompt(self, text: str, specials: bool) -> list[int]:
        tokenizer = self.tokenizer
        ids = [*tokenizer.opening, *tokenizer.encode(text, specials), *([tokenizer.eos] if self.answers else [])]
        if not ids:  # a model without a begin mark learnt that a text begins after the end of another (GPT-2)
            ids = [tokenizer.eos]
        if self.limit is not None and len(ids) > self.limit:
            raise UserError(
                f"{quoted(text)}: {len(ids)} tokens with the marks, the model has places for {self.limit}; shorten it"
            )
        return ids

    def _before(self, prompt: list[int]) -> list[int]:
        """What the text that is told goes on with: how a token is written may depend on the one before it."""
        return [] if self.answers else prompt

    def _told(self, text: str, prompt: list[int], answers: list[Hypothesis], settled: Decoding) -> Generation:
        found = []
        for answer in answers:
            added = detokenize(self.tokenizer, answer.tokens, self._before(prompt), settled.stop)
            found.append(Continuation(added, answer.score, len(answer.tokens), answer.finished))
        notes = []
        longest = len(prompt) + len(answers[0].tokens)
        if longest > self.folder.max_tokens:
            notes.append(
                f"{quoted(text)}: {longest} tokens with what was added; it was trained on {self.folder.max_tokens}"
            )
        best, said = answers[0], len(answers[0].tokens)
        if best.repeats:
            notes.append(f"{quoted(text)}: repeats itself; stopped after {said} tokens (loops=0 lets it go on)")
        elif not best.finished and said < settled.continuation_limit():
            notes.append(f"{quoted(text)}: stopped after {said} tokens, for the model has places for {self.limit}")
        return Generation(text, found, notes, total_stats([answers]))

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> Judged:
        """There is no right answer: only samples. A language model is judged by its perplexity."""
        shown = spread(examples, show)
        if self.answers:
            prompts = [example.texts[0] for example in shown]
        else:
            prompts = [self.tokenizer.decode(self.tokenizer.encode(e.texts[0])[:SHOWN]) for e in shown]
        found = self.generate(prompts, decoding=decoding) if prompts else []
        samples = []
        for example, prompt, text in zip(shown, prompts, found, strict=True):
            samples.append({"prompt": prompt, "goes on": text})
            if self.answers:
                samples[-1]["expected"] = example.texts[1]
        return Judged({}, "", samples)
