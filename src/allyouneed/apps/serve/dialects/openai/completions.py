"""POST /v1/completions: a language model continues the prompt, an encoder-decoder reads it as its source."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from allyouneed.apps.serve.bodies import BodyRoute, off_loop
from allyouneed.apps.serve.dialects.openai.logprobs import completion_logprobs
from allyouneed.apps.serve.engine.sequences import Part, SequenceGroup, encode_prompts, prompt_tokens
from allyouneed.apps.serve.errors import ApiError, over_limit
from allyouneed.apps.serve.responses import Events, event_stream, json_response, new_id
from allyouneed.apps.serve.sampling import SamplingFields
from allyouneed.apps.serve.strict import Bool, Ignored, Int, RequestBody, Text, TokenId

if TYPE_CHECKING:
    from allyouneed.apps.serve.engine.logits_rules import TokenRecord
    from allyouneed.apps.serve.engine.served_model import ServedModel
    from allyouneed.infer.request import Request as DecodingRequest

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)
DEFAULT_TOKENS = 16  # as OpenAI documents it
Prompt = str | list[int]


class StreamOptions(RequestBody):
    include_usage: Bool | None = None
    include_obfuscation: Bool | None = None  # has no effect: nothing is added to hide lengths


class CompletionRequest(SamplingFields):
    model: Text | None = None
    prompt: Annotated[
        Text | list[TokenId] | list[Text] | list[list[TokenId]], Field(description="a text, several, or token ids")
    ]
    max_tokens: Annotated[Int, Field(ge=0)] | None = None
    best_of: Annotated[Int, Field(ge=1)] | None = None
    logprobs: Annotated[Int, Field(ge=0)] | None = None
    echo: Bool | None = None
    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    suffix: Text | None = None
    user: Ignored

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def choices(self) -> int:
        return (self.n or 1) if self.best_of is None else self.best_of

    def prompts(self, most: int, longest: int) -> list[Prompt]:
        given: Any = self.prompt
        single = isinstance(given, str) or (given and isinstance(given[0], int))
        found: list[Prompt] = [given] if single else given
        if not found:
            raise ApiError("the list of prompts is empty", param="prompt")
        if len(found) > most:
            raise over_limit("prompts", len(found), most, "prompt")
        if (length := max(map(len, found))) > longest:
            raise over_limit("characters or tokens in a prompt", length, longest, "prompt")
        return found


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    state = request.app.state
    limits = state.settings.limits
    if body.suffix:
        raise ApiError("suffix: the models of this server do not insert text; remove it", param="suffix")
    prompts = body.prompts(limits.texts, limits.prompt_characters)
    if body.stream and body.best_of not in (None, body.n or 1) and not body.use_beam_search:
        raise ApiError("best_of and stream are exclusive; remove one", param="best_of")
    body.check(limits)
    body.exact = bool(body.exact or state.settings.exact)
    answer = Completion(body, prompts, request)
    headers = {"x-exact": str(body.exact).lower()}
    if body.stream:
        return await event_stream(answer.stream(), headers)
    return json_response(await answer.whole(), headers)


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


class Completion:
    """The answer to one request. `records`: of the prompts' own tokens, for `echo`. `offsets`: characters of each
    choice that were sent."""

    def __init__(self, body: CompletionRequest, prompts: list[Prompt], request: Request) -> None:
        self.body, self.prompts, self.n = body, prompts, body.n or 1
        self.registry, self.client = request.app.state.registry, request.state.client
        self.head = {"id": new_id("cmpl"), "object": "text_completion", "created": int(time.time())}
        self.requests: list[DecodingRequest] = []
        self.records: list[list[TokenRecord]] = []
        self.offsets: dict[int, int] = {}

    async def whole(self) -> dict[str, Any]:
        async with self.registry.use(self.body.model) as model:
            if not await self._prepare(model):
                texts = await self._rewrite(model, self.prompts)
                parts: list[Part] = [
                    (prompt * self.n + index, text, [], "stop")
                    for prompt, some in enumerate(texts)
                    for index, text in enumerate(some)
                ]
                used = await self._split_usage(model, [text for some in texts for text in some], self.prompts)
            elif self.body.max_tokens == 0:
                parts = [(number * self.n, "", [], "length") for number in range(len(self.prompts))]
                used = prompt_tokens(self.requests), 0
            else:
                group = SequenceGroup(model, self.requests, self.body, self.client)
                await model.submit(group, streams=False)
                parts = await group.collect()
                used = prompt_tokens(self.requests), group.completion_tokens
            choices = [self._choice(model, *part, begins=True) for part in parts]
            return self.head | {"model": model.name, "choices": choices, "usage": usage(*used)}

    async def stream(self) -> Events:
        wants_usage = self.body.stream_options is not None and bool(self.body.stream_options.include_usage)
        nothing = {"usage": None} if wants_usage else {}
        async with self.registry.use(self.body.model) as model:
            head = self.head | {"model": model.name}
            used = [0, 0]
            if not await self._prepare(model):
                for number, prompt in enumerate(self.prompts):
                    (texts,) = await self._rewrite(model, [prompt])
                    for index, text in enumerate(texts, number * self.n):
                        yield {**head, "choices": [self._choice(model, index, text, [], "stop", True)], **nothing}
                    more = await self._split_usage(model, texts, [prompt])
                    used = [used[0] + more[0], used[1] + more[1]]
            elif self.body.max_tokens == 0:
                used = [prompt_tokens(self.requests), 0]
                for number in range(len(self.prompts)):
                    choice = self._choice(model, number * self.n, "", [], "length", True)
                    yield {**head, "choices": [choice], **nothing}
            else:
                group = SequenceGroup(model, self.requests, self.body, self.client)
                await model.submit(group, streams=True)
                begun: set[int] = set()
                async for index, text, records, finish in group.stream():
                    choice = self._choice(model, index, text, records, finish, index not in begun)
                    begun.add(index)
                    yield {**head, "choices": [choice], **nothing}
                used = [prompt_tokens(self.requests), group.completion_tokens]
            if wants_usage:
                yield {**head, "choices": [], "usage": usage(*used)}

    async def _prepare(self, model: ServedModel) -> bool:
        """Encode the prompts. False if a prompt must be split into several sources; then nothing is encoded."""
        text, body = model.text, self.body
        if body.echo and not text.continues:
            raise ApiError("echo: an encoder-decoder does not continue its prompt", param="echo")
        size = sum(map(len, self.prompts))
        if not await off_loop(size, lambda: all(text.is_whole(prompt, body) for prompt in self.prompts)):
            if body.logprobs is not None:
                raise ApiError("logprobs: only for a source of one sentence", param="logprobs")
            return False
        default = text.continues and body.max_tokens is None
        self.requests = await encode_prompts(model, self.prompts, body, 0 if default else body.max_tokens)
        if default:
            room = model.max_model_len - max(len(request.prompt) for request in self.requests)
            limit = max(1, min(DEFAULT_TOKENS, room))
            self.requests = [request._replace(limit=limit) for request in self.requests]
        if body.echo and body.logprobs is not None:
            top, ids = body.logprobs, [request.prompt for request in self.requests]
            self.records = await model.compute(
                ("prompt logprobs", top), ids, lambda some: text.prompt_records(some, top)
            )
        return True

    async def _rewrite(self, model: ServedModel, prompts: list[Prompt]) -> list[list[str]]:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        return await model.call(lambda: model.text.rewrite(texts, self.body), self.client, bool(self.body.exact))

    async def _split_usage(self, model: ServedModel, texts: list[str], prompts: list[Prompt]) -> tuple[int, int]:
        sources = [one for one in prompts if isinstance(one, str)]

        def count() -> tuple[int, int]:
            read, written = model.text.prompt_tokenizer, model.text.tokenizer
            return sum(map(len, read.encode_batch(sources))), sum(map(len, written.encode_batch(texts)))

        return await off_loop(sum(map(len, sources)) + sum(map(len, texts)), count)

    def _choice(
        self, model: ServedModel, index: int, text: str, records: list[TokenRecord], finish: str | None, begins: bool
    ) -> dict[str, Any]:
        """`begins`: the first part of this answer, which contains the prompt if the request has `echo`."""
        if self.body.echo and begins:
            number = index // self.n
            prompt = self.prompts[number]
            text = (prompt if isinstance(prompt, str) else model.text.tokenizer.decode(prompt)) + text
            records = [*(self.records[number] if self.records else []), *records]
        logprobs = None
        if self.body.logprobs is not None:
            offset = self.offsets.get(index, 0)
            logprobs = completion_logprobs(model.text.tokenizer, records, offset)
            self.offsets[index] = offset + len(text)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
