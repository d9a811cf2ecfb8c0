"""The sequences of one API request: submitted to the engine loop together, streamed as they come or collected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from allyouneed.apps.serve.bodies import off_loop
from allyouneed.apps.serve.errors import ApiError, over_limit

if TYPE_CHECKING:
    from allyouneed.apps.serve.engine.served_model import ServedModel
    from allyouneed.apps.serve.sampling import SamplingFields
    from allyouneed.infer.decoding.base import Hypothesis, RequestState
    from allyouneed.infer.request import Request

# A part of an answer: its index (`n` to each prompt), new text, new tokens (`TokenRecord`s where log-probabilities are
# recorded), and why it ends here: "stop", "length", or None.
Part = tuple[int, str, list[Any], str | None]


async def encode_prompts(
    model: ServedModel, prompts: Sequence[str | list[int]], fields: SamplingFields, limit: int | None
) -> list[Request]:
    def encode() -> list[Request]:
        return [model.text.encode(prompt, fields, limit) for prompt in prompts]

    return await off_loop(sum(map(len, prompts)), encode)


async def encode_chat(
    model: ServedModel, messages: Sequence[Mapping[str, Any]], fields: SamplingFields, extra: Mapping[str, Any]
) -> Request:
    """A chat, by the folder's template. `extra`: further values for it."""
    from allyouneed.data.chat.template import TemplateError  # imports tokenizers

    text, template = model.text, model.template
    if template is None or not text.continues:
        raise ApiError(
            f"the model {model.name} has no chat template; use /v1/completions", param="model", code="no_chat_template"
        )
    try:
        ids = await asyncio.to_thread(template.encode, messages, {"add_generation_prompt": True, **extra})
    except TemplateError as error:
        raise ApiError(str(error), param="messages") from None
    return text.encode(ids, fields, fields.limit)


def prompt_tokens(requests: Sequence[Request]) -> int:
    return sum([len(one.prompt if one.source is None else one.source) for one in requests])


class SequenceGroup:
    """`fields.draws` sequences of each request. Once its `model` has submitted it, `stream` yields parts of answers, or
    `collect` returns whole ones. Leaving either early cancels the sequences. `model`: of this process, or of an engine
    process (workers/remote_model.py). `completion_tokens`: so far."""

    def __init__(self, model: ServedModel, requests: Sequence[Request], fields: SamplingFields, client: str) -> None:
        self.model, self.requests, self.fields, self.client = model, requests, fields, client
        self.n, self.draws, self.beams = fields.n or 1, fields.draws, bool(fields.use_beam_search)
        self.records = fields.top is not None  # the queue gets `TokenRecord`s in place of tokens
        self.count = len(requests) * self.draws
        if self.count > (most := model.settings.limits.sequences):
            raise over_limit("sequences (prompts times n or best_of)", self.count, most, "n")
        self.specs = [model.text.spec(request, fields) for request in requests]
        self.queue: Any = asyncio.Queue()  # of (number, tokens) and, at the end of a sequence, (number, None)
        self.states: Sequence[RequestState] = ()
        self.cancel: Callable[[], None] = lambda: None
        self.completion_tokens = 0

    async def collect(self) -> list[Part]:
        """The best `n` answers to each prompt, in order."""
        records: list[list[Any]] = [[] for _ in range(self.count)]
        try:
            left = self.count
            while left:
                number, new = await self.queue.get()
                if new is not None:
                    records[number] += new
                    continue
                left -= 1
                self._check(number)
        finally:
            self.cancel()
        found: list[Part] = []
        for prompt in range(len(self.requests)):
            numbers = range(prompt * self.draws, (prompt + 1) * self.draws)
            answers = [(one, records[number]) for number in numbers for one in self.states[number].hypotheses]
            self.completion_tokens += sum([len(one.tokens) for one, _ in answers])
            if self.draws > self.n:
                answers = sorted(answers, key=lambda both: -mean_log_prob(both[0]))[: self.n]
            for index, (one, own) in enumerate(answers, prompt * self.n):
                answer = self.model.text.answer(self.requests[prompt], self.specs[prompt], one.tokens)
                found.append((index, answer, own, finish_reason(one)))
        return found

    async def stream(self) -> AsyncIterator[Part]:
        """One part per step and answer, or fewer (`Delivery.deliver`). A beam search yields its whole answers at its
        end."""
        text = self.model.text
        prompts = [number // self.draws for number in range(self.count)]
        detokenizers = [text.detokenizer(self.requests[prompt], self.specs[prompt]) for prompt in prompts]
        pending: list[list[Any]] = [[] for _ in prompts]  # tokens whose text is not complete yet
        try:
            left = self.count
            while left:
                number, new = await self.queue.get()
                if new is None:
                    left -= 1
                    self._check(number)
                    answers = self.states[number].hypotheses
                    if self.beams:
                        self.completion_tokens += sum([len(one.tokens) for one in answers])
                        for index, one in enumerate(answers, number * self.n):
                            answer = text.answer(self.requests[number], self.specs[number], one.tokens)
                            yield index, answer, [], finish_reason(one)
                    else:
                        yield number, detokenizers[number].end(), pending[number], finish_reason(answers[0])
                elif not self.beams:
                    self.completion_tokens += len(new)
                    pending[number] += new
                    if piece := detokenizers[number].add_all([one.token for one in new] if self.records else new):
                        new, pending[number] = pending[number], []
                        yield number, piece, new, None
        finally:
            self.cancel()

    def _check(self, number: int) -> None:
        """Raise what made a sequence fail."""
        state = self.states[number]
        if state.error is not None:
            raise state.error
        if not state.done:
            raise ApiError("the sequence was cancelled", 503, code="cancelled")


def mean_log_prob(hypothesis: Hypothesis) -> float:
    """Per token."""
    return hypothesis.log_prob / max(1, len(hypothesis.log_probs))


def finish_reason(hypothesis: Hypothesis) -> str:
    return "stop" if hypothesis.finished else "length"
