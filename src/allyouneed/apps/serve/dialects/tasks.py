"""POST /v1/tasks/{task}: what is neither generation nor embedding, in one shape: inputs, and one result for each."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from allyouneed.apps.serve.bodies import BodyRoute
from allyouneed.apps.serve.dialects.translation import service
from allyouneed.apps.serve.dialects.translation.fields import choice, one_text
from allyouneed.apps.serve.dialects.translation.terms import read_glossary
from allyouneed.apps.serve.errors import ApiError, over_limit
from allyouneed.apps.serve.inputs import count_tokens, embed, relevance
from allyouneed.apps.serve.responses import json_response
from allyouneed.apps.serve.settings import Limits
from allyouneed.apps.serve.strict import Count, RequestBody, Text
from allyouneed.errors import UserError

if TYPE_CHECKING:
    from allyouneed.apps.serve.engine.served_model import ServedModel

router = APIRouter(tags=["tasks"], route_class=BodyRoute)
Task = Literal[
    "classification",
    "fill-mask",
    "tagging",
    "similarity",
    "search",
    "click",
    "preference",
    "image-classification",
    "image-text",
    "captioning",
    "audio-classification",
    "transcription",
    "question-answering",
    "translation",
    "seq2seq",
    "summarisation",
    "correction",
]
Pair = Annotated[list[Text], Field(min_length=2, max_length=2)]
Row = dict[Text, Any]
MOST_VALUES = 10_000  # of a row
MOST_CANDIDATES = 1000
FOUND, RERANKED = 10, 50  # texts of a search, and those that a second model ranks
TRANSLATION = ("source_lang", "target_lang", "format", "glossary", "glossary_id")
REWRITERS = {  # the method of each task, and what it does, for errors
    "seq2seq": ("seq2seq_full", "rewrite texts"),
    "summarisation": ("summarise_full", "summarise texts"),
    "correction": ("correct_full", "correct texts"),
}


class TaskRequest(RequestBody):
    """`inputs`: texts; pairs of texts (similarity, classification), of prompts and answers (preference), of a question
    and a text (question-answering); images (image-…, captioning) and sound files (transcription, audio-…) in base64;
    rows of a log (click). `top`: results per input. `labels`: the texts to choose from (image-text). `rerank`: the
    model that ranks what was found anew (search). The others: of translation."""

    model: Text | None = None
    inputs: Annotated[list[Text | Pair | Row], Field(min_length=1)]
    top: Annotated[Count, Field(le=MOST_CANDIDATES)] | None = None
    labels: list[Text] | None = None
    rerank: Text | None = None
    source_lang: Text | None = None
    target_lang: Text | None = None
    format: Annotated[
        Text | None, Field(description="text, html, md, po, json, …: a format of documents that is text")
    ] = None
    glossary: dict[Text, Text] | Text | None = None
    glossary_id: Text | None = None

    def texts(self) -> list[str]:
        if others := [one for one in self.inputs if not isinstance(one, str)]:
            what = f"a list of {len(others[0])}" if isinstance(others[0], list) else "an object"
            raise ApiError(f"inputs: expected texts, found {what}", param="inputs")
        return [one for one in self.inputs if isinstance(one, str)]

    def pairs(self) -> list[tuple[str, str]]:
        pairs = [(one[0], one[1]) for one in self.inputs if isinstance(one, list)]
        if len(pairs) < len(self.inputs):
            raise ApiError("inputs: expected pairs of texts, [[one, other], …]", param="inputs")
        return pairs

    def rows(self) -> list[dict[str, Any]]:
        rows = [one for one in self.inputs if isinstance(one, dict)]
        if len(rows) < len(self.inputs):
            raise ApiError("inputs: expected objects, [{column: value, …}, …]", param="inputs")
        for row in rows:
            values = sum(len(value) if isinstance(value, list) else 1 for value in row.values())
            if values > MOST_VALUES:
                raise over_limit("values of a row", values, MOST_VALUES, "inputs")
        return rows


@router.post("/v1/tasks/{task}")
async def run_task(task: Task, body: TaskRequest, request: Request) -> Response:
    state = request.app.state
    limits = state.settings.limits
    if len(body.inputs) > limits.texts:
        raise over_limit("inputs", len(body.inputs), limits.texts, "inputs")
    if body.labels is not None and task != "image-text":
        raise ApiError(f"labels: only for image-text, not for {task}", param="labels")
    if body.rerank is not None and task != "search":
        raise ApiError(f"rerank: only for search, not for {task}", param="rerank")
    if task == "translation":
        return await _translate(request, body, limits)
    if given := [name for name in TRANSLATION if getattr(body, name) is not None]:
        raise ApiError(f"{given[0]}: only for translation, not for {task}", param=given[0])
    if task in REWRITERS:
        return await _rewrite(request, task, body, limits)
    async with state.registry.use(body.model) as model:
        if task == "fill-mask" and hasattr(model.predictor, "fill"):  # it decodes what fills a mask
            results = await _fill_spans(model, body, limits, request.state.client)
        else:
            results = await RUNNERS[task](model, body, limits)
        if body.rerank is not None:
            async with state.registry.use(body.rerank) as reranker:
                results = await _ranked_anew(reranker, body, results)
        return json_response({"model": model.name, "task": task, "results": results})


async def _translate(request: Request, body: TaskRequest, limits: Limits) -> Response:
    """Texts or whole documents; `top`: translations of each."""
    source, target = body.source_lang, body.target_lang
    fields = {"glossary": body.glossary, "glossary_id": body.glossary_id}
    glossary = await read_glossary(request, fields, source, target, "source_lang")
    from allyouneed.apps.translate.documents.formats import FORMATS

    texts_only = [name for name, one in FORMATS.items() if not one.data and name not in ("csv", "tsv")]
    format = choice(body.format, "format", texts_only, "text")
    texts = [one_text(text, "inputs") for text in body.texts()]
    job = service.Job(texts, source, target, body.top or 1, format, glossary=glossary)
    async with service.translator(request, job, body.model) as model:
        found = await service.translate(model, job, request.state.client, limits)
        results = [
            {
                "text": one.text,
                "source_lang": one.source,
                "notes": one.notes,
                **({"alternatives": one.others} if job.count > 1 else {}),
            }
            for one in found
        ]
        return json_response({"model": model.name, "task": "translation", "results": results})


async def _rewrite(request: Request, task: str, body: TaskRequest, limits: Limits) -> Response:
    """`top`: outputs of each text, best first."""
    texts, (method, what) = body.texts(), REWRITERS[task]
    if body.top is not None and task == "correction":
        raise ApiError("top: a text has one correction; remove it", param="top")
    if body.top is not None and body.top > limits.choices:
        raise over_limit("alternatives", body.top, limits.choices)
    if (size := sum(map(len, texts))) > limits.prompt_characters:
        raise over_limit("characters", size, limits.prompt_characters, "inputs")
    options = {} if body.top is None else {"method": "beam", "beam": max(4, body.top), "best": body.top}
    state = request.app.state
    async with state.registry.use(body.model) as model:
        rewrite = getattr(model.offering(method, what), method)
        found = await model.call(lambda: rewrite(texts, **options), request.state.client, model.settings.exact)
        results: list[dict[str, Any]] = [{"text": one.text, "notes": one.notes} for one in found]
        for one, result in zip(found, results, strict=True):
            if task == "correction":
                result["edits"] = [edit._asdict() for edit in one.edits]
            elif body.top is not None:
                result["alternatives"] = [other.text for other in one.candidates[1:]]
        return json_response({"model": model.name, "task": task, "results": results})


async def _classify(model: ServedModel, body: TaskRequest, limits: Limits) -> list[Any]:
    predictor = model.offering("classify_full", "classify texts")
    if any(isinstance(one, dict) for one in body.inputs):
        raise ApiError("inputs: expected texts or pairs of texts, found an object", param="inputs")
    inputs = [one if isinstance(one, str) else tuple(one) for one in body.inputs]
    flat = [text for one in inputs for text in ([one] if isinstance(one, str) else one)]
    await count_tokens(predictor, flat, limits.model_copy(update={"texts": 2 * limits.texts}), "inputs")
    found = await model.compute("classify", inputs, predictor.classify_full)
    several = [{"labels": one.labels} if predictor.several else {} for one in found]
    scores = [dict(list(one.scores.items())[: body.top]) for one in found]
    return [
        {"label": one.label, **more, "scores": some} for one, more, some in zip(found, several, scores, strict=True)
    ]


async def _fill_spans(model: ServedModel, body: TaskRequest, limits: Limits, client: str) -> list[Any]:
    """Each text with its masks filled, by as many tokens as they take."""
    predictor: Any = model.predictor
    texts = body.texts()
    if body.top is not None:
        raise ApiError("top: this model fills a mask in one way; remove it", param="top")
    await count_tokens(predictor, texts, limits, "inputs")
    found = await model.call(lambda: predictor.fill(texts), client, model.settings.exact)
    return [{"text": text} for text in found]


async def _fill_mask(model: ServedModel, body: TaskRequest, limits: Limits) -> list[Any]:
    predictor = model.offering("check_masked", "fill masks")
    texts, top = body.texts(), body.top or 5
    await count_tokens(predictor, texts, limits, "inputs")
    for text in texts:
        predictor.check_masked(text)
    found = await model.compute(("fill-mask", top), texts, lambda some: predictor.fill_mask(some, top=top))
    return [[[asdict(filling) for filling in mask] for mask in one] for one in found]


async def _tag(model: ServedModel, body: TaskRequest, limits: Limits) -> list[Any]:
    predictor = model.offering("tag_full", "tag words")
    texts = body.texts()
    await count_tokens(predictor, texts, limits, "inputs", truncate=True)  # long sentences are tagged in parts
    found = await model.compute("tag", texts, predictor.tag_full)
    return [
        {
            "words": one.words,
            "tags": one.tags,
            "spans": [{"kind": span.kind, "begin": span.begin, "end": span.end} for span in one.places],
        }
        for one in found
    ]


async def _answer(model: ServedModel, body: TaskRequest, limits: Limits) -> list[Any]:
    """`inputs`: pairs of a question and a text, which may be long; `top`: answers of each."""
    predictor = model.offering("answer_full", "answer questions")
    pairs, top = body.pairs(), body.top or 1
    await count_tokens(predictor, [q for q, _ in pairs], limits, "inputs", least=1)
    await count_tokens(predictor, [text for _, text in pairs], limits, "inputs", truncate=True, least=1)
    found = await model.compute(("answer", top), pairs, lambda some: predictor.answer_full(some, top=top))
    answers = [[asdict(answer) for answer in one.answers] for one in found]
    return [some[0] | ({"alternatives": some[1:]} if top > 1 else {}) for some in answers]


async def _similarity(model: ServedModel, body: TaskRequest, limits: Limits) -> list[Any]:
    from torch.nn.functional import cosine_similarity

    texts = [text for pair in body.pairs() for text in pair]
    await count_tokens(model.embedder, texts, limits.model_copy(update={"texts": 2 * limits.texts}), "inputs")
    vectors = await embed(model, texts)
    return [float(cosine_similarity(a, b, dim=0)) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]


async def _search(model: ServedModel, body: TaskRequest, limits: Limits) -> list[Any]:
    """`top` texts of the index in the model's folder, the best first; with `rerank`, the candidates for it."""
    predictor, queries = model.offering("search", "search texts"), body.texts()
    top = body.top or FOUND
    top = top if body.rerank is None else max(top, RERANKED)
    await count_tokens(predictor, queries, limits, "inputs", least=1)
    found = await model.compute(("search", top), queries, lambda some: predictor.search(some, top))
    return [[asdict(one) for one in own] for own in found]


async def _ranked_anew(reranker: ServedModel, body: TaskRequest, results: list[Any]) -> list[Any]:
    for query, found in zip(body.texts(), results, strict=True):
        scores = await relevance(reranker, query, [one["text"] for one in found])
        for one, score in zip(found, scores, strict=True):
            one["score"] = score
        found.sort(key=lambda one: -one["score"])
        del found[body.top or FOUND :]
    return results


async def _score(model: ServedModel, body: TaskRequest, limits: Limits) -> list[Any]:
    """Rewards in the order of the pairs; only differences between answers to one prompt mean something."""
    predictor, pairs = model.offering("score", "score answers"), body.pairs()
    flat = [text for pair in pairs for text in pair]
    await count_tokens(predictor, flat, limits.model_copy(update={"texts": 2 * limits.texts}), "inputs")
    found = await model.compute("score", pairs, lambda some: predictor.score(*map(list, zip(*some, strict=True))))
    return [{"score": one} for one in found]


async def _predict_click(model: ServedModel, body: TaskRequest, limits: Limits) -> list[Any]:
    """Probabilities in the order of the rows."""
    predictor, rows = model.offering("predict_click", "predict clicks"), body.rows()
    for number, row in enumerate(rows):
        predictor.read_row(row, number)
    found = await model.compute("click", rows, predictor.predict_click)
    return [{"probability": one} for one in found]


async def _classify_image(model: ServedModel, body: TaskRequest, limits: Limits) -> list[Any]:
    predictor = model.offering("classify_image_full", "classify images")
    images, top = await _images(body, limits), body.top or 5
    found = await model.compute(
        ("classify-image", top), images, lambda some: predictor.classify_image_full(some, top=top)
    )
    return [{"label": one.label, "scores": one.scores} for one in found]


async def _caption(model: ServedModel, body: TaskRequest, limits: Limits) -> list[Any]:
    predictor = model.offering("caption_full", "describe images")
    images = await _images(body, limits)
    found = await model.compute("caption", images, predictor.caption_full)
    return [{"text": one.text, "score": one.score} for one in found]


async def _match_image(model: ServedModel, body: TaskRequest, limits: Limits) -> list[Any]:
    predictor = model.offering("match_image_full", "match images and texts")
    labels = tuple(body.labels or ())
    if not labels:
        raise ApiError("labels: the texts to choose from are missing", param="labels")
    await count_tokens(predictor, labels, limits, "labels")
    images = await _images(body, limits)
    found = await model.compute(
        ("match-image", labels), images, lambda some: predictor.match_image_full(some, list(labels))
    )
    return [{"label": one.text, "scores": one.scores, "cosines": one.cosines} for one in found]


async def _classify_audio(model: ServedModel, body: TaskRequest, limits: Limits) -> list[Any]:
    predictor = model.offering("classify_audio_full", "classify sounds")
    sounds, top = await _sounds(body, limits), body.top or 5
    found = await model.compute(
        ("classify-audio", top), sounds, lambda some: predictor.classify_audio_full(some, top=top)
    )
    return [{"label": one.label, "scores": one.scores} for one in found]


async def _transcribe(model: ServedModel, body: TaskRequest, limits: Limits) -> list[Any]:
    predictor = model.offering("transcribe_full", "transcribe speech")
    if body.top is not None:
        raise ApiError("top: a sound has one transcript; remove it", param="top")
    found = await model.compute("transcription", await _sounds(body, limits), predictor.transcribe_full)
    return [
        {"text": one.text, "segments": [asdict(segment) for segment in one.segments], "notes": one.notes}
        for one in found
    ]


async def _sounds(body: TaskRequest, limits: Limits) -> list[Any]:
    """Samples at 16 kHz of sound files in base64."""
    from allyouneed.data.media.sound_files import read_sound

    def read(text: str) -> Any:
        try:
            return read_sound(_content(text, "a sound", "inputs"), longest=limits.upload_seconds)
        except UserError as error:
            raise ApiError(f"inputs: {error}", param="inputs") from None

    texts = body.texts()
    return await asyncio.to_thread(lambda: [read(text) for text in texts])


async def _images(body: TaskRequest, limits: Limits) -> list[Any]:
    texts = body.texts()
    return await asyncio.to_thread(lambda: [read_image(text, limits) for text in texts])


def _content(text: str, what: str, param: str) -> bytes:
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(f"{param}: {what} must be base64 (URLs and paths are not opened)", param=param) from None


def read_image(text: str, limits: Limits, param: str = "inputs") -> Any:
    """An image from base64, or from a data: URL. Other URLs and paths are not opened."""
    raw = _content(text, "an image", param)
    try:
        from PIL import Image
    except ImportError:
        raise ApiError("this server cannot read images; install allyouneed[image]", 501) from None
    try:
        image = Image.open(io.BytesIO(raw), formats=("PNG", "JPEG", "WEBP", "BMP", "GIF"))
        if (pixels := image.width * image.height) > limits.image_pixels:
            raise over_limit("pixels", pixels, limits.image_pixels, param)
        return image.convert("RGB")
    except ApiError:
        raise
    except Exception:
        raise ApiError(f"{param}: not an image that can be read (PNG, JPEG, WebP, BMP, GIF)", param=param) from None


RUNNERS = {
    "classification": _classify,
    "fill-mask": _fill_mask,
    "tagging": _tag,
    "similarity": _similarity,
    "search": _search,
    "question-answering": _answer,
    "click": _predict_click,
    "preference": _score,
    "image-classification": _classify_image,
    "image-text": _match_image,
    "captioning": _caption,
    "audio-classification": _classify_audio,
    "transcription": _transcribe,
}
