"""The glossary of a translation request: terms that it brings itself, and stored ones that it names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fastapi import Request

from allyouneed.apps.serve.dialects.translation.fields import name_list, one_text
from allyouneed.apps.serve.dialects.translation.glossaries import GlossaryStore, check_sizes
from allyouneed.apps.serve.dialects.translation.service import AUTO
from allyouneed.apps.serve.errors import ApiError
from allyouneed.apps.serve.settings import Limits
from allyouneed.errors import UserError

if TYPE_CHECKING:
    from allyouneed.apps.translate.glossary import Glossary

FIELDS = ("glossary", "glossary_id", "glossary_ids")
MOST_IDS = 5


def parse_terms(text: str, format: str, name: str) -> dict[str, str]:
    """Terms as TSV or CSV."""
    from allyouneed.apps.translate.glossary import Glossary

    parse: Callable[[str, str], Glossary] = Glossary.parse if format == "tsv" else Glossary.parse_csv
    try:
        return parse(text, name).terms
    except UserError as error:
        raise ApiError(str(error).removesuffix("; mend the file"), param=name, code="invalid_entries") from None


def given_terms(value: Any, limits: Limits, name: str = "glossary") -> dict[str, str]:
    """The terms of a request: an object of terms and translations, or lines of TSV."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        terms = parse_terms(one_text(value, name), "tsv", name)
    elif isinstance(value, Mapping):
        terms = {one_text(key, name): one_text(text, name) for key, text in value.items()}
    else:
        raise ApiError(f"{name}: expected an object of terms and translations, or lines of TSV", param=name)
    check_sizes([terms], limits)
    return terms


async def read_glossary(
    request: Request, found: Mapping[str, Any], source: str | None, target: str | None, source_name: str
) -> Glossary | None:
    """The terms of a request, of the fields that were `found`. Its own come before stored ones, and those of the first
    identifier before those of the next. `source_name`: the field of the source language."""
    if not any(found.get(name) for name in FIELDS):
        return None
    state = request.app.state
    limits, store = state.settings.limits, state.glossaries
    return await asyncio.to_thread(_read, store, limits, found, source, target, source_name)


def _read(
    store: GlossaryStore,
    limits: Limits,
    found: Mapping[str, Any],
    source: str | None,
    target: str | None,
    source_name: str,
) -> Glossary | None:
    from allyouneed.apps.translate.glossary import Glossary

    terms = given_terms(found.get("glossary"), limits)
    named = [(one, name) for name in ("glossary_id", "glossary_ids") for one in name_list(found.get(name), name)]
    if len(named) > MOST_IDS:
        raise ApiError(f"glossary_ids: {len(named)} glossaries, the limit is {MOST_IDS}", param="glossary_ids")
    if named and ((source or "").lower() in AUTO or not target):
        message = f"{named[0][1]}: set {source_name} as well; a stored glossary is for two languages"
        raise ApiError(message, param=source_name)
    stored = [store.get(one, name).dictionary(source or "", target or "") for one, name in named]
    if not terms and len(stored) == 1:
        return stored[0].glossary
    for one in stored:
        terms = one.entries | terms
    return _checked(lambda: Glossary(terms)) if terms else None


def _checked(build: Callable[[], Glossary]) -> Glossary:
    try:
        return build()
    except UserError as error:
        raise ApiError(str(error), param="glossary", code="invalid_entries") from None
