"""POST /tokenize and /detokenize, as vLLM names their fields."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from allyouneed.apps.serve.bodies import BodyRoute, off_loop
from allyouneed.apps.serve.errors import ApiError, over_limit
from allyouneed.apps.serve.responses import json_response
from allyouneed.apps.serve.strict import Bool, RequestBody, Text, TokenId

router = APIRouter(tags=["tokens"], route_class=BodyRoute)


class TokenizeRequest(RequestBody):
    model: Text | None = None
    prompt: Text
    add_special_tokens: Bool | None = None  # default: true
    return_token_strs: Bool | None = None


class DetokenizeRequest(RequestBody):
    model: Text | None = None
    tokens: list[TokenId]


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    state = request.app.state
    if len(body.prompt) > (most := state.settings.limits.prompt_characters):
        raise over_limit("characters", len(body.prompt), most, "prompt")
    async with state.registry.use(body.model) as model:
        tokenizer = model.predictor.folder.tokenizers.source

        def answer() -> Response:
            ids = tokenizer.encode(body.prompt)
            if body.add_special_tokens is not False:
                ids = model.frame(ids)
            texts = {"token_strs": tokenizer.tokens(ids)} if body.return_token_strs else {}
            return json_response({"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, **texts})

        return await off_loop(len(body.prompt), answer)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    state = request.app.state
    if len(body.tokens) > (most := state.settings.limits.prompt_characters):
        raise over_limit("tokens", len(body.tokens), most, "tokens")
    async with state.registry.use(body.model) as model:
        tokenizer = model.predictor.folder.tokenizers.target
        if (largest := max(body.tokens, default=0)) >= tokenizer.size:
            raise ApiError(f"token {largest} is outside the vocabulary of {tokenizer.size} tokens", param="tokens")
        return await off_loop(len(body.tokens), lambda: json_response({"prompt": tokenizer.decode(body.tokens)}))
