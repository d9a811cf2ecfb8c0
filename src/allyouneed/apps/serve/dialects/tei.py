"""The API of Hugging Face's text-embeddings-inference: POST /embed, POST /rerank, GET /info."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from allyouneed import __version__
from allyouneed.apps.serve.bodies import BodyRoute
from allyouneed.apps.serve.errors import ApiError
from allyouneed.apps.serve.inputs import count_tokens, embed, embedding_model, ranker, ranking_model, relevance
from allyouneed.apps.serve.responses import json_response, large_response
from allyouneed.apps.serve.strict import Bool, Ignored, RequestBody, Text

router = APIRouter(tags=["text-embeddings-inference"], route_class=BodyRoute)


class EmbedRequest(RequestBody):
    inputs: Text | list[Text]
    normalize: Bool | None = None  # default: true
    truncate: Bool | None = None
    truncation_direction: Literal["Right", "right"] | None = None
    prompt_name: Ignored
    model: Text | None = None  # not in the original, which has one model


@router.post("/embed")
async def embed_texts(body: EmbedRequest, request: Request) -> Response:
    state = request.app.state
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if not texts or "" in texts:
        raise ApiError("inputs: texts must not be empty", param="inputs")
    async with state.registry.use(await embedding_model(state.registry, body.model)) as model:
        await count_tokens(model.embedder, texts, state.settings.limits, "inputs", truncate=bool(body.truncate))
        unit = body.normalize is not False
        vectors = await embed(model, texts, raw=not unit)

        def answer() -> list[list[float]]:
            return [(vector / vector.norm().clamp(min=1e-12) if unit else vector).tolist() for vector in vectors]

        return await large_response(answer)


class RerankRequest(RequestBody):
    query: Annotated[Text, Field(min_length=1)]
    texts: Annotated[list[Text], Field(min_length=1)]
    return_text: Bool | None = None
    raw_scores: Bool | None = None  # scores are cosines or probabilities either way
    truncate: Bool | None = None
    truncation_direction: Literal["Right", "right"] | None = None
    model: Text | None = None


@router.post("/rerank")
async def rerank(body: RerankRequest, request: Request) -> Response:
    state = request.app.state
    async with state.registry.use(await ranking_model(state.registry, body.model)) as model:
        predictor = ranker(model)
        texts = [body.query, *body.texts]
        await count_tokens(predictor, texts, state.settings.limits, "texts", truncate=bool(body.truncate))
        scores = await relevance(model, body.query, body.texts)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        return json_response(
            [
                {"index": index, "score": scores[index]} | ({"text": body.texts[index]} if body.return_text else {})
                for index in order
            ]
        )


@router.get("/info")
async def info(request: Request) -> dict[str, Any]:
    state = request.app.state
    registry, limits = state.registry, state.settings.limits
    entry = registry.find(None)
    facts = await registry.facts(entry)
    return {
        "model_id": entry.name,
        "model_sha": None,
        "model_dtype": state.settings.dtype or "as stored",
        "model_type": {facts["task"]: {}},
        "max_concurrent_requests": limits.concurrent,
        "max_input_length": facts["max_model_len"],
        "max_client_batch_size": limits.texts,
        "version": __version__,
    }
