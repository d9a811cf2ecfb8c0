"""LibreTranslate's API: /translate, /detect, /languages, /health. Other clients use the same path and are distinguished
by their fields: DeepLX (`text`), Immersive Translate (`text_list`), Apertium (`langpair`, for OmegaT)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from allyouneed.apps.serve.dialects.translation import service, terms
from allyouneed.apps.serve.dialects.translation.deepl import MARKUP, markup_options
from allyouneed.apps.serve.dialects.translation.fields import choice, read_fields, text_list, whole_number, word
from allyouneed.apps.serve.errors import ApiError
from allyouneed.apps.serve.responses import json_response
from allyouneed.apps.serve.security import BODY_KEYS
from allyouneed.data.languages import english_name

router = APIRouter(tags=["LibreTranslate, DeepLX, Immersive Translate, Apertium"])
KEYS = (*BODY_KEYS, "token", "key")
FAR_CODES = {"zt": "zh-Hant", "pb": "pt-BR"}  # LibreTranslate's older codes


@router.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/translate")
@router.post("/translate")
async def translate(request: Request) -> Response:
    every = {name: None for dialect in DIALECTS for name in (*dialect.known, *KEYS)}
    found = await read_fields(request, tuple(every), ("markUnknown",))
    dialect = next((one for one in DIALECTS if one.key in found), LIBRE)
    unfit = [name for name, value in found.items() if value is not None and name in every]
    if wrong := [name for name in unfit if name not in (*dialect.known, *KEYS)]:
        raise ApiError(f"{wrong[0]}: not together with {dialect.key}", param=wrong[0])
    return await dialect.answer(request, found)


async def _run(request: Request, job: service.Job) -> list[service.Translated]:
    async with service.translator(request, job) as model:
        return await service.translate(model, job, request.state.client, request.app.state.settings.limits)


async def _libre(request: Request, found: dict[str, Any]) -> Response:
    texts = text_list(found.get("q"), "q")
    source, target = _code(found, "source"), _code(found, "target")
    format = choice(found.get("format"), "format", ("text", "html"), "text")
    most = request.app.state.settings.limits.choices - 1
    others = whole_number(found.get("alternatives") or 0, "alternatives", most)
    glossary = await terms.read_glossary(request, found, source, target, "source")
    job = service.Job(texts, source, target, others + 1, format, glossary=glossary)
    results = await _run(request, job)
    many = isinstance(found["q"], list)
    answer: dict[str, Any] = {"translatedText": [one.text for one in results] if many else results[0].text}
    if job.from_ is None:
        detector = await service.detector(request)
        sure = await asyncio.to_thread(lambda: [service.detect(detector, one.words)[1] for one in results])
        detected = [{"language": one.source, "confidence": odds} for one, odds in zip(results, sure, strict=True)]
        answer["detectedLanguage"] = detected if many else detected[0]
    if others:
        answer["alternatives"] = [one.others for one in results] if many else results[0].others
    return json_response(answer)


async def _deeplx(request: Request, found: dict[str, Any]) -> Response:
    (text,) = text_list(found["text"], "text")[:1]
    source, target, job = await _marked_job(request, found, [text])
    (result,) = await _run(request, job)
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


async def _immersive(request: Request, found: dict[str, Any]) -> Response:
    source, _, job = await _marked_job(request, found, text_list(found["text_list"], "text_list"))
    results = await _run(request, job)
    return json_response(
        {"translations": [{"detected_source_lang": one.source or source or "", "text": one.text} for one in results]}
    )


async def _marked_job(
    request: Request, found: dict[str, Any], texts: list[str]
) -> tuple[str | None, str | None, service.Job]:
    """Source, target, and what is asked for, with DeepL's fields for markup."""
    source, target = _code(found, "source_lang", needed=False), _code(found, "target_lang")
    options = markup_options(found)
    glossary = await terms.read_glossary(request, found, source, target, "source_lang")
    return source, target, service.Job(texts, source, target, glossary=glossary, **options)


async def _apertium(request: Request, found: dict[str, Any]) -> Response:
    pair = word(found["langpair"], "langpair") or ""
    source, given, target = pair.partition("|")
    if not given or not target:
        raise ApiError("langpair: expected two languages, en|de", param="langpair")
    format = choice(found.get("format"), "format", ("txt", "text", "html"), "txt")
    texts = text_list(found.get("q"), "q")[:1]
    job = service.Job(texts, source, target, format="html" if format == "html" else "text")
    (result,) = await _run(request, job)
    return json_response(
        {"responseData": {"translatedText": result.text}, "responseDetails": None, "responseStatus": 200}
    )


class Dialect(NamedTuple):
    """`key`: the field that a request of this dialect has."""

    key: str
    known: tuple[str, ...]
    answer: Callable[[Request, dict[str, Any]], Awaitable[Response]]


LIBRE = Dialect("q", ("q", "source", "target", "format", "alternatives", *terms.FIELDS), _libre)
MARKED = ("source_lang", "target_lang", *MARKUP, *terms.FIELDS)
DIALECTS = (
    Dialect("langpair", ("langpair", "q", "markUnknown", "format"), _apertium),
    Dialect("text_list", ("text_list", *MARKED), _immersive),
    Dialect("text", ("text", *MARKED), _deeplx),
    LIBRE,
)


@router.post("/detect")
async def detect(request: Request) -> Response:
    found = await read_fields(request, ("q", *KEYS))
    texts = text_list(found.get("q"), "q")
    service.check_sizes(service.Job(texts, None, None), request.app.state.settings.limits)
    detector = await service.detector(request)
    language, confidence = await asyncio.to_thread(lambda: service.detect(detector, "\n".join(texts)))
    return json_response([] if language is None else [{"language": language, "confidence": confidence}])


@router.get("/languages")
async def languages(request: Request) -> Response:
    return json_response(
        [
            {"code": code, "name": english_name(code), "targets": [one for one in targets if one != code]}
            for code, targets in (await service.languages(request)).items()
        ]
    )


def _code(found: dict[str, Any], name: str, needed: bool = True) -> str | None:
    given = word(found.get(name), name, needed)
    return given if given is None else FAR_CODES.get(given.lower(), given)
