"""DeepL's glossaries: version 2 (one pair of languages each) and version 3 (a dictionary per pair)."""

from __future__ import annotations

import re
from asyncio import to_thread
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from allyouneed.apps.serve.dialects.translation import service
from allyouneed.apps.serve.dialects.translation.fields import choice, one_text, read_fields, word
from allyouneed.apps.serve.dialects.translation.glossaries import (
    NAME_CHARACTERS,
    Dictionary,
    GlossaryStore,
    StoredGlossary,
    base_language,
)
from allyouneed.apps.serve.dialects.translation.terms import given_terms, parse_terms
from allyouneed.apps.serve.errors import ApiError, over_limit
from allyouneed.apps.serve.responses import json_response, to_json
from allyouneed.apps.serve.unknown_fields import check_fields
from allyouneed.data.languages import resolve
from allyouneed.errors import UserError

router = APIRouter(tags=["DeepL"])
TSV = "text/tab-separated-values"
ENTRIES = ("source_lang", "target_lang", "entries", "entries_format")
LANGUAGE = re.compile(r"[^\W\d_]{2,40}")
MOST_DICTIONARIES = 100  # of a request


def _store(request: Request) -> GlossaryStore:
    """Its methods read and write files: they are called in threads."""
    found: GlossaryStore = request.app.state.glossaries
    return found


def _created(content: Any) -> Response:
    return Response(to_json(content), 201, media_type="application/json")


# --- version 2 ------------------------------------------------------------------------------------------------------


@router.get("/v2/glossary-language-pairs")
async def glossary_languages(request: Request) -> Response:
    found = await service.languages(request)
    both = {(base_language(here), base_language(there)): None for here, into in found.items() for there in into}
    pairs = [{"source_lang": here, "target_lang": there} for here, there in both if here != there]
    return json_response({"supported_languages": pairs})


@router.post("/v2/glossaries")
async def create(request: Request) -> Response:
    found = await read_fields(request, ("name", *ENTRIES, "auth_key"))
    name = _name(found.get("name"))
    dictionary = await _dictionary(request, found)
    return _created(_single(await to_thread(_store(request).create, name, [dictionary])))


@router.get("/v2/glossaries")
async def list_all(request: Request) -> Response:
    """Those of one pair of languages; version 3 lists all."""
    every = await to_thread(_store(request).every)
    return json_response({"glossaries": [_single(one) for one in every if len(one.dictionaries) == 1]})


@router.get("/v2/glossaries/{glossary_id}")
async def get(request: Request, glossary_id: str) -> Response:
    return json_response(_single(await to_thread(_store(request).get, glossary_id)))


@router.get("/v2/glossaries/{glossary_id}/entries")
async def entries(request: Request, glossary_id: str) -> Response:
    found = await to_thread(_store(request).get, glossary_id)
    _single(found)
    return Response(_tsv(found.dictionaries[0]), media_type=TSV)


@router.delete("/v2/glossaries/{glossary_id}")
@router.delete("/v3/glossaries/{glossary_id}")
async def delete(request: Request, glossary_id: str) -> Response:
    await to_thread(_store(request).remove, glossary_id)
    return Response(status_code=204)


# --- version 3 ------------------------------------------------------------------------------------------------------


@router.post("/v3/glossaries")
async def create_multilingual(request: Request) -> Response:
    found = await read_fields(request, ("name", "dictionaries", "auth_key"))
    name, dictionaries = _name(found.get("name")), await _dictionaries(request, found)
    if not dictionaries:
        raise ApiError("dictionaries: missing", param="dictionaries")
    return _created(_full(await to_thread(_store(request).create, name, dictionaries)))


@router.get("/v3/glossaries")
async def list_multilingual(request: Request) -> Response:
    return json_response({"glossaries": [_full(one) for one in await to_thread(_store(request).every)]})


@router.get("/v3/glossaries/{glossary_id}")
async def get_multilingual(request: Request, glossary_id: str) -> Response:
    return json_response(_full(await to_thread(_store(request).get, glossary_id)))


@router.patch("/v3/glossaries/{glossary_id}")
async def update(request: Request, glossary_id: str) -> Response:
    """Another name; terms are added to those of a dictionary."""
    found = await read_fields(request, ("name", "dictionaries", "auth_key"))
    name = None if found.get("name") is None else _name(found["name"])
    dictionaries = await _dictionaries(request, found)
    return json_response(_full(await to_thread(_store(request).update, glossary_id, name, dictionaries)))


@router.put("/v3/glossaries/{glossary_id}/dictionaries")
async def replace(request: Request, glossary_id: str) -> Response:
    dictionary = await _dictionary(request, await read_fields(request, (*ENTRIES, "auth_key")))
    await to_thread(_store(request).replace, glossary_id, dictionary)
    return json_response(_summary(dictionary))


@router.delete("/v3/glossaries/{glossary_id}/dictionaries")
async def delete_dictionary(request: Request, glossary_id: str) -> Response:
    source, target = await _pair(request)
    await to_thread(_store(request).remove_dictionary, glossary_id, source, target)
    return Response(status_code=204)


@router.get("/v3/glossaries/{glossary_id}/entries")
async def multilingual_entries(request: Request, glossary_id: str) -> Response:
    source, target = await _pair(request)
    found = (await to_thread(_store(request).get, glossary_id)).dictionary(source, target)
    languages = {"source_lang": found.source_lang, "target_lang": found.target_lang}
    return json_response({"dictionaries": [languages | {"entries": _tsv(found), "entries_format": "tsv"}]})


# --- in and out -----------------------------------------------------------------------------------------------------


def _name(value: Any) -> str:
    name = one_text(value, "name").strip() if value is not None else ""
    if not name or len(name) > NAME_CHARACTERS or not name.isprintable():
        raise ApiError(f"name: expected 1 to {NAME_CHARACTERS} printable characters", param="name")
    return name


async def _dictionaries(request: Request, found: Mapping[str, Any]) -> list[Dictionary]:
    given = found.get("dictionaries")
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise ApiError("dictionaries: expected a list of objects", param="dictionaries")
    if len(given) > MOST_DICTIONARIES:
        raise over_limit("dictionaries", len(given), MOST_DICTIONARIES)
    for one in given:
        check_fields(one, ENTRIES, (), "dictionaries.")
    return [await _dictionary(request, one) for one in given]


async def _dictionary(request: Request, found: Mapping[str, Any]) -> Dictionary:
    source, target = word(found.get("source_lang"), "source_lang"), word(found.get("target_lang"), "target_lang")
    assert source is not None and target is not None
    languages = await service.languages(request)
    here = _language(source, [*languages])
    into = {code for name, codes in languages.items() if base_language(name) == here for code in codes}
    pair = [here, _language(target, sorted(into))]
    if pair[0] == pair[1]:
        raise ApiError("source_lang and target_lang are the same language", param="target_lang")
    format = choice(found.get("entries_format"), "entries_format", ("tsv", "csv"), "tsv")
    given = found.get("entries")
    limits = request.app.state.settings.limits

    def build() -> Dictionary:
        if isinstance(given, str):
            terms = parse_terms(one_text(given, "entries"), format, "entries")
        else:
            terms = given_terms(given, limits, "entries")
        if not terms:
            raise ApiError("entries: missing", param="entries")
        return Dictionary(source_lang=pair[0], target_lang=pair[1], entries=terms)

    return await to_thread(build)


def _language(name: str, known: list[str]) -> str:
    """A language that the model knows; of a model without names of languages, any."""
    if not LANGUAGE.fullmatch(base_language(name)):
        raise ApiError(f"{name[:40]!r} is not a language", code="unsupported_language")
    if known:
        try:
            resolve(base_language(name), known, "language of a glossary")
        except UserError as error:
            raise ApiError(str(error), code="unsupported_language") from None
    return base_language(name)


async def _pair(request: Request) -> tuple[str, str]:
    found = await read_fields(request, ("source_lang", "target_lang", "auth_key"))
    source, target = word(found.get("source_lang"), "source_lang"), word(found.get("target_lang"), "target_lang")
    assert source is not None and target is not None
    return source, target


def _tsv(dictionary: Dictionary) -> str:
    return "\n".join(f"{source}\t{target}" for source, target in dictionary.entries.items())


def _summary(dictionary: Dictionary) -> dict[str, Any]:
    return {
        "source_lang": dictionary.source_lang,
        "target_lang": dictionary.target_lang,
        "entry_count": len(dictionary.entries),
    }


def _single(found: StoredGlossary) -> dict[str, Any]:
    if len(found.dictionaries) != 1:
        raise ApiError(
            f"the glossary {found.glossary_id} has {len(found.dictionaries)} dictionaries; use /v3/glossaries",
            code="multilingual_glossary",
        )
    return {
        "glossary_id": found.glossary_id,
        "name": found.name,
        "ready": True,
        "creation_time": found.creation_time,
        **_summary(found.dictionaries[0]),
    }


def _full(found: StoredGlossary) -> dict[str, Any]:
    return {
        "glossary_id": found.glossary_id,
        "name": found.name,
        "creation_time": found.creation_time,
        "dictionaries": [_summary(one) for one in found.dictionaries],
    }
