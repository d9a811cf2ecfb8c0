"""The view "use": a model does its task, and shows how: what it read, its answer, alternatives for each word, the beam
search, the word alignment. The view "next": what may follow a part of an answer, and what sampling leaves of it.

Generating models answer through their engine, exactly as `translate_full`, `generate_full`, … do; the page shows what
the engine was asked and what it found (infer/decoding/observe.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch.nn.functional import normalize

from allyouneed.apps.inspect.views import view
from allyouneed.apps.inspect.views.answers import answer_part, choices, cut
from allyouneed.apps.inspect.views.document import Document, document, tensor
from allyouneed.apps.inspect.views.input import InputRequest
from allyouneed.apps.inspect.views.model import Text, ViewModel
from allyouneed.config import tree_of
from allyouneed.errors import UserError, quote
from allyouneed.infer.decoding.observe import DecodedRequest, Observer, observe_decoding
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import Predictor
from allyouneed.infer.predictors.generating import GeneratingPredictor
from allyouneed.infer.predictors.generator import Generator
from allyouneed.infer.predictors.registry import translates
from allyouneed.infer.predictors.rewriting.fill_spans import SpanFiller
from allyouneed.runtime.process import ignore_warnings

MOST_TOKENS = 2048  # of a text
MOST_WORDS = 32  # of a sentence, whose alternatives are in an offline file
MOST_PARTS = 16  # sentences whose words are all shown
NEW_TOKENS = 60  # of a continuation, by default
FLAGS = ("method", "beam", "length_penalty", "temperature", "top_k", "top_p", "min_p", "seed")

Token = Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]
Tokens = Annotated[list[Token], Field(max_length=MOST_TOKENS)]


class DecodingRequest(InputRequest):
    """An input and how its answer is decoded; what is left out is as the model folder says. `target`: text that the
    answer begins with; `prefix`: the same as tokens, of the answer to request number `part` of the engine (a text of
    several sentences makes several)."""

    method: Literal["beam", "greedy", "sample"] | None = None
    beam: Annotated[int, Field(ge=1, le=16)] | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    temperature: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(gt=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 53)] | None = None
    tokens: Annotated[int, Field(gt=0, le=512, description="most new tokens of a continuation")] | None = None
    prefix: Tokens | None = None
    part: Annotated[int, Field(ge=0, lt=1024)] = 0

    def options(self, predictor: Predictor) -> dict[str, Any]:
        """Decoding options that differ from the folder's."""
        given = {name: value for name in FLAGS if (value := getattr(self, name)) is not None}
        options = Decoding.merge({}, given)
        if options.get("method") in ("greedy", "sample"):  # as the server's /v1/completions, which streams it
            options["loops"] = None
        if isinstance(predictor, Generator):
            options["max_length"] = self.tokens or NEW_TOKENS
        return options

    def prefixes(self, predictor: Predictor) -> dict[int, list[int]]:
        target = predictor.folder.tokenizers.target
        if self.prefix is not None and self.target is not None:
            raise UserError("target and prefix are exclusive; remove one")
        if self.prefix and max(self.prefix) >= target.size:
            raise UserError(f"prefix: token {max(self.prefix)} is outside the vocabulary of {target.size}")
        tokens = self.prefix if self.target is None else target.encode(self.target)
        return {self.part: list(tokens)} if tokens else {}


class UseRequest(DecodingRequest):
    """`top`: alternatives of each token, classes, fillings. `other`: the second text of a pair. `labels`: texts to
    choose from for an image. Lines of the text are embedded one by one."""

    top: Annotated[int, Field(ge=1, le=50)] = 6
    other: Text | None = None
    labels: Annotated[list[Text], Field(max_length=64)] | None = None


class NextRequest(DecodingRequest):
    """What follows `prefix`, the first tokens of an answer. `top`: words; 0: only the cut."""

    top: Annotated[int, Field(ge=0, le=50)] = 8


# --- what clicks lead to --------------------------------------------------------------------------------------------


def follow_words(sent: Document) -> Iterator[tuple[str, Document]]:
    """What could stand in the place of each word, and after the last."""
    for part in sent["data"].get("parts", ()):
        ids = [token["id"] for token in part["tokens"]]
        for begin in [*(word[0] for word in part["words"][:MOST_WORDS]), len(ids)]:
            yield "next", {"prefix": ids[:begin], "part": part["number"], "target": None}


def follow_choices(sent: Document) -> Iterator[tuple[str, Document]]:
    """The answers that go on with another word."""
    data, part = sent["data"], sent["request"].get("part", 0)
    drawn = data["cut"]["drawn"]
    taken = [one["ids"] for one in data["choices"] if one.get("ids")] + ([] if drawn["end"] else [[drawn["id"]]])
    for ids in taken:
        yield "use", {"prefix": [*data["prefix"], *ids], "part": part, "target": None}


# --- views ----------------------------------------------------------------------------------------------------------


@view("use", UseRequest, follow=follow_words)
def use(model: ViewModel, request: UseRequest) -> Document:
    predictor = model.predictor
    if isinstance(predictor, GeneratingPredictor):
        data = _generate(predictor, request)
    else:
        data = model.compute(lambda: _predict(predictor, request))
    return document("use", model, request, python_line(model, request), data | {"about": about(predictor)})


@view("next", NextRequest, follow=follow_choices)
def next_word(model: ViewModel, request: NextRequest) -> Document:
    """`choices`: the likeliest next words; `cut`: of the distribution of the next token, by the sampling options."""
    predictor = model.predictor
    seen = model.decoded.get(request.input_key(), lambda: engine_requests(predictor, request))
    if request.part >= len(seen):
        raise UserError(f"part {request.part}: the text has {len(seen)}")
    decoded, target = seen[request.part], predictor.folder.tokenizers.target
    prefix = request.prefixes(predictor).get(request.part, [])
    sampling = {name: value for name in FLAGS[3:] if (value := getattr(request, name)) is not None}
    decoding = Decoding.of(decoded_defaults(predictor), **{"method": "sample", **sampling})
    data = {
        "prefix": prefix,
        "text": target.decode(prefix),
        "choices": choices(decoded, prefix, target, request.top) if request.top else [],
        "cut": cut(decoded, prefix, decoding, target),
        "decoding": tree_of(decoding),
    }
    return document("next", model, request, python_line(model, request), data)


def engine_requests(predictor: Predictor, request: DecodingRequest) -> list[DecodedRequest]:
    """What the engine is asked for this input: one token shows it."""
    if not isinstance(predictor, GeneratingPredictor):
        raise UserError(f"this model ({predictor.folder.task['kind']}) generates no text")
    options = {"method": "greedy", "loops": None, "max_length": 1}
    return observed(predictor, request.model_copy(update={"target": None}), options, {})[1].decoded


def decoded_defaults(predictor: Predictor) -> dict[str, Any]:
    return Decoding.merge(predictor.folder.decoding, {"method": "sample", "best": 1, "loops": None})


# --- generating models ----------------------------------------------------------------------------------------------


def _generate(predictor: GeneratingPredictor, request: UseRequest) -> Document:
    answer, seen = observed(predictor, request, request.options(predictor), request.prefixes(predictor))
    if request.part and request.part >= len(seen.decoded):
        raise UserError(f"part {request.part}: the text has {len(seen.decoded)}")
    source, target = predictor.folder.tokenizers.source, predictor.folder.tokenizers.target
    asked = [(number, one) for number, one in enumerate(seen.decoded) if one.hypotheses[0].log_probs]  # not empty ones
    return answer | {
        "shows": "text",
        "parts": [{"number": n} | answer_part(one, source, target, request.top) for n, one in asked[:MOST_PARTS]],
        "left_out": max(0, len(asked) - MOST_PARTS),
        "decoding": tree_of(asked[0][1].spec.decoding) if asked else None,
    }


def observed(
    predictor: GeneratingPredictor, request: DecodingRequest, options: dict[str, Any], prefixes: dict[int, list[int]]
) -> tuple[Document, Observer]:
    text = check_length(predictor, request.text)
    with observe_decoding(prefixes) as seen:
        return _ask(predictor, request, text, options), seen


def _ask(predictor: Any, request: DecodingRequest, text: str, options: dict[str, Any]) -> Document:
    if translates(predictor.folder.task["kind"]):
        (one,) = predictor.translate_full([text], request.to, from_=request.source, words=True, **options)
        words = None if one.words is None else [asdict(word) for word in one.words]
        return {
            "answer": one.text,
            "notes": one.notes,
            "route": one.route,
            "skipped": one.skipped,
            "confidence": one.confidence,
            "word_confidence": words,
        }
    if request.to is not None or request.source is not None:
        raise UserError("to, source: only for a translator")
    if isinstance(predictor, Generator):
        (made,) = predictor.generate_full([text], **options)
        return {"answer": made.text, "notes": made.notes}
    if isinstance(predictor, SpanFiller):
        return {"answer": predictor.fill(text, **options), "notes": []}
    (rewritten,) = predictor.seq2seq_full([text], **options)
    return {"answer": rewritten.text, "notes": rewritten.notes}


def check_length(predictor: Predictor, text: str | None) -> str:
    """A translator splits long texts, so it may be longer than the model reads at once."""
    if text is None or not text.strip():
        raise UserError("the text is empty" if text is not None else "this model reads a text; set `text`")
    if len(text) > 16 * MOST_TOKENS or len(predictor.folder.tokenizers.source.encode(text)) > MOST_TOKENS:
        raise UserError(f"the text has more than {MOST_TOKENS:,} tokens; shorten it to look at it")
    return text


# --- other models ---------------------------------------------------------------------------------------------------


def _predict(predictor: Any, request: UseRequest) -> Document:
    task, top = str(predictor.folder.task["kind"]), request.top
    with ignore_warnings():  # the notes say what was truncated
        return {"notes": []} | _PREDICT[task](predictor, request, top)


def _fill(predictor: Any, request: UseRequest, top: int) -> Document:
    text = check_length(predictor, request.text)
    masks = [[asdict(one) for one in mask] for mask in predictor.fill_mask(text, top=top)]
    return {"shows": "fillings", "masks": masks, "answer": masks[0][0]["text"]}


def _classify(predictor: Any, request: UseRequest, top: int) -> Document:
    text = check_length(predictor, request.text)
    given = text if request.other is None else (text, check_length(predictor, request.other))
    (found,) = predictor.classify_full([given])
    return {"shows": "classes", "answer": found.label, "scores": list(found.scores.items()), "notes": found.notes}


def _answer(predictor: Any, request: UseRequest, top: int) -> Document:
    """The text is a question, and the other text, or the lines after the first, what it is about."""
    question, _, lines = check_length(predictor, request.text).partition("\n")
    context = check_length(predictor, request.other or lines or question)
    (found,) = predictor.answer_full([(question, context)], top=top)
    shares = torch.tensor([one.score for one in found.answers]).softmax(0).tolist()
    scores = [(one.text or "(no answer)", share) for one, share in zip(found.answers, shares, strict=True)]
    return {"shows": "classes", "answer": found.text, "scores": scores, "notes": found.notes}


def _tag(predictor: Any, request: UseRequest, top: int) -> Document:
    (found,) = predictor.tag_full([check_length(predictor, request.text)])
    spans = [{"kind": one.kind, "begin": one.begin, "end": one.end} for one in found.places]
    answer = " ".join(f"{word}/{tag}" for word, tag in zip(found.words, found.tags, strict=True))
    return {"shows": "tags", "words": found.words, "tags": found.tags, "spans": spans, "answer": answer}


def _embed(predictor: Any, request: UseRequest, top: int) -> Document:
    """Vectors of the lines, and their cosine similarity."""
    lines = [line for line in check_length(predictor, request.text).splitlines() if line.strip()]
    if len(lines) > 64:
        raise UserError(f"{len(lines)} lines; at most 64 are compared")
    room = predictor.max_input - predictor.tokenizer.template.count()
    sizes = [len(ids) for ids in predictor.tokenizer.encode_batch(lines)]
    notes = [f"{quote(line)}: {size} tokens, truncated to {room}" for line, size in zip(lines, sizes, strict=True)]
    vectors = predictor.embed(lines)
    unit = normalize(vectors.float(), dim=-1)
    answer = ", ".join(f"{value:.4f}" for value in vectors[0, :8].tolist())
    return {
        "shows": "vectors",
        "lines": lines,
        "vectors": tensor(vectors),
        "cosines": tensor(unit @ unit.T),
        "notes": [note for note, size in zip(notes, sizes, strict=True) if size > room],
        "answer": f"[{answer}, …]",
    }


def _transcribe(predictor: Any, request: UseRequest, top: int) -> Document:
    options = {} if request.beam is None else {"beam": request.beam}
    (found,) = predictor.transcribe_full([request.read(predictor)], request.source, timestamps=True, **options)
    segments = [asdict(one) for one in found.segments]
    return {
        "shows": "transcript",
        "answer": found.text,
        "segments": segments,
        "seconds": found.seconds,
        "language": found.language,
        "notes": found.notes,
    }


def _classify_image(predictor: Any, request: UseRequest, top: int) -> Document:
    (found,) = predictor.classify_image_full([_image(request, predictor)], top=top)
    return {"shows": "classes", "answer": found.label, "scores": list(found.scores.items())}


def _classify_audio(predictor: Any, request: UseRequest, top: int) -> Document:
    if request.sound is None:
        raise UserError("this model reads a sound; set `sound`")
    (found,) = predictor.classify_audio_full([request.read(predictor)], top=top)
    return {"shows": "classes", "answer": found.label, "scores": list(found.scores.items())}


def _caption(predictor: Any, request: UseRequest, top: int) -> Document:
    (found,) = predictor.caption_full([_image(request, predictor)])
    return {"shows": "classes", "answer": found.text, "scores": [(found.text, math.exp(found.score))]}


def _match_image(predictor: Any, request: UseRequest, top: int) -> Document:
    labels = request.labels or [line for line in (request.text or "").splitlines() if line.strip()]
    if not labels:
        raise UserError("labels: the texts to choose from are missing")
    image = InputRequest(image=request.image).read(predictor)
    (found,) = predictor.match_image_full([image], labels)
    return {"shows": "classes", "answer": found.text, "scores": list(found.scores.items())}


def _click(predictor: Any, request: UseRequest, top: int) -> Document:
    """The text is a row of the log, as JSON."""
    try:
        row = json.loads(request.text or "")
    except ValueError:
        columns = ", ".join(predictor.log.input_columns)
        raise UserError(f"this model reads a row of a log, as a JSON object (columns: {columns})") from None
    chance = predictor.predict_click([row])[0]
    return {"shows": "classes", "answer": f"{chance:.4f}", "scores": [("click", chance), ("no click", 1 - chance)]}


def _image(request: UseRequest, predictor: Any) -> Any:
    if request.image is None:
        raise UserError("this model reads an image; set `image`")
    return request.read(predictor)


_PREDICT = {
    "masked-lm": _fill,
    "translation-lm": _fill,
    "permutation-lm": _fill,
    "classification": _classify,
    "question-answering": _answer,
    "tagging": _tag,
    "replaced-token": _tag,
    "reranking": _classify,
    "similarity": _embed,
    "contrastive": _embed,
    "transcription": _transcribe,
    "audio-classification": _classify_audio,
    "image-classification": _classify_image,
    "image-text": _match_image,
    "captioning": _caption,
    "click": _click,
}
_METHODS = {
    "translation": "translate",
    "causal-lm": "generate",
    "prefix-lm": "generate",
    "interleaved": "generate",
    "seq2seq": "seq2seq",
    "summarisation": "summarise",
    "correction": "correct",
    "span-corruption": "fill",
    "denoising": "fill",
    "masked-lm": "fill_mask",
    "translation-lm": "fill_mask",
    "permutation-lm": "fill_mask",
    "classification": "classify",
    "question-answering": "answer",
    "tagging": "tag",
    "replaced-token": "tag",
    "reranking": "classify",
    "similarity": "embed",
    "contrastive": "embed",
    "transcription": "transcribe",
    "audio-classification": "classify_audio",
    "image-classification": "classify_image",
    "image-text": "match_image",
    "captioning": "caption",
    "click": "predict_click",
}


# --- facts ----------------------------------------------------------------------------------------------------------


def about(predictor: Any) -> Document:
    """What the form of the page needs to know of a model."""
    task = str(predictor.folder.task["kind"])
    generates = isinstance(predictor, GeneratingPredictor)
    reads = {
        "transcription": "sound",
        "audio-classification": "sound",
        "image-classification": "image",
        "image-text": "image and texts",
    }
    found: Document = {"task": task, "reads": reads.get(task, "text"), "generates": generates}
    if translates(task):
        known = predictor.routes.detector
        found |= {
            "targets": predictor.written_languages,
            "sources": [] if known is None else list(known.languages),
            "detects": known is not None,
        }
    if generates:
        found["defaults"] = tree_of(Decoding.of(predictor.folder.decoding))
    return found


def python_line(model: ViewModel, request: DecodingRequest) -> str:
    """The call that gives the same answer; `model` is the loaded one."""
    predictor = model.predictor
    task = str(predictor.folder.task["kind"])
    given = [repr(other)] if (task == "question-answering" and (other := getattr(request, "other", None))) else []
    if request.to is not None:
        given.append(repr(request.to))
    if request.source is not None:
        given.append(f"from_={request.source!r}")
    if isinstance(predictor, GeneratingPredictor):
        given += [f"{name}={value!r}" for name, value in request.options(predictor).items()]
    what = repr(request.text) if request.text is not None else "…"
    what = f"json.loads({what})" if task == "click" else what
    line = f"model.{_METHODS[task]}({', '.join([what, *given])})"
    prefixes = request.prefixes(predictor) if isinstance(predictor, GeneratingPredictor) else {}
    return f"with observe_decoding({prefixes!r}): {line}  # allyouneed.infer.decoding.observe" if prefixes else line
