"""DeepL's API, version 2: /v2/translate, /v2/languages, /v2/usage. Glossaries: deepl_glossaries.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from allyouneed.apps.serve.dialects.translation import service, terms
from allyouneed.apps.serve.dialects.translation.fields import (
    choice,
    flag,
    name_list,
    one_text,
    read_fields,
    text_list,
    word,
)
from allyouneed.apps.serve.errors import ApiError
from allyouneed.apps.serve.responses import json_response
from allyouneed.apps.serve.unknown_fields import note_ignored
from allyouneed.data.languages import english_name

router = APIRouter(prefix="/v2", tags=["DeepL"])
TAGS = ("ignore_tags", "splitting_tags", "non_splitting_tags")
MARKUP = ("tag_handling", *TAGS, "outline_detection", "split_sentences", "preserve_formatting")
USED = ("text", "source_lang", "target_lang", "show_billed_characters", "auth_key", "context", *MARKUP, *terms.FIELDS)
IGNORED = (
    "formality", "model_type", "tag_handling_version", "enable_beta_languages", "custom_instructions",
    "translation_memory_threshold", "usage_type",
)  # fmt: skip
SPLITS = ("0", "1", "nonewlines")


def markup_options(found: Mapping[str, Any]) -> dict[str, Any]:
    """How texts are read, as fields of `service.Job`."""
    format = choice(found.get("tag_handling"), "tag_handling", ("html", "xml"), "text")
    lists = {name: name_list(found.get(name), name) for name in TAGS}
    outline = flag(found.get("outline_detection"), "outline_detection", True)
    split = choice(found.get("split_sentences"), "split_sentences", SPLITS, "nonewlines" if format == "html" else "1")
    reading: dict[str, Any] = {}
    if format == "text":
        if given := [name for name, tags in lists.items() if tags]:
            raise ApiError(f"{given[0]}: set tag_handling to xml or html as well", param=given[0])
        reading |= {} if split == "1" else {"newlines": False}
    else:
        reading |= lists
    if format == "xml":
        reading |= {"outline_detection": outline, "newlines": split == "1"}
    preserve = flag(found.get("preserve_formatting"), "preserve_formatting", False)
    return {"format": format, "reading": reading, "sentences": split != "0", "preserve": preserve}


@router.get("/translate")
@router.post("/translate")
async def translate(request: Request) -> Response:
    found = await read_fields(request, (*USED, *IGNORED), IGNORED)
    texts = text_list(found.get("text"), "text")
    source = word(found.get("source_lang"), "source_lang", needed=False)
    target = word(found.get("target_lang"), "target_lang")
    options = markup_options(found)
    context = one_text(found.get("context") or "", "context").strip()
    glossary = await terms.read_glossary(request, found, source, target, "source_lang")
    job = service.Job(texts, source, target, glossary=glossary, context=context, **options)
    async with service.translator(request, job) as model:
        if context and not service.reads_context(model):
            note_ignored("context")
            job = replace(job, context="")
        results = await service.translate(model, job, request.state.client, request.app.state.settings.limits)
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
    given = await read_fields(request, ("type", "auth_key"))
    kind = choice(given.get("type"), "type", ("source", "target"), "source")
    found = await service.languages(request)
    codes = sorted({*found} if kind == "source" else {code for targets in found.values() for code in targets})
    more: dict[str, Any] = {"supports_formality": False} if kind == "target" else {}
    return json_response([{"language": code.upper(), "name": english_name(code), **more} for code in codes])


@router.get("/usage")
async def usage() -> dict[str, int]:
    """Nothing is counted: there is no quota."""
    return {"character_count": 0, "character_limit": 1_000_000_000_000}
