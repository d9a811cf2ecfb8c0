"""Translation for all dialects: which model, which languages, and texts and documents through the engine loop."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fastapi import Request

from allyouneed.apps.serve.errors import ApiError, over_limit
from allyouneed.apps.serve.settings import Limits
from allyouneed.data.languages import find
from allyouneed.infer.predictors.registry import translates

if TYPE_CHECKING:
    from allyouneed.apps.serve.engine.served_model import ServedModel
    from allyouneed.apps.translate.glossary import Glossary
    from allyouneed.apps.translate.translator import Translator

AUTO = ("", "auto")


@dataclass(frozen=True)
class Job:
    """What is asked for. `format`: of the texts (apps/translate/documents/formats.py), with its `reading` options;
    `count`: translations of each text; `sentences`: split lines into sentences; `preserve`: begin and end as the
    source does. `context`: what precedes each text; for models trained with it."""

    texts: Sequence[str]
    source: str | None
    target: str | None
    count: int = 1
    format: str = "text"
    reading: Mapping[str, Any] = field(default_factory=dict)
    glossary: Glossary | None = None
    sentences: bool = True
    preserve: bool = False
    context: str = ""

    @property
    def from_(self) -> str | None:
        return None if (self.source or "").lower() in AUTO else self.source


@dataclass(frozen=True)
class Translated:
    """`source`: the language of the text, given or detected; None if the model does not know it. `words`: the text
    without markup. `others`: further translations, best first."""

    text: str
    source: str | None
    words: str
    others: list[str]
    notes: list[str]


@asynccontextmanager
async def translator(request: Request, name: str | None = None) -> AsyncIterator[ServedModel]:
    """The model of this name; else the default model if it translates, else the first one that does."""
    registry = request.app.state.registry
    if name is not None:
        async with registry.use(name) as model:
            model.offering("translate_full", "translate")
            yield model
        return
    if (found := await registry.first(translates)) is None:
        raise ApiError("none of the models of this server translates", 404, code="no_translator")
    async with registry.use(found) as model:
        yield model


def check_sizes(job: Job, limits: Limits) -> None:
    if len(job.texts) > limits.texts:
        raise over_limit("texts", len(job.texts), limits.texts)
    if (size := sum(map(len, job.texts)) + len(job.context)) > limits.prompt_characters:
        raise over_limit("characters", size, limits.prompt_characters)
    if job.count > limits.choices:
        raise over_limit("alternatives", job.count, limits.choices)


async def translate(model: ServedModel, job: Job, client: str, limits: Limits) -> list[Translated]:
    check_sizes(job, limits)
    return await model.call(lambda: _translate(model.predictor, job), client, model.settings.exact)  # type: ignore[arg-type]


def _translate(predictor: Translator, job: Job) -> list[Translated]:
    """In a thread: reading and writing documents is work of its own; what is decoded joins the engine loop."""
    from allyouneed.apps.translate.documents.translate import same_form

    # a model with one direction has no languages to choose from
    to, from_ = (job.target, job.from_) if predictor.languages else (None, None)
    options: dict[str, Any] = {"sentences": job.sentences}
    options |= {"context": job.context} if job.context else {}
    options |= {"method": "beam", "beam": max(job.count, 4), "best": job.count} if job.count > 1 else {}
    if job.format == "text" and not job.reading:
        plain = predictor.translate_full(list(job.texts), to, from_=from_, glossary=job.glossary, **options)
        found = [
            Translated(
                one.text,
                one.route[0] if one.route else from_,
                one.source,
                [other.text for other in one.candidates[1:]],
                one.notes,
            )
            for one in plain
        ]
    else:
        documents = predictor.translate_documents(
            list(job.texts), to, format=job.format, from_=from_, glossary=job.glossary, reading=job.reading, **options
        )
        found = [Translated(one.text, one.source, one.words, one.others, one.notes) for one in documents]
    if job.preserve and job.format == "text":
        german = bool(to is not None and find(to, ["de"]))
        found = [
            replace(one, text=same_form(text, one.text, german)) for one, text in zip(found, job.texts, strict=True)
        ]
    return found


def detect(model: ServedModel, text: str) -> tuple[str | None, float]:
    """The language of a text, and how certain that is, from 0 to 100."""
    detector = model.predictor.routes.detector  # type: ignore[attr-defined]
    if detector is None:
        return None, 0.0
    language, nats = detector.detect_odds(text)
    return language, 0.0 if language is None else round(100 / (1 + math.exp(-min(nats, 50.0))), 1)


def reads_context(model: ServedModel) -> bool:
    """Whether the model was trained with the sentences before a sentence."""
    return getattr(model.predictor, "context", None) is not None


def languages(model: ServedModel) -> tuple[list[str], list[str]]:
    """Source and target languages."""
    predictor: Translator = model.predictor  # type: ignore[assignment]
    sources = {here for here, _ in predictor.routes.directions if here is not None}
    converted = set(predictor.written_languages) - set(predictor.languages)  # traditional Chinese
    return sorted((sources or set(predictor.languages)) | converted), predictor.written_languages
