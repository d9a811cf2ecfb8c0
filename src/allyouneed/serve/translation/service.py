"""Translation for all dialects: which model, which languages, and texts through the engine loop."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from fastapi import Request

from allyouneed.serve.errors import ApiError, over_limit
from allyouneed.serve.settings import Limits

if TYPE_CHECKING:
    from allyouneed.infer.predictors.translator import Translator
    from allyouneed.serve.engine.served_model import ServedModel

AUTO = ("", "auto")
FORM = "application/x-www-form-urlencoded"
MOST_FIELDS = 4096


@dataclass(frozen=True)
class Translated:
    """`source`: the language of the text, given or detected; None if the model does not know it. `others`: further
    translations, best first."""

    text: str
    source: str | None
    others: list[str]


@asynccontextmanager
async def translator(request: Request) -> AsyncIterator[ServedModel]:
    """The default model if it translates, else the first one that does."""
    registry = request.app.state.registry
    for entry in sorted(registry.entries.values(), key=lambda one: one.name != registry.default):
        if (await registry.facts(entry))["task"] == "translation":
            async with registry.use(entry.name) as model:
                yield model
            return
    raise ApiError("none of the models of this server translates", 404, code="no_translator")


async def translate(
    model: ServedModel,
    texts: Sequence[str],
    source: str | None,
    target: str | None,
    client: str,
    limits: Limits,
    count: int = 1,
) -> list[Translated]:
    """`count`: translations of each text."""
    if len(texts) > limits.texts:
        raise over_limit("texts", len(texts), limits.texts)
    if (size := sum(map(len, texts))) > limits.prompt_characters:
        raise over_limit("characters", size, limits.prompt_characters)
    if count > limits.choices:
        raise over_limit("alternatives", count, limits.choices)
    predictor: Translator = model.predictor  # type: ignore[assignment]
    from_ = None if (source or "").lower() in AUTO else source
    to = None if not predictor.languages else target
    if from_ is not None and not predictor.languages:
        from_ = None  # the model has one direction
    width: dict[str, Any] = {"method": "beam", "beam": max(count, 4), "best": count} if count > 1 else {}
    found = await model.call(
        lambda: predictor.translate_full(list(texts), to, from_=from_, **width), client, model.settings.exact
    )
    return [
        Translated(one.text, one.route[0] if one.route else from_, [other.text for other in one.candidates[1:]])
        for one in found
    ]


def detect(model: ServedModel, text: str) -> tuple[str | None, float]:
    """The language of a text, and how certain that is, from 0 to 100."""
    detector = model.predictor.routes.detector  # type: ignore[attr-defined]
    if detector is None:
        return None, 0.0
    language, nats = detector.detect_odds(text)
    return language, 0.0 if language is None else round(100 / (1 + math.exp(-min(nats, 50.0))), 1)


def languages(model: ServedModel) -> tuple[list[str], list[str]]:
    """Source and target languages."""
    predictor: Translator = model.predictor  # type: ignore[assignment]
    sources = {here for here, _ in predictor.routes.directions if here is not None}
    converted = set(predictor.written_languages) - set(predictor.languages)  # traditional Chinese
    return sorted((sources or set(predictor.languages)) | converted), predictor.written_languages


async def fields(request: Request, known: Sequence[str]) -> dict[str, Any]:
    """The fields of a request: a query, a form or a JSON object. A field that a form repeats is a list."""
    found: dict[str, Any] = {}
    content = await request.body()
    pairs = list(request.query_params.multi_items())
    if request.headers.get("content-type", "").startswith(FORM):
        try:
            pairs += parse_qsl(content.decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS)
        except ValueError:
            raise ApiError(f"the form cannot be read: UTF-8 and at most {MOST_FIELDS} fields") from None
    elif content:
        try:
            tree = json.loads(content)
        except (ValueError, RecursionError):
            raise ApiError("the body is neither JSON nor a form") from None
        if not isinstance(tree, dict):
            raise ApiError("the body must be a JSON object")
        found |= tree
    for name, value in pairs:
        if name in found:
            found[name] = [*(found[name] if isinstance(found[name], list) else [found[name]]), value]
        else:
            found[name] = value
    if unknown := [name for name in found if name not in known]:
        raise ApiError(f"{unknown[0][:100]}: unknown field", param=unknown[0][:100])
    return found


def text_list(value: Any, name: str) -> list[str]:
    many = value if isinstance(value, list) else [value]
    if value is None or not many:
        raise ApiError(f"{name}: missing", param=name)
    for text in many:
        if not isinstance(text, str):
            raise ApiError(f"{name}: expected text, found {type(text).__name__}", param=name)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ApiError(f"{name}: contains an unpaired surrogate; fix the text", param=name) from None
    return many


def word(value: Any, name: str, needed: bool = True) -> str | None:
    """A short text such as a language."""
    if value is None or value == "":
        if needed:
            raise ApiError(f"{name}: missing", param=name)
        return None
    if not isinstance(value, str) or len(value) > 100:
        raise ApiError(f"{name}: expected a short text", param=name)
    return value


def whole_number(value: Any, name: str, most: int) -> int:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ApiError(f"{name}: expected a whole number from 0 to {most}", param=name)
    if int(text) > most:
        raise ApiError(f"{name}={int(text)}, the limit is {most}", param=name, code="limit_exceeded")
    return int(text)
