"""The sequences of one API request: submitted to the engine loop together, streamed as they come or collected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from allyouneed.apps.serve.errors import ApiError, over_limit

if TYPE_CHECKING:
    from allyouneed.apps.serve.engine.generating import GeneratingModel, SequenceJob
    from allyouneed.apps.serve.engine.logits_rules import TokenRecord
    from allyouneed.apps.serve.engine.text_models import EncodedPrompt
    from allyouneed.apps.serve.sampling import GenerationOptions
    from allyouneed.infer.decoding.base import Hypothesis

INLINE = 20_000  # characters that are tokenized on the event loop itself


@dataclass
class Choice:
    """An answer. `prompt`: the index of its prompt; `index`: among the answers to it; `finish`: "stop" or "length" once
    it is complete; `score`: mean log-probability per token."""

    prompt: int
    index: int
    text: str = ""
    records: list[TokenRecord] = field(default_factory=list)
    tokens: int = 0
    finish: str | None = None
    score: float = 0.0
    offset: int = 0  # characters of it that were sent


@dataclass(frozen=True)
class Delta:
    """What a step added to an answer: its text, and its tokens, with their records if the request asks for
    log-probabilities. `finish`: set with the last one."""

    choice: Choice
    text: str
    records: list[Any]
    finish: str | None


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.prompt_tokens + other.prompt_tokens, self.completion_tokens + other.completion_tokens)

    def openai(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": total,
            "completion_tokens": self.completion_tokens,
        }


async def encode_prompts(
    model: GeneratingModel, prompts: Sequence[str | list[int]], options: GenerationOptions, specials: bool = False
) -> list[EncodedPrompt]:
    def encode() -> list[EncodedPrompt]:
        return [model.text.encode(prompt, options, specials) for prompt in prompts]

    return encode() if sum(map(len, prompts)) < INLINE else await asyncio.to_thread(encode)


class Generation:
    """After `start`, `stream` yields deltas, or `collect` waits for whole answers. Leaving either early cancels the
    sequences."""

    def __init__(
        self, model: GeneratingModel, prompts: Sequence[EncodedPrompt], options: GenerationOptions, client: str
    ) -> None:
        self.model, self.prompts, self.options, self.client = model, prompts, options, client
        if (count := len(prompts) * options.draws) > (most := model.settings.limits.sequences):
            raise over_limit("sequences (prompts times n or best_of)", count, most, "n")
        self.queue: Any = asyncio.Queue()  # of (number, tokens) and, at the end of a sequence, (number, None)
        self.jobs: Sequence[SequenceJob] = ()
        self.choices = [Choice(number, 0) for number in range(len(prompts)) for _ in range(options.draws)]
        for number, choice in enumerate(self.choices):
            choice.index = number % options.draws

    @property
    def usage(self) -> Usage:
        prompt = sum(len(prompt.shown) for prompt in self.prompts)
        return Usage(prompt, sum(choice.tokens for choice in self.choices))

    async def start(self, streams: bool) -> None:
        """Submit all sequences, or none if one is refused."""
        self.jobs = await self.model.submit(self, streams)

    def cancel(self) -> None:
        self.model.cancel(self.jobs)

    async def collect(self) -> list[Choice]:
        """Whole answers, the best `n` of each prompt, in order."""
        try:
            left = len(self.choices)
            while left:
                number, records = await self.queue.get()
                if records is not None:
                    self.choices[number].records += records
                    continue
                left -= 1
                self._check(number)
            return self._best()
        finally:
            self.cancel()

    def _best(self) -> list[Choice]:
        if self.options.beam is not None or self.options.draws == 1:
            found = []
            for choice, job in zip(self.choices, self.jobs, strict=True):
                answers = [Choice(choice.prompt, n, records=choice.records) for n in range(len(job.hypotheses))]
                for answer, hypothesis in zip(answers, job.hypotheses, strict=True):
                    self._finish(answer, hypothesis)
                choice.tokens = sum(answer.tokens for answer in answers)
                found += answers
            return found
        for choice, job in zip(self.choices, self.jobs, strict=True):
            self._finish(choice, job.hypotheses[0])
        if self.options.n == self.options.draws:
            return self.choices
        best: list[Choice] = []
        for number in range(len(self.prompts)):
            own = sorted((one for one in self.choices if one.prompt == number), key=lambda one: -one.score)
            for index, choice in enumerate(own[: self.options.n]):
                choice.index = index
                best.append(choice)
        return best

    def _finish(self, choice: Choice, hypothesis: Hypothesis) -> None:
        text, prompt = self.model.text, self.prompts[choice.prompt]
        detokenizer = text.detokenizer(prompt, self.options)
        choice.text = text.clean(detokenizer.add_all(hypothesis.tokens) + detokenizer.end())
        choice.tokens, choice.finish = len(hypothesis.tokens), finish_reason(hypothesis)
        choice.score = hypothesis.log_prob / max(1, len(hypothesis.log_probs))

    async def stream(self) -> AsyncIterator[Delta]:
        """One delta per step and answer, or fewer (`Delivery.deliver`). A beam search yields its whole answers at
        its end."""
        text, beams = self.model.text, self.options.beam is not None
        detokenizers = [text.detokenizer(self.prompts[choice.prompt], self.options) for choice in self.choices]
        pending: list[list[Any]] = [[] for _ in self.choices]  # tokens whose text is not complete yet
        recorded = self.options.logprobs is not None
        try:
            left = len(self.choices)
            while left:
                number, records = await self.queue.get()
                choice, detokenizer = self.choices[number], detokenizers[number]
                if records is None:
                    left -= 1
                    self._check(number)
                    if beams:
                        for answer in self._answers(number):
                            yield Delta(answer, answer.text, [], answer.finish)
                        continue
                    piece, reason = detokenizer.end(), finish_reason(self.jobs[number].hypotheses[0])
                    choice.finish = reason
                    yield Delta(choice, piece, pending[number], reason)
                elif not beams:
                    choice.tokens += len(records)
                    pending[number] += records
                    tokens = [record.token for record in records] if recorded else records
                    if piece := detokenizer.add_all(tokens):
                        records, pending[number] = pending[number], []
                        yield Delta(choice, piece, records, None)
        finally:
            self.cancel()

    def _answers(self, number: int) -> list[Choice]:
        choice = self.choices[number]
        answers = []
        for index, hypothesis in enumerate(self.jobs[number].hypotheses):
            answers.append(Choice(choice.prompt, index))
            self._finish(answers[-1], hypothesis)
        choice.tokens = sum(answer.tokens for answer in answers)
        return answers

    def _check(self, number: int) -> None:
        """Raise what made a sequence fail."""
        job = self.jobs[number]
        if job.error is not None:
            raise job.error
        if not job.done:
            raise ApiError("the sequence was cancelled", 503, code="cancelled")


def finish_reason(hypothesis: Hypothesis) -> str:
    return "stop" if hypothesis.finished else "length"
