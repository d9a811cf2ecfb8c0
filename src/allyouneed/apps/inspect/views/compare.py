"""The view "compare": two models and one input. The view "use" of both side by side, and where both generate text, the
log-probability that each gives to both answers, word by word."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from allyouneed.apps.inspect.views import view
from allyouneed.apps.inspect.views.document import Document, document
from allyouneed.apps.inspect.views.model import Text, ViewModel
from allyouneed.apps.inspect.views.use import DecodingRequest, UseRequest, observed, python_line, use
from allyouneed.data.languages import EAST_ASIAN
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError
from allyouneed.infer.decoding.alignment import target_spans
from allyouneed.infer.decoding.observe import DecodedRequest
from allyouneed.infer.predictors.generating import GeneratingPredictor

# a word with the punctuation before it is easier to read than apart from it; text without spaces by characters
WORD = re.compile(rf"{EAST_ASIAN.pattern}|(?:(?!{EAST_ASIAN.pattern})\S)+")


class CompareRequest(DecodingRequest):
    """`models`: the names of two served models."""

    models: Annotated[list[Text], Field(min_length=2, max_length=2)]
    top: Annotated[int, Field(ge=1, le=50)] = 6


@view("compare", CompareRequest, many=True)
def compare(models: Sequence[ViewModel], request: CompareRequest) -> Document:
    if len(models) != 2:
        raise UserError(f"expected two models, got {len(models)}")
    if request.prefix is not None:
        raise UserError("prefix: two models may have different tokens; set `target`, the text that answers begin with")
    asked = UseRequest(**request.model_dump(exclude={"models", "model"}, exclude_none=True))
    sides = [use(model, asked) for model in models]
    data = {"sides": sides, "texts": _scored(models, request, [side["data"] for side in sides])}
    line = "; ".join((python_line(models[0], asked), python_line(models[1], asked).replace("model.", "other.", 1)))
    return document("compare", models[0], request, line, data) | {"model": None}


def _scored(models: Sequence[ViewModel], request: DecodingRequest, answers: Sequence[Document]) -> list[Document]:
    """Both answers with the log-probabilities of both models; empty where a model generates no text, or where one of
    them reads the text in several parts."""
    if not all(isinstance(model.predictor, GeneratingPredictor) for model in models):
        return []
    asked = [_request(model, request) for model in models]
    if any(one is None for one in asked):
        return []
    own = [_own(answer) for answer in answers]
    scores = []
    for text in dict.fromkeys(text for text, _ in own if text):
        words = [(found.start(), found.end()) for found in WORD.finditer(text)]
        by = []
        for model, decoded, (said, tokens) in zip(models, asked, own, strict=True):
            assert decoded is not None
            target = model.predictor.folder.tokenizers.target
            by.append(_by_word(target, decoded, text, tokens if said == text else target.encode(text), words))
        scores.append({"text": text, "words": [text[begin:end] for begin, end in words], "by": by})
    return scores


def _own(answer: Document) -> tuple[str, list[int]]:
    """Text and tokens of an answer."""
    part = next(iter(answer["parts"]), None)
    return ("", []) if part is None else (part["text"].strip(), [one["id"] for one in part["tokens"]])


def _request(model: ViewModel, request: DecodingRequest) -> DecodedRequest | None:
    """What the model's engine is asked for the input; None if that is not one request."""
    predictor: Any = model.predictor
    _, seen = observed(predictor, request, {"method": "greedy", "loops": None, "max_length": 1}, {})
    return seen.decoded[0] if len(seen.decoded) == 1 else None


def _by_word(
    target: Tokenizer, decoded: DecodedRequest, text: str, tokens: Sequence[int], words: Sequence[tuple[int, int]]
) -> Document:
    """A word has the tokens that begin in it or in the space before it. `end`: of the end mark."""
    scored = decoded.log_probs([*tokens, decoded.spec.eos])  # fewer where the model has too few positions
    each, last = scored[: len(tokens)], scored[len(tokens)] if len(scored) > len(tokens) else None
    found = [0.0] * len(words)
    for (begin, end), log_prob in zip(target_spans(target, tokens), each, strict=False):
        middle = min(begin + (text[begin:end][:1].isspace()), max(end - 1, begin))
        word = next((n for n, (_, last) in enumerate(words) if middle < last), len(words) - 1)
        if words:
            found[word] += log_prob
    return {
        "log_probs": found,
        "total": sum(each),
        "end": last,
        "tokens": len(each),
        "per_character": sum(each) / max(1, len(text)),
    }
