"""POST /v1/documents/translations: a file in, the translated file out. Nothing is stored."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from allyouneed.apps.serve.bodies import Upload, off_loop, parse_multipart
from allyouneed.apps.serve.dialects.translation import service
from allyouneed.apps.serve.dialects.translation.fields import word
from allyouneed.apps.serve.dialects.translation.terms import FIELDS, read_glossary
from allyouneed.apps.serve.errors import ApiError, over_limit
from allyouneed.apps.serve.security import BODY_KEYS
from allyouneed.apps.serve.settings import Limits
from allyouneed.apps.serve.unknown_fields import check_fields

router = APIRouter(tags=["Documents"])
KNOWN = ("model", "source_lang", "target_lang", "format", "column", "into", *FIELDS, *BODY_KEYS)
MOST_FIELDS = 32


@router.post("/v1/documents/translations", openapi_extra={"requestBody": {"content": {"multipart/form-data": {}}}})
async def translate_file(request: Request) -> Response:
    """Fields of the form: `file`; `target_lang`, `source_lang`, `model`, `glossary`; `format`, if it is not that of the
    file's suffix; `column` of a table; `into`, the format that a PDF becomes."""
    kind, body = request.headers.get("content-type", ""), await request.body()
    if not kind.lower().startswith("multipart/form-data"):
        raise ApiError("send a form: multipart/form-data with a file", param="file")
    given, files = await off_loop(len(body), parse_multipart, kind, body, files=1, fields=MOST_FIELDS)
    fields = dict(given)
    check_fields(fields, KNOWN)
    if (file := files.get("file")) is None:
        raise ApiError("file: a document is missing", param="file")
    limits = request.app.state.settings.limits
    format = _format(word(fields.get("format"), "format", needed=False), file)
    reading = {name: fields[name] for name in ("column", "into") if fields.get(name)}
    await off_loop(1 << 30, _check, file, format, reading, limits)
    source = word(fields.get("source_lang"), "source_lang", needed=False)
    target = word(fields.get("target_lang"), "target_lang", needed=False)
    glossary = await read_glossary(request, fields, source, target, "source_lang")
    job = service.Job([file], source, target, format=format, reading=reading, glossary=glossary)
    async with service.translator(request, job, fields.get("model") or None) as model:
        (found,) = await service.translate(model, job, request.state.client, limits)
    return Response(found.data, media_type="application/octet-stream")


def _format(named: str | None, file: Upload) -> str:
    from allyouneed.apps.translate.documents.formats import READERS, known_format

    found = named or known_format(file.name)
    if found not in READERS:
        allowed = ", ".join(READERS)
        raise ApiError(f"format: {named or file.name[:40]!r} is none (allowed: {allowed})", param="format")
    return found


def _check(file: Upload, format: str, reading: dict[str, str], limits: Limits) -> None:
    """Refuse a document with more text than a request may have, before a model reads it."""
    from allyouneed.apps.translate.documents.formats import read_document

    size = sum(len(unit.passage) for unit in read_document(bytes(file), format, **reading).units)
    if size > limits.prompt_characters:
        raise over_limit("characters", size, limits.prompt_characters)
