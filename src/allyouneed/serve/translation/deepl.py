"""DeepL's API, version 2: /v2/translate, /v2/languages, /v2/usage, and an empty list of glossaries."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from allyouneed.data.languages import english_name
from allyouneed.serve.errors import ApiError
from allyouneed.serve.responses import json_response
from allyouneed.serve.translation import service

router = APIRouter(prefix="/v2", tags=["DeepL"])
IGNORED = ("context", "split_sentences", "preserve_formatting", "formality", "model_type", "outline_detection")
REFUSED = ("glossary_id", "tag_handling", "ignore_tags", "splitting_tags", "non_splitting_tags", "style_id")
KNOWN = ("text", "source_lang", "target_lang", "show_billed_characters", "auth_key", "enable_beta_languages")


@router.post("/translate")
async def translate(request: Request) -> Response:
    found = await service.fields(request, (*KNOWN, *IGNORED, *REFUSED))
    for name in REFUSED:
        if found.get(name):
            raise ApiError(f"{name}: not supported by this server; remove it", param=name)
    texts = service.text_list(found.get("text"), "text")
    source = service.word(found.get("source_lang"), "source_lang", needed=False)
    target = service.word(found.get("target_lang"), "target_lang")
    async with service.translator(request) as model:
        limits = request.app.state.settings.limits
        results = await service.translate(model, texts, source, target, request.state.client, limits)
        return json_response(
            {
                "translations": [
                    {
                        "detected_source_language": (one.source or source or "").upper(),
                        "text": one.text,
                        "billed_characters": len(text),  # clients need it
                    }
                    for one, text in zip(results, texts, strict=True)
                ]
            }
        )


@router.get("/languages")
async def languages(request: Request) -> Response:
    found = await service.fields(request, ("type", "auth_key"))
    if (kind := found.get("type", "source")) not in ("source", "target"):
        raise ApiError("type: expected source or target", param="type")
    async with service.translator(request) as model:
        codes = service.languages(model)[kind == "target"]
        more: dict[str, Any] = {"supports_formality": False} if kind == "target" else {}
        return json_response([{"language": code.upper(), "name": english_name(code), **more} for code in codes])


@router.get("/usage")
async def usage() -> dict[str, int]:
    """Nothing is counted: there is no quota."""
    return {"character_count": 0, "character_limit": 1_000_000_000_000}


@router.get("/glossary-language-pairs")
async def glossary_languages() -> dict[str, list[Any]]:
    return {"supported_languages": []}


@router.get("/glossaries")
async def glossaries() -> dict[str, list[Any]]:
    return {"glossaries": []}
