"""Texts of forward-pass requests: counted and measured before they are computed, so that nothing is cut silently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from allyouneed.apps.serve.bodies import off_loop
from allyouneed.apps.serve.errors import ApiError, over_limit, too_long
from allyouneed.apps.serve.settings import Limits
from allyouneed.infer.predictors.registry import embeds

if TYPE_CHECKING:
    from allyouneed.apps.serve.engine.registry import ModelRegistry
    from allyouneed.apps.serve.engine.served_model import ServedModel
    from allyouneed.infer.predictors.base import Predictor

CROSS_ENCODERS = ("classification", "reranking")  # read query and text together


async def embedding_model(registry: ModelRegistry, name: str | None) -> str | None:
    """The model of this name; else the default model if it was made to embed, else the first one that was, else the
    default model."""
    found = [] if name is not None else await registry.suiting(embeds)
    return found[0].name if found else name


async def ranking_model(registry: ModelRegistry, name: str | None) -> str | None:
    """The same for ranking texts, which classifiers of pairs do as well."""
    task = (await registry.facts(registry.find(name)))["task"]
    return name if task in CROSS_ENCODERS else await embedding_model(registry, name)


async def count_tokens(
    predictor: Predictor, texts: Sequence[str], limits: Limits, param: str, truncate: bool = False, least: int = 0
) -> list[int]:
    """The number of tokens of each text. Too many texts, and too long ones unless `truncate`, are refused. `least`: the
    fewest characters of a text."""
    if len(texts) > limits.texts:
        raise over_limit("texts", len(texts), limits.texts, param)
    if short := next((text for text in texts if len(text) < least), None):
        raise ApiError(f"{short!r}: a text must have at least {least} characters", param=param)
    if (size := sum(map(len, texts))) > limits.prompt_characters * 4:
        raise over_limit("characters", size, limits.prompt_characters * 4, param)
    tokenizer = predictor.tokenizer

    def count() -> list[int]:
        return [len(ids) for ids in tokenizer.encode_batch(list(texts))]

    counts = await off_loop(size, count)
    marks = tokenizer.template.count()
    longest = max(counts, default=0) + marks
    if longest > predictor.max_input and not truncate:
        raise too_long(longest, predictor.max_input, "a text", param)
    return [min(number + marks, predictor.max_input) for number in counts]


async def embed(model: ServedModel, texts: Sequence[str], raw: bool = False) -> list[Any]:
    """One vector (a tensor) per text. `raw`: not scaled to length 1, even if the model does that."""
    embedder = model.embedder
    return await model.compute(("embed", raw), texts, lambda some: list(embedder.embed(some, raw)))


def ranker(model: ServedModel) -> Predictor:
    """Who ranks texts: the model itself if it is a cross-encoder, else as an embedder."""
    return model.predictor if model.task in CROSS_ENCODERS else model.embedder


async def relevance(model: ServedModel, query: str, texts: Sequence[str]) -> list[float]:
    """How well each text answers a query: the probability of a classifier of pairs (a cross-encoder), or the cosine
    similarity of embeddings."""
    if model.task in CROSS_ENCODERS:
        classifier = model.predictor
        found = await model.compute("classify", [(query, text) for text in texts], classifier.classify_full)  # type: ignore[attr-defined]
        best = classifier.labels[-1]  # type: ignore[attr-defined]
        return [one.scores[best] for one in found]
    from torch.nn.functional import cosine_similarity

    first, *others = await embed(model, [query, *texts])
    return [float(cosine_similarity(first, other, dim=0)) for other in others]
