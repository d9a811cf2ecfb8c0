"""LibreTranslate's API: /translate, /detect, /languages, /health. Other clients use the same path and are told apart by
their fields: DeepLX (`text`), Immersive Translate (`text_list`), Apertium (`langpair`, for OmegaT)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from allyouneed.data.languages import english_name
from allyouneed.serve.errors import ApiError
from allyouneed.serve.responses import json_response
from allyouneed.serve.translation import service

router = APIRouter(tags=["LibreTranslate, DeepLX, Immersive Translate, Apertium"])
KNOWN = ("q", "source", "target", "format", "alternatives", "api_key")
KNOWN_DEEPLX = ("text", "source_lang", "target_lang", "tag_handling", "token")
KNOWN_IMMERSIVE = ("text_list", "source_lang", "target_lang", "token")
KNOWN_APERTIUM = ("q", "langpair", "markUnknown", "key", "format")
EVERY = tuple(dict.fromkeys((*KNOWN, *KNOWN_DEEPLX, *KNOWN_IMMERSIVE, *KNOWN_APERTIUM)))
FAR_CODES = {"zt": "zh-Hant", "pb": "pt-BR"}  # LibreTranslate's older codes


@router.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/translate")
@router.post("/translate")
async def translate(request: Request) -> Response:
    found = await service.fields(request, EVERY)
    async with service.translator(request) as model:
        if "langpair" in found:
            return await _apertium(request, model, found)
        if "text_list" in found:
            return await _immersive(request, model, found)
        if "text" in found:
            return await _deeplx(request, model, found)
        return await _libre(request, model, found)


async def _run(
    request: Request, model: Any, texts: list[str], source: str | None, target: str | None, count: int = 1
) -> list[service.Translated]:
    limits = request.app.state.settings.limits
    return await service.translate(model, texts, source, target, request.state.client, limits, count)


async def _libre(request: Request, model: Any, found: dict[str, Any]) -> Response:
    _check(found, KNOWN)
    texts = service.text_list(found.get("q"), "q")
    source, target = _code(found, "source"), _code(found, "target")
    if found.get("format") not in (None, "text"):
        raise ApiError(f"format: {str(found['format'])[:40]!r} is not supported; send text", param="format")
    most = request.app.state.settings.limits.choices - 1
    others = service.whole_number(found.get("alternatives") or 0, "alternatives", most)
    results = await _run(request, model, texts, source, target, others + 1)
    many = isinstance(found["q"], list)
    answer: dict[str, Any] = {"translatedText": [one.text for one in results] if many else results[0].text}
    if (source or "").lower() == "auto":
        detected = [
            {"language": one.source, "confidence": service.detect(model, text)[1]}
            for one, text in zip(results, texts, strict=True)
        ]
        answer["detectedLanguage"] = detected if many else detected[0]
    if others:
        answer["alternatives"] = [one.others for one in results] if many else results[0].others
    return json_response(answer)


async def _deeplx(request: Request, model: Any, found: dict[str, Any]) -> Response:
    _check(found, KNOWN_DEEPLX)
    if found.get("tag_handling"):
        raise ApiError("tag_handling: not supported; send plain text", param="tag_handling")
    (text,) = service.text_list(found["text"], "text")[:1]
    source, target = _code(found, "source_lang", needed=False), _code(found, "target_lang")
    (result,) = await _run(request, model, [text], source, target)
    return json_response(
        {
            "code": 200,
            "id": 0,
            "data": result.text,
            "alternatives": result.others,
            "source_lang": (result.source or source or "").upper(),
            "target_lang": (target or "").upper(),
            "method": "Free",
        }
    )


async def _immersive(request: Request, model: Any, found: dict[str, Any]) -> Response:
    _check(found, KNOWN_IMMERSIVE)
    texts = service.text_list(found["text_list"], "text_list")
    source, target = _code(found, "source_lang", needed=False), _code(found, "target_lang")
    results = await _run(request, model, texts, source, target)
    return json_response(
        {"translations": [{"detected_source_lang": one.source or source or "", "text": one.text} for one in results]}
    )


async def _apertium(request: Request, model: Any, found: dict[str, Any]) -> Response:
    _check(found, KNOWN_APERTIUM)
    pair = service.word(found["langpair"], "langpair") or ""
    source, given, target = pair.partition("|")
    if not given or not target:
        raise ApiError("langpair: expected two languages, en|de", param="langpair")
    (result,) = await _run(request, model, service.text_list(found.get("q"), "q")[:1], source, target)
    return json_response(
        {"responseData": {"translatedText": result.text}, "responseDetails": None, "responseStatus": 200}
    )


@router.post("/detect")
async def detect(request: Request) -> Response:
    found = await service.fields(request, ("q", "api_key"))
    async with service.translator(request) as model:
        texts = service.text_list(found.get("q"), "q")
        language, confidence = service.detect(model, "\n".join(texts))
        return json_response([] if language is None else [{"language": language, "confidence": confidence}])


@router.get("/languages")
async def languages(request: Request) -> Response:
    async with service.translator(request) as model:
        sources, targets = service.languages(model)
        return json_response(
            [
                {"code": code, "name": english_name(code), "targets": [one for one in targets if one != code]}
                for code in sources
            ]
        )


def _check(found: dict[str, Any], known: tuple[str, ...]) -> None:
    if unknown := [name for name in found if name not in known]:
        raise ApiError(f"{unknown[0]}: not together with {known[0]}", param=unknown[0])


def _code(found: dict[str, Any], name: str, needed: bool = True) -> str | None:
    given = service.word(found.get(name), name, needed)
    return given if given is None else FAR_CODES.get(given.lower(), given)
