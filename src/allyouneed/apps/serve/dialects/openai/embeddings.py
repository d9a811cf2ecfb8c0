"""POST /v1/embeddings and /v1/rerank."""

from __future__ import annotations

import base64
import struct
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from allyouneed.apps.serve.bodies import BodyRoute
from allyouneed.apps.serve.errors import ApiError
from allyouneed.apps.serve.inputs import count_tokens, embed, embedding_model, ranker, ranking_model, relevance
from allyouneed.apps.serve.responses import json_response, large_response, new_id
from allyouneed.apps.serve.strict import Bool, Count, Ignored, RequestBody, Text, TokenId

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)


class EmbeddingRequest(RequestBody):
    model: Text | None = None
    input: Text | list[Text] | list[TokenId] | list[list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: Ignored

    def texts(self) -> list[str]:
        found = [self.input] if isinstance(self.input, str) else self.input
        if not found:
            raise ApiError("the list of texts is empty", param="input")
        texts = [text for text in found if isinstance(text, str)]
        if len(texts) < len(found):
            raise ApiError(
                "input: token ids of another tokenizer mean nothing to this model; send texts (LangChain's "
                "OpenAIEmbeddings: check_embedding_ctx_length=False)",
                param="input",
                code="token_ids",
            )
        if "" in texts:
            raise ApiError("input: a text is empty", param="input")
        return texts


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    state = request.app.state
    texts = body.texts()
    async with state.registry.use(await embedding_model(state.registry, body.model)) as model:
        counts = await count_tokens(model.embedder, texts, state.settings.limits, "input")
        vectors = await embed(model, texts)
        if body.dimensions is not None and body.dimensions > (width := len(vectors[0])):
            raise ApiError(f"dimensions={body.dimensions}: the model has {width}", param="dimensions")
        encode: Any = _base64 if body.encoding_format == "base64" else list

        def answer() -> dict[str, Any]:
            lists = [vector.tolist() for vector in vectors]
            if body.dimensions is not None:
                lists = [_shorten(vector, body.dimensions) for vector in lists]
            data = [
                {"object": "embedding", "index": index, "embedding": encode(vector)}
                for index, vector in enumerate(lists)
            ]
            usage = {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}
            return {"object": "list", "data": data, "model": model.name, "usage": usage}

        return await large_response(answer)


def _shorten(vector: list[float], width: int) -> list[float]:
    """The first components, of length 1 as OpenAI returns them."""
    norm = sum(value * value for value in vector[:width]) ** 0.5 or 1.0
    return [value / norm for value in vector[:width]]


def _base64(vector: list[float]) -> str:
    """Little-endian 32-bit floats."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


class RerankRequest(RequestBody):
    model: Text | None = None
    query: Annotated[Text, Field(min_length=1)]
    documents: Annotated[list[Text], Field(min_length=1)]
    top_n: Count | None = None
    return_documents: Bool | None = None


@router.post("/v1/rerank")
async def rerank(body: RerankRequest, request: Request) -> Response:
    state = request.app.state
    async with state.registry.use(await ranking_model(state.registry, body.model)) as model:
        predictor = ranker(model)
        counts = await count_tokens(predictor, [body.query, *body.documents], state.settings.limits, "documents")
        scores = await relevance(model, body.query, body.documents)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        results = []
        for index in order:
            document = {"document": {"text": body.documents[index]}} if body.return_documents else {}
            results.append({"index": index, "relevance_score": scores[index], **document})
        usage = {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}
        return json_response({"id": new_id("rerank"), "model": model.name, "results": results, "usage": usage})
