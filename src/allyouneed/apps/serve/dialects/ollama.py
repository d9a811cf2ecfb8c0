"""Ollama's API: /api/version, tags, show, ps, chat, generate, embed; streams are lines of JSON."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from allyouneed import __version__
from allyouneed.apps.serve.bodies import BodyRoute, off_loop
from allyouneed.apps.serve.engine.sequences import SequenceGroup, encode_chat, encode_prompts, prompt_tokens
from allyouneed.apps.serve.errors import ApiError, over_limit
from allyouneed.apps.serve.inputs import count_tokens, embed
from allyouneed.apps.serve.responses import Events, json_lines, json_response, large_response
from allyouneed.apps.serve.sampling import SamplingFields
from allyouneed.apps.serve.settings import Limits
from allyouneed.apps.serve.strict import Bool, Ignored, Int, RequestBody, Text
from allyouneed.apps.serve.unknown_fields import check_fields

if TYPE_CHECKING:
    from allyouneed.apps.serve.engine.served_model import ServedModel
    from allyouneed.infer.request import Request as DecodingRequest

router = APIRouter(prefix="/api", tags=["Ollama"], route_class=BodyRoute)
# options of Ollama that tell its own engine how to run, not what to answer
RUNTIME = (
    "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "low_vram", "use_mmap", "use_mlock",
    "numa", "vocab_only", "f16_kv", "logits_all", "repeat_last_n", "penalize_newline", "typical_p", "tfs_z", "mirostat",
    "mirostat_eta", "mirostat_tau",
)  # fmt: skip


class Options(SamplingFields):
    """Ollama's names, besides those of `SamplingFields`."""

    num_predict: Annotated[Int, Field(ge=-2)] | None = None
    repeat_penalty: Annotated[float, Field(strict=True, gt=0, le=100, allow_inf_nan=False)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, given: Any) -> Any:
        if isinstance(given, dict) and all(isinstance(name, str) for name in given):
            check_fields(given, [*cls.model_fields, *RUNTIME], RUNTIME, "options.")
        return given

    @property
    def limit(self) -> int | None:
        return None if self.num_predict is None or self.num_predict < 0 else self.num_predict


class OllamaRequest(RequestBody):
    model: Annotated[Text, Field(min_length=1)]
    stream: Bool | None = None  # default: true
    options: Options | None = None
    keep_alive: Ignored
    think: Ignored
    format: Literal[""] | None = None

    def checked(self, limits: Limits) -> Options:
        found = self.options or Options()
        if found.repetition_penalty is None:
            found.repetition_penalty = found.repeat_penalty
        found.check(limits)
        return found


class OllamaMessage(RequestBody):
    role: Annotated[Text, Field(min_length=1, max_length=64)]
    content: Text = ""
    images: list[Any] | None = None
    tool_calls: list[Any] | None = None
    thinking: Ignored
    tool_name: Ignored


class ChatRequest(OllamaRequest):
    messages: Annotated[list[OllamaMessage], Field(default_factory=list)]
    tools: list[Any] | None = None


class GenerateRequest(OllamaRequest):
    prompt: Text = ""
    system: Text | None = None
    raw: Bool | None = None
    suffix: Text | None = None
    template: Ignored
    context: Ignored
    images: list[Any] | None = None


class EmbedRequest(RequestBody):
    model: Annotated[Text, Field(min_length=1)]
    input: Text | list[Text]
    truncate: Bool | None = None  # default: true
    dimensions: Annotated[Int, Field(ge=1)] | None = None
    options: Ignored
    keep_alive: Ignored


class NameRequest(RequestBody):
    model: Text | None = None
    name: Text | None = None
    verbose: Ignored


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _find(registry: Any, name: str) -> Any:
    """Ollama's clients add a tag to names."""
    return registry.find(name.removesuffix(":latest"))


def _listed(entry: Any, task: str) -> dict[str, Any]:
    return {
        "name": entry.name,
        "model": entry.name,
        "modified_at": datetime.fromtimestamp(entry.created, UTC).isoformat().replace("+00:00", "Z"),
        "size": entry.bytes,
        "digest": "",
        "details": {
            "parent_model": "",
            "format": "safetensors",
            "family": task,
            "families": [task],
            "parameter_size": "",
            "quantization_level": "",
        },
    }


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/tags")
async def tags(request: Request) -> dict[str, Any]:
    registry = request.app.state.registry
    entries = list(registry.entries.values())
    return {"models": [_listed(entry, (await registry.facts(entry))["task"]) for entry in entries]}


@router.get("/ps")
async def ps(request: Request) -> dict[str, Any]:
    entries = [entry for entry in request.app.state.registry.entries.values() if entry.model is not None]
    return {
        "models": [
            _listed(entry, entry.model.task)
            | {"expires_at": _now(), "size_vram": 0, "context_length": entry.model.max_model_len}
            for entry in entries
        ]
    }


@router.post("/show")
async def show(body: NameRequest, request: Request) -> dict[str, Any]:
    registry = request.app.state.registry
    entry = _find(registry, body.model or body.name or "")
    async with registry.use(entry.name) as model:
        able = ["embedding"] if model.task in ("similarity", "contrastive") else []
        able += ["completion"] if model.generates else []
        return {
            "modelfile": "",
            "parameters": "",
            "template": "" if model.template is None else model.template.source,
            "details": _listed(entry, model.task)["details"],
            "model_info": {"general.architecture": model.task, f"{model.task}.context_length": model.max_model_len},
            "capabilities": able,
            "modified_at": _listed(entry, model.task)["modified_at"],
        }


@router.post("/chat")
async def chat(body: ChatRequest, request: Request) -> Response:
    state = request.app.state
    options = body.checked(state.settings.limits)
    if body.tools or any(message.tool_calls or message.images for message in body.messages):
        raise ApiError("tools and images are not supported by this server; remove them")
    if len(body.messages) > (most := state.settings.limits.messages):
        raise over_limit("messages", len(body.messages), most)
    if (size := sum(len(one.content) for one in body.messages)) > (most := state.settings.limits.prompt_characters):
        raise over_limit("characters in the messages", size, most, "messages")
    messages = [{"role": message.role, "content": message.content} for message in body.messages]

    async def run() -> Events:
        async with state.registry.use(_find(state.registry, body.model).name) as model:
            if not messages:  # loads the model
                yield _head(body) | {"message": {"role": "assistant", "content": ""}, **_loaded()}
                return
            prompt = await encode_chat(model, messages, options, {})
            async for text, end in _answer(model, [prompt], options, request.state.client, body.stream):
                yield _head(body) | {"message": {"role": "assistant", "content": text}, **end}

    return await _respond(run(), body.stream)


@router.post("/generate")
async def generate(body: GenerateRequest, request: Request) -> Response:
    state = request.app.state
    options = body.checked(state.settings.limits)
    if body.images or body.suffix:
        raise ApiError("images and suffix are not supported by this server; remove them")
    if body.raw and body.system:
        raise ApiError("raw: the prompt is used as it is, without system; remove one of them", param="raw")
    if len(body.prompt) > (most := state.settings.limits.prompt_characters):
        raise over_limit("characters", len(body.prompt), most, "prompt")

    async def run() -> Events:
        async with state.registry.use(_find(state.registry, body.model).name) as model:
            if not body.prompt:
                yield _head(body) | {"response": "", **_loaded()}
                return
            if model.template is None or body.raw or not model.text.continues:
                if body.system:
                    raise ApiError(f"system: the model {model.name} has no chat template", param="system")
                if not await off_loop(len(body.prompt), lambda: model.text.is_whole(body.prompt, options)):
                    (texts,) = await model.call(
                        lambda: model.text.rewrite([body.prompt], options), request.state.client, bool(options.exact)
                    )
                    yield _head(body) | {"response": texts[0], **_loaded("stop")}
                    return
                prompts = await encode_prompts(model, [body.prompt], options, options.limit)
            else:
                system = [{"role": "system", "content": body.system}] if body.system else []
                messages = [*system, {"role": "user", "content": body.prompt}]
                prompts = [await encode_chat(model, messages, options, {})]
            async for text, end in _answer(model, prompts, options, request.state.client, body.stream):
                yield _head(body) | {"response": text, **end}

    return await _respond(run(), body.stream)


@router.post("/embed")
async def embed_texts(body: EmbedRequest, request: Request) -> Response:
    state = request.app.state
    started = time.monotonic_ns()
    texts = [body.input] if isinstance(body.input, str) else body.input
    async with state.registry.use(_find(state.registry, body.model).name) as model:
        truncate = body.truncate is not False
        counts = await count_tokens(model.embedder, texts, state.settings.limits, "input", truncate)
        vectors = await embed(model, texts)

        def answer() -> dict[str, Any]:
            some = [vector[: body.dimensions] for vector in vectors]
            return {
                "model": body.model,
                "embeddings": [(vector / vector.norm().clamp(min=1e-12)).tolist() for vector in some],
                "total_duration": time.monotonic_ns() - started,
                "load_duration": 0,
                "prompt_eval_count": sum(counts),
            }

        return await large_response(answer)


async def _respond(events: Events, stream: bool | None) -> Response:
    if stream is not False:
        return await json_lines(events)
    return json_response([event async for event in events][-1])


def _head(body: OllamaRequest) -> dict[str, Any]:
    return {"model": body.model, "created_at": _now()}


def _loaded(reason: str = "load") -> dict[str, Any]:
    return {"done": True, "done_reason": reason}


async def _answer(
    model: ServedModel, requests: list[DecodingRequest], options: Options, client: str, stream: bool | None
) -> Any:
    """(text, fields of the end) as it comes; the last one ends it. Not streamed: all of it at once."""
    started = time.monotonic_ns()
    first = 0
    group = SequenceGroup(model, requests, options, client)
    await model.submit(group, streams=stream is not False)
    text, finish = "", "stop"
    if stream is False:
        _, text, _, ended = (await group.collect())[0]
        finish = ended or finish
    else:
        async for _, piece, _, ended in group.stream():
            first = first or time.monotonic_ns()
            finish = ended or finish
            if piece:
                yield piece, {"done": False}
    now = time.monotonic_ns()
    yield (
        text,
        {
            "done": True,
            "done_reason": finish,
            "total_duration": now - started,
            "load_duration": 0,
            "prompt_eval_count": prompt_tokens(requests),
            "prompt_eval_duration": (first or now) - started,
            "eval_count": group.completion_tokens,
            "eval_duration": now - (first or started),
        },
    )
