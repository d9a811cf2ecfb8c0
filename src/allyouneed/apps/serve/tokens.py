"""POST /tokenize and /detokenize, as vLLM names their fields."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from allyouneed.apps.serve.errors import ApiError, over_limit
from allyouneed.apps.serve.strict import Bool, RequestBody, Text, TokenId

router = APIRouter(tags=["tokens"])


class TokenizeRequest(RequestBody):
    model: Text | None = None
    prompt: Text
    add_special_tokens: Bool | None = None  # default: true
    return_token_strs: Bool | None = None


class DetokenizeRequest(RequestBody):
    model: Text | None = None
    tokens: list[TokenId]


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    state = request.app.state
    if len(body.prompt) > (most := state.settings.limits.prompt_characters):
        raise over_limit("characters", len(body.prompt), most, "prompt")
    async with state.registry.use(body.model) as model:
        tokenizer = model.predictor.folder.tokenizers.source
        ids = await asyncio.to_thread(tokenizer.encode, body.prompt)
        if body.add_special_tokens is not False:
            ids = model.frame(ids)
        texts = {"token_strs": tokenizer.tokens(ids)} if body.return_token_strs else {}
        return {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, **texts}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
    state = request.app.state
    if len(body.tokens) > (most := state.settings.limits.prompt_characters):
        raise over_limit("tokens", len(body.tokens), most, "tokens")
    async with state.registry.use(body.model) as model:
        tokenizer = model.predictor.folder.tokenizers.target
        if unknown := next((token for token in body.tokens if token >= tokenizer.size), None):
            raise ApiError(f"token {unknown} is outside the vocabulary of {tokenizer.size} tokens", param="tokens")
        return {"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens)}
