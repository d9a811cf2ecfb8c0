"""POST /v1/chat/completions: messages through the chat template of the folder."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from allyouneed.apps.serve.bodies import BodyRoute
from allyouneed.apps.serve.dialects.openai.completions import StreamOptions, usage
from allyouneed.apps.serve.dialects.openai.logprobs import chat_logprobs
from allyouneed.apps.serve.dialects.tasks import read_image
from allyouneed.apps.serve.engine.sequences import SequenceGroup, encode_chat, prompt_tokens
from allyouneed.apps.serve.errors import ApiError, over_limit
from allyouneed.apps.serve.responses import Events, event_stream, json_response, new_id
from allyouneed.apps.serve.sampling import SamplingFields
from allyouneed.apps.serve.settings import Limits
from allyouneed.apps.serve.strict import Bool, Ignored, Int, RequestBody, Text

if TYPE_CHECKING:
    from allyouneed.apps.serve.engine.served_model import ServedModel

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)
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
        text = content if isinstance(content, str) else ""
        if isinstance(content, list):
            text = "".join(part.text for part in content if isinstance(part, TextPart))
        return {"role": self.role, "content": text} | ({} if self.name is None else {"name": self.name})

    @property
    def images(self) -> bool:
        """Whether it has any."""
        return isinstance(self.content, list) and any(isinstance(part, ImagePart) for part in self.content)

    def pieces(self, limits: Limits) -> list[Any]:
        """Texts and images in order."""
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

    def pieces(self, limits: Limits) -> list[Any]:
        """The contents of all messages, one after another: models that read images have no chat template."""
        found: list[Any] = []
        for message in self.messages:
            found += [*(["\n"] if found else []), *message.pieces(limits)]
        return found

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def plain(self, limits: Limits) -> list[dict[str, Any]]:
        """The messages, after a check of the whole request."""
        if self.tools:
            raise ApiError("tools: not supported by this server; remove them", param="tools")
        found, size = list[dict[str, Any]](), 0
        for message in self.messages:
            if message.tool_calls:
                raise ApiError("messages: tool_calls are not supported", param="messages")
            found.append(message.plain())
            size += len(found[-1]["content"])
        if len(self.messages) > limits.messages:
            raise over_limit("messages", len(self.messages), limits.messages, "messages")
        if size > limits.prompt_characters:
            raise over_limit("characters in the messages", size, limits.prompt_characters, "messages")
        for name in self.chat_template_kwargs or {}:
            if name in RESERVED:
                raise ApiError(f"chat_template_kwargs: {name} is the server's own", param="chat_template_kwargs")
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs requires logprobs: true", param="top_logprobs")
        self.check(limits)
        return found


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    state = request.app.state
    messages = body.plain(state.settings.limits)
    body.exact = bool(body.exact or state.settings.exact)
    headers = {"x-exact": str(body.exact).lower()}
    if body.stream:
        return await event_stream(_stream(body, messages, request), headers)
    id, created = new_id("chatcmpl"), int(time.time())
    async with state.registry.use(body.model) as model:
        group = await _group(model, body, messages, request.state.client)
        await model.submit(group, streams=False)
        choices = []
        for index, text, records, finish in await group.collect():
            message = {"role": "assistant", "content": text, "refusal": None}
            logprobs = chat_logprobs(model.text.tokenizer, records) if group.records else None
            choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish})
        head = {"id": id, "object": "chat.completion", "created": created, "model": model.name}
        used = usage(prompt_tokens(group.requests), group.completion_tokens)
    return json_response(head | {"choices": choices, "usage": used}, headers)


async def _group(model: ServedModel, body: ChatRequest, messages: list[dict[str, Any]], client: str) -> SequenceGroup:
    if model.reads_images:
        prompt = await model.encode_pieces(body.pieces, body)
    elif any([message.images for message in body.messages]):
        raise ApiError(f"messages: the model {model.name} reads texts only; remove the images", param="messages")
    else:
        prompt = await encode_chat(model, messages, body, body.chat_template_kwargs or {})
    return SequenceGroup(model, [prompt], body, client)


async def _stream(body: ChatRequest, messages: list[dict[str, Any]], request: Request) -> Events:
    wants_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    nothing = {"usage": None} if wants_usage else {}
    head: dict[str, Any] = {"id": new_id("chatcmpl"), "object": "chat.completion.chunk", "created": int(time.time())}
    async with request.app.state.registry.use(body.model) as model:
        group = await _group(model, body, messages, request.state.client)
        await model.submit(group, streams=True)
        head["model"] = model.name

        def part(index: int, delta: dict[str, Any], finish: str | None, logprobs: Any = None) -> dict[str, Any]:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            return {**head, "choices": [choice], **nothing}

        try:
            for index in range(group.n):
                yield part(index, {"role": "assistant", "content": "", "refusal": None}, None)
            async for index, text, records, finish in group.stream():
                if text or records:
                    logprobs = chat_logprobs(model.text.tokenizer, records) if group.records else None
                    yield part(index, {"content": text}, None, logprobs)
                if finish:
                    yield part(index, {}, finish)
            if wants_usage:
                yield {**head, "choices": [], "usage": usage(prompt_tokens(group.requests), group.completion_tokens)}
        finally:
            group.cancel()
