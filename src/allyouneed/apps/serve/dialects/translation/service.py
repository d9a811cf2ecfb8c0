"""Translation for all dialects: which model, which languages, and texts and documents through the engine loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeGuard

from fastapi import Request

from allyouneed.apps.serve.engine.registry import Entry, ModelRegistry, failures_of_the_server
from allyouneed.apps.serve.errors import ApiError, over_limit
from allyouneed.apps.serve.settings import Limits
from allyouneed.data.languages import find
from allyouneed.infer.predictors.registry import translates

if TYPE_CHECKING:
    from allyouneed.apps.serve.engine.served_model import ServedModel
    from allyouneed.apps.translate.glossary import Glossary
    from allyouneed.apps.translate.offers import Offer
    from allyouneed.apps.translate.translator import Translator
    from allyouneed.data.language_detection import LanguageDetector

AUTO = ("", "auto")
SAMPLE = 4000  # characters by which the language of a request is told


@dataclass(frozen=True)
class Job:
    """What is asked for. `format`: of the texts (apps/translate/documents/formats.py), with its `reading` options;
    `count`: translations of each text; `sentences`: split lines into sentences; `preserve`: begin and end as the
    source does. `context`: what precedes each text; for models trained with it."""

    texts: Sequence[str | bytes]
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
    data: bytes = b""


@asynccontextmanager
async def translator(request: Request, job: Job, name: str | None = None) -> AsyncIterator[ServedModel]:
    """The model of this name; else the first one of the right languages, the default model before others."""
    registry = request.app.state.registry
    if name is not None:
        async with registry.use(name) as model:
            model.offering("translate_full", "translate")
            yield model
        return
    entries = await _translators(registry)
    number = 0
    if len(entries) > 1:
        from allyouneed.apps.translate.offers import choose

        offers, text = await _offers(registry), "\n".join(filter(_is_text, job.texts))[:SAMPLE]
        number = await asyncio.to_thread(lambda: choose(offers, job.from_, job.target, text))
    async with registry.use(entries[number].name) as model:
        yield model


async def _translators(registry: ModelRegistry) -> list[Entry]:
    found = await registry.suiting(translates)
    if not found:
        raise ApiError("none of the models of this server translates", 404, code="no_translator")
    return found


async def _offers(registry: ModelRegistry) -> list[Offer]:
    """The languages of each translator, the default model first."""
    from allyouneed.apps.translate.offers import Offer

    def read(entry: Entry) -> Offer:
        with failures_of_the_server(entry):
            return Offer.read(entry.path) if entry.model is None else Offer.of_folder(entry.model.predictor.folder)

    entries = await _translators(registry)
    for entry in entries:
        if entry.offer is None:
            entry.offer = await asyncio.to_thread(read, entry)
    return [entry.offer for entry in entries]


async def detector(request: Request) -> LanguageDetector | None:
    """That of the first translator which has one."""
    offers = await _offers(request.app.state.registry)
    return next((one.detector for one in offers if one.detector is not None), None)


async def languages(request: Request) -> dict[str, list[str]]:
    """The languages that are translated, and into which each is."""
    found: dict[str, set[str]] = {}
    for one in await _offers(request.app.state.registry):
        for source in one.sources:
            found.setdefault(source, set()).update(one.targets)
    return {source: sorted(targets) for source, targets in sorted(found.items())}


def _is_text(content: str | bytes) -> TypeGuard[str]:
    return isinstance(content, str)


def check_sizes(job: Job, limits: Limits) -> None:
    if len(job.texts) > limits.texts:
        raise over_limit("texts", len(job.texts), limits.texts)
    if (size := sum(map(len, filter(_is_text, job.texts))) + len(job.context)) > limits.prompt_characters:
        raise over_limit("characters", size, limits.prompt_characters)
    if job.count > limits.choices:
        raise over_limit("alternatives", job.count, limits.choices)


async def translate(model: ServedModel, job: Job, client: str, limits: Limits) -> list[Translated]:
    check_sizes(job, limits)
    return await model.call(lambda: _translate(model.predictor, job), client, model.settings.exact)  # type: ignore[arg-type]


def _translate(predictor: Translator, job: Job) -> list[Translated]:
    """In a thread: reading and writing documents is work of its own; what is decoded joins the engine loop."""
    from allyouneed.apps.translate.documents.translate import same_form

    # nothing can be chosen, or refused, where nothing names the languages of a model
    named = predictor.languages or predictor.routes.directions
    to, from_ = (job.target, job.from_) if named else (None, None)
    only = predictor.routes.directions[0][0] if len(predictor.routes.directions) == 1 else None
    options: dict[str, Any] = {"sentences": job.sentences}
    options |= {"context": job.context} if job.context else {}
    options |= {"method": "beam", "beam": max(job.count, 4), "best": job.count} if job.count > 1 else {}
    texts = list(filter(_is_text, job.texts))
    if job.format == "text" and not job.reading and len(texts) == len(job.texts):
        plain = predictor.translate_full(texts, to, from_=from_, glossary=job.glossary, **options)
        found = [
            Translated(
                one.text,
                one.route[0] if one.route else from_ or only,
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
        found = [Translated(one.text, one.source, one.words, one.others, one.notes, one.data) for one in documents]
    if job.preserve and job.format == "text":
        german = bool(to is not None and find(to, ["de"]))
        found = [replace(one, text=same_form(text, one.text, german)) for one, text in zip(found, texts, strict=True)]
    return found


def detect(detector: LanguageDetector | None, text: str) -> tuple[str | None, float]:
    """The language of a text, and how certain that is, from 0 to 100."""
    if detector is None:
        return None, 0.0
    language, nats = detector.detect_odds(text)
    return language, 0.0 if language is None else round(100 / (1 + math.exp(-min(nats, 50.0))), 1)


def reads_context(model: ServedModel) -> bool:
    """Whether the model was trained with the sentences before a sentence."""
    return getattr(model.predictor, "context", None) is not None
