"""POST /v1/chat/completions: messages through the chat template of the folder."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from allyouneed.apps.serve.dialects.openai.completions import StreamOptions
from allyouneed.apps.serve.dialects.openai.logprobs import chat_logprobs
from allyouneed.apps.serve.dialects.tasks import read_image
from allyouneed.apps.serve.engine.generation import Generation
from allyouneed.apps.serve.errors import ApiError, over_limit
from allyouneed.apps.serve.responses import Events, event_stream, json_response, new_id
from allyouneed.apps.serve.sampling import GenerationOptions, SamplingFields
from allyouneed.apps.serve.settings import Limits
from allyouneed.apps.serve.strict import Bool, Ignored, Int, RequestBody, Text

if TYPE_CHECKING:
    from allyouneed.apps.serve.engine.logits_rules import TokenRecord
    from allyouneed.apps.serve.engine.served_model import ServedModel
    from allyouneed.apps.serve.engine.text_models import EncodedPrompt

router = APIRouter(tags=["OpenAI"])
RESERVED = ("messages", "add_generation_prompt", "bos_token", "eos_token")


class TextPart(RequestBody):
    type: Literal["text"]
    text: Text


class ImageURL(RequestBody):
    url: Annotated[Text, Field(description="a data: URL; no other is opened")]
    detail: Ignored


class ImagePart(RequestBody):
    type: Literal["image_url"]
    image_url: ImageURL


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Message(RequestBody):
    role: Annotated[Text, Field(min_length=1, max_length=64)]
    content: Text | list[Part] | None = None
    name: Text | None = None
    refusal: Ignored
    tool_calls: list[Any] | None = None
    tool_call_id: Text | None = None

    def plain(self) -> dict[str, Any]:
        """As templates expect it: the content is a string, without images."""
        content = self.content
        parts = [] if isinstance(content, str) or content is None else content
        text = content if isinstance(content, str) else "".join(p.text for p in parts if isinstance(p, TextPart))
        return {"role": self.role, "content": text} | ({} if self.name is None else {"name": self.name})

    @property
    def images(self) -> list[str]:
        """URLs of the images in it."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]

    def pieces(self, limits: Limits) -> list[Any]:
        """Texts and images in order, for a model that reads both."""
        if not isinstance(self.content, list):
            return [self.content or ""]
        return [
            part.text if isinstance(part, TextPart) else {"image": read_image(part.image_url.url, limits, "messages")}
            for part in self.content
        ]


class ResponseFormat(RequestBody):
    type: Literal["text"]


class ChatRequest(SamplingFields):
    model: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    logprobs: Bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0)] | None = None
    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: (
        Annotated[dict[Text, Text | Bool | Int | None], Field(description="further values for the template")] | None
    ) = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Ignored
    parallel_tool_calls: Ignored
    user: Ignored
    metadata: Ignored
    store: Ignored
    service_tier: Ignored
    reasoning_effort: Ignored
    safety_identifier: Ignored
    prompt_cache_key: Ignored

    def checked(self, limits: Limits) -> GenerationOptions:
        if self.tools:
            raise ApiError("tools: not supported by this server; remove them", param="tools")
        if any(message.tool_calls for message in self.messages):
            raise ApiError("messages: tool_calls are not supported", param="messages")
        if len(self.messages) > limits.messages:
            raise over_limit("messages", len(self.messages), limits.messages, "messages")
        size = sum(len(message.plain()["content"]) for message in self.messages)
        if size > limits.prompt_characters:
            raise over_limit("characters in the messages", size, limits.prompt_characters, "messages")
        if taken := [name for name in self.chat_template_kwargs or {} if name in RESERVED]:
            raise ApiError(f"chat_template_kwargs: {taken[0]} is the server's own", param="chat_template_kwargs")
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs requires logprobs: true", param="top_logprobs")
        top = (self.top_logprobs or 0) if self.logprobs else None
        tokens = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return self.options(limits, tokens, top)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    state = request.app.state
    options = body.checked(state.settings.limits)
    options = options.exactly() if state.settings.exact else options
    answer = ChatCompletion(body, options, request.state.client)
    headers = {"x-exact": str(options.exact).lower()}
    if body.stream:
        return await event_stream(answer.stream(state.registry), headers)
    return json_response(await answer.whole(state.registry), headers)


@dataclass
class ChatCompletion:
    body: ChatRequest
    options: GenerationOptions
    client: str
    id: str = field(default_factory=lambda: new_id("chatcmpl"))
    created: int = field(default_factory=lambda: int(time.time()))

    async def _prompt(self, model: ServedModel) -> EncodedPrompt:
        if model.reads_images:
            return await model.encode_pieces(lambda limits: self._pieces(limits), self.options)
        if any(message.images for message in self.body.messages):
            raise ApiError(f"messages: the model {model.name} reads texts only; remove the images", param="messages")
        messages = [message.plain() for message in self.body.messages]
        return await model.encode_chat(messages, self.options, self.body.chat_template_kwargs or {})

    def _pieces(self, limits: Limits) -> list[Any]:
        """The contents of all messages, one after another: models that read images have no chat template."""
        found: list[Any] = []
        for message in self.body.messages:
            found += [*(["\n"] if found else []), *message.pieces(limits)]
        return found

    async def whole(self, registry: Any) -> dict[str, Any]:
        async with registry.use(self.body.model) as model:
            run = Generation(model, [await self._prompt(model)], self.options, self.client)
            await run.start(streams=False)
            choices = [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": self._logprobs(model, choice.records),
                    "finish_reason": choice.finish,
                }
                for choice in await run.collect()
            ]
            return self._object(model, "chat.completion", choices) | {"usage": run.usage.openai()}

    async def stream(self, registry: Any) -> Events:
        usage = self.body.stream_options is not None and bool(self.body.stream_options.include_usage)
        nothing = {"usage": None} if usage else {}
        async with registry.use(self.body.model) as model:
            run = Generation(model, [await self._prompt(model)], self.options, self.client)
            await run.start(streams=True)

            def part(index: int, delta: dict[str, Any], finish: str | None, logprobs: Any = None) -> dict[str, Any]:
                choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
                return self._object(model, "chat.completion.chunk", [choice]) | nothing

            try:
                for index in range(self.options.n):
                    yield part(index, {"role": "assistant", "content": "", "refusal": None}, None)
                async for delta in run.stream():
                    index, records = delta.choice.index, delta.records
                    if delta.text or records:
                        yield part(index, {"content": delta.text}, None, self._logprobs(model, records))
                    if delta.finish:
                        yield part(index, {}, delta.finish)
                if usage:
                    yield self._object(model, "chat.completion.chunk", []) | {"usage": run.usage.openai()}
            finally:
                run.cancel()

    def _logprobs(self, model: ServedModel, records: list[TokenRecord]) -> dict[str, Any] | None:
        return None if self.options.logprobs is None else chat_logprobs(model.text.tokenizer, records)

    def _object(self, model: ServedModel, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": model.name, "choices": choices}
