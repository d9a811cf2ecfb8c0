"""POST /v1/completions: a language model continues the prompt, an encoder-decoder reads it as its source."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from allyouneed.apps.serve.dialects.openai.logprobs import completion_logprobs
from allyouneed.apps.serve.engine.generation import Choice, Generation, Usage, encode_prompts
from allyouneed.apps.serve.errors import ApiError, over_limit
from allyouneed.apps.serve.responses import Events, event_stream, json_response, new_id
from allyouneed.apps.serve.sampling import GenerationOptions, SamplingFields
from allyouneed.apps.serve.strict import Bool, Ignored, Int, RequestBody, Text, TokenId

if TYPE_CHECKING:
    from allyouneed.apps.serve.engine.logits_rules import TokenRecord
    from allyouneed.apps.serve.engine.served_model import ServedModel
    from allyouneed.apps.serve.engine.text_models import EncodedPrompt

router = APIRouter(tags=["OpenAI"])
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
    options = body.options(limits, body.max_tokens, body.logprobs, body.best_of)
    options = options.exactly() if state.settings.exact else options
    answer = Completion(body, prompts, options, request.state.client)
    headers = {"x-exact": str(options.exact).lower()}
    if body.stream:
        return await event_stream(answer.stream(state.registry), headers)
    return json_response(await answer.whole(state.registry), headers)


@dataclass
class Completion:
    """The answer to one request. `records`: of the prompts' own tokens, for `echo`."""

    body: CompletionRequest
    prompts: list[Prompt]
    options: GenerationOptions
    client: str
    id: str = field(default_factory=lambda: new_id("cmpl"))
    created: int = field(default_factory=lambda: int(time.time()))
    encoded: list[EncodedPrompt] = field(default_factory=list)
    records: list[list[TokenRecord]] = field(default_factory=list)

    async def whole(self, registry: Any) -> dict[str, Any]:
        async with registry.use(self.body.model) as model:
            split = not await self._prepare(model)
            if split:
                texts = await self._rewrite(model)
                choices = [
                    Choice(n, i, text, finish="stop") for n, some in enumerate(texts) for i, text in enumerate(some)
                ]
                usage = self._split_usage(model, choices)
            elif self.options.max_tokens == 0:
                choices = [Choice(number, 0, finish="length") for number in range(len(self.prompts))]
                usage = Usage(sum(len(prompt.shown) for prompt in self.encoded), 0)
            else:
                run = Generation(model, self.encoded, self.options, self.client)
                await run.start(streams=False)
                choices = await run.collect()
                usage = run.usage
            found = [self._choice(model, one, one.text, one.records, one.finish, True) for one in choices]
            return self._object(model, found) | {"usage": usage.openai()}

    async def stream(self, registry: Any) -> Events:
        usage_wanted = self.body.stream_options is not None and bool(self.body.stream_options.include_usage)
        nothing = {"usage": None} if usage_wanted else {}
        async with registry.use(self.body.model) as model:
            if not await self._prepare(model):
                usage = Usage(0, 0)
                for number, prompt in enumerate(self.prompts):
                    (texts,) = await self._rewrite(model, [prompt])
                    choices = [Choice(number, index, text, finish="stop") for index, text in enumerate(texts)]
                    for one in choices:
                        yield self._object(model, [self._choice(model, one, one.text, [], "stop", True)]) | nothing
                    usage += self._split_usage(model, choices, [prompt])
            elif self.options.max_tokens == 0:
                usage = Usage(sum(len(prompt.shown) for prompt in self.encoded), 0)
                for number in range(len(self.prompts)):
                    choice = self._choice(model, Choice(number, 0), "", [], "length", True)
                    yield self._object(model, [choice]) | nothing
            else:
                run = Generation(model, self.encoded, self.options, self.client)
                await run.start(streams=True)
                begun: set[tuple[int, int]] = set()
                async for delta in run.stream():
                    own = (delta.choice.prompt, delta.choice.index)
                    entry = self._choice(model, delta.choice, delta.text, delta.records, delta.finish, own not in begun)
                    begun.add(own)
                    yield self._object(model, [entry]) | nothing
                usage = run.usage
            if usage_wanted:
                yield self._object(model, []) | {"usage": usage.openai()}

    async def _prepare(self, model: ServedModel) -> bool:
        """Encode the prompts. False if a prompt must be split into several sources; then nothing is encoded."""
        text = model.text
        if self.body.echo and not text.continues:
            raise ApiError("echo: an encoder-decoder does not continue its prompt", param="echo")
        if not all(text.is_whole(prompt, self.options) for prompt in self.prompts):
            if self.options.logprobs is not None:
                raise ApiError("logprobs: only for a source of one sentence", param="logprobs")
            return False
        if text.continues and self.options.max_tokens is None:
            self.options = self.options.with_max_tokens(min(DEFAULT_TOKENS, model.max_model_len))
            self.encoded = await encode_prompts(model, self.prompts, self.options.with_max_tokens(0))
            room = model.max_model_len - max(len(prompt.prompt) for prompt in self.encoded)
            self.options = self.options.with_max_tokens(max(1, min(DEFAULT_TOKENS, room)))
        else:
            self.encoded = await encode_prompts(model, self.prompts, self.options)
        if self.body.echo and self.options.logprobs is not None:
            top = self.options.logprobs
            ids = [prompt.shown for prompt in self.encoded]
            self.records = await model.compute(
                ("prompt logprobs", top), ids, lambda some: text.prompt_records(some, top)
            )
        return True

    async def _rewrite(self, model: ServedModel, prompts: list[Prompt] | None = None) -> list[list[str]]:
        texts = [prompt for prompt in prompts or self.prompts if isinstance(prompt, str)]
        return await model.call(lambda: model.text.rewrite(texts, self.options), self.client, self.options.exact)

    def _split_usage(self, model: ServedModel, choices: list[Choice], prompts: list[Prompt] | None = None) -> Usage:
        text = model.text
        return Usage(
            sum(len(text.prompt_tokenizer.encode(one)) for one in prompts or self.prompts if isinstance(one, str)),
            sum(len(text.tokenizer.encode(choice.text)) for choice in choices),
        )

    def _object(self, model: ServedModel, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": model.name,
            "choices": choices,
        }

    def _choice(
        self,
        model: ServedModel,
        choice: Choice,
        text: str,
        records: list[TokenRecord],
        finish: str | None,
        begins: bool,
    ) -> dict[str, Any]:
        """`begins`: the first part of this answer, which contains the prompt if the request has `echo`."""
        before = ""
        if self.body.echo and begins:
            prompt = self.encoded[choice.prompt]
            before = model.text.tokenizer.decode(prompt.shown) if prompt.text is None else prompt.text
            records = [*(self.records[choice.prompt] if self.records else []), *records]
        logprobs = None
        if self.options.logprobs is not None:
            logprobs = completion_logprobs(model.text.tokenizer, records, choice.offset)
            choice.offset += len(before + text)
        return {
            "index": choice.prompt * self.options.n + choice.index,
            "text": before + text,
            "logprobs": logprobs,
            "finish_reason": finish,
        }
