"""Texts that go on: a prompt in, what comes after it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, overload

from allyouneed.config import tree_of
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.decoding import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.pieces import quoted
from allyouneed.infer.predictor import Judged, Predictor, checked, spread
from allyouneed.infer.search import Hypothesis

SHOWN = 16  # tokens of a document that a sample of its continuation begins with


@dataclass(frozen=True)
class Continuation:
    """What may come after a prompt. `score`: log-probability over length penalty; `tokens`: how many were added;
    `finished`: the model itself came to an end."""

    text: str
    score: float
    tokens: int
    finished: bool


@dataclass(frozen=True)
class Generation:
    """A prompt and how it goes on, best first."""

    prompt: str
    candidates: list[Continuation]
    notes: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.candidates[0].text


class Generator(Predictor):
    """Goes on with prompts as a language model does. Where it was trained on pairs of prompt and answer, it answers."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder)
        tokenizer = self.tokenizer
        self.prefix = folder.task["kind"] == "prefix-lm"
        self.answers = self.prefix and folder.task.get("reads") == "pairs"
        never = [number for number in tokenizer.specials if number != tokenizer.eos]
        self.engine = Engine(
            self.model, tokenizer.bos, tokenizer.eos, tokenizer.pad, never, self.limit, seen_whole=self.prefix
        )

    def retrieve(self, index: Path | str, encoder: Path | str | None = None) -> Generator:
        """The same, looking up each chunk it has read or written in an index (`allyouneed index`). `encoder`: where the
        index's encoder lies, if not where it lay when the index was made."""
        from allyouneed.infer.retriever import Retriever

        config = self.model.config
        if config.kind != "retro":
            raise UserError(f"{self.folder.path}: a model of kind {config.kind} reads no neighbours; 'retro' does")
        found = Retriever(index, encoder, str(self.device))
        if found.index.tokenizer.hash != self.tokenizer.hash:
            raise UserError(f"{index}: holds tokens of another tokenizer; make it with --tokenizer {self.folder.path}")
        if found.index.chunk != config.chunk:
            raise UserError(f"{index}: has chunks of {found.index.chunk} tokens, the model reads {config.chunk}")
        self.engine.search = partial(found.search, count=config.neighbours)
        return self

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
        decoding: Decoding | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        first: int = 0,
        **changes: Any,
    ) -> list[Generation]:
        """The same with scores, several continuations (`best=3`) and notes. `max_length` counts new tokens, `extra` is
        their number when it is not given. `first`: the place of the first prompt in a longer request; samples depend on
        it and on the seed alone."""
        texts = checked(prompts, "generate_full")
        settled = Decoding.of(self.folder.decoding if decoding is None else tree_of(decoding), **changes)
        encoded = [self._prompt(text) for text in texts]
        answers = self.engine.go_on(encoded, settled, on_progress, first)
        return [self._told(*both) for both in zip(texts, encoded, answers, strict=True)]

    def _prompt(self, text: str) -> list[int]:
        ids = [self.tokenizer.bos, *self.tokenizer.encode(text), *([self.tokenizer.eos] if self.answers else [])]
        if self.limit is not None and len(ids) > self.limit:
            raise UserError(
                f"{quoted(text)}: {len(ids)} tokens with the marks, the model has places for {self.limit}; shorten it"
            )
        return ids

    def _told(self, text: str, prompt: list[int], answers: list[Hypothesis]) -> Generation:
        found = []
        for answer in answers:
            # together with the prompt, whose last character may end with the first new bytes
            said = self.tokenizer.decode(answer.tokens if self.answers else [*prompt, *answer.tokens])
            added = said if self.answers else said[len(text) :]
            found.append(Continuation(added, answer.score, len(answer.tokens), answer.finished))
        notes = []
        longest = len(prompt) + len(answers[0].tokens)
        if longest > self.folder.max_tokens:
            notes.append(
                f"{quoted(text)}: {longest} tokens with what was added; it was trained on {self.folder.max_tokens}"
            )
        return Generation(text, found, notes)

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
