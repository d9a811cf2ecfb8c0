"""Translations that must contain given phrases: terms of a glossary that a model was not trained to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from allyouneed.apps.translate.glossary import LETTERS, count_term
from allyouneed.data.languages import EAST_ASIAN
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.phrases import ForcedPhrases, Phrase
from allyouneed.infer.engine import Engine
from allyouneed.infer.frames import Frame
from allyouneed.infer.request import Request


def force_phrases(
    engine: Engine,
    frame: Frame,
    vocabularies: Vocabularies,
    sources: Sequence[Sequence[int]],
    decoding: Decoding,
    keys: Sequence[tuple[int, ...]],
    phrases: Sequence[Mapping[str, int]],
) -> list[list[Hypothesis]]:
    """`generate_targets`, with each target containing its phrases, as often as given."""
    decoding = frame.without_forced(decoding).model_copy(update={"shortlist": False})  # a phrase may have any token
    spec, given = engine.runner.spec(decoding, len(frame.forced)), list[tuple[Request, DecodingSpec]]()
    for source, key, some in zip(sources, keys, phrases, strict=True):
        request = Request(frame.begin, decoding.limit(len(source)), key, source)
        given.append((request, phrase_spec(spec, vocabularies.target, request.limit, some)))
    return engine.decode_each(given)


def phrase_spec(spec: DecodingSpec, target: Tokenizer, limit: int, phrases: Mapping[str, int]) -> DecodingSpec:
    """The same specification for a request of at most `limit` tokens whose hypotheses contain these phrases."""
    given = [_phrase(target, text, times) for text, times in phrases.items()]
    forced = ForcedPhrases(given, sorted(spec.eos_ids), limit, target.decode, word_continuations(target))
    return replace(spec, logits_processor=forced)


def _phrase(tokenizer: Tokenizer, text: str, times: int) -> Phrase:
    space = "" if EAST_ASIAN.match(text) else " "
    inside, alone = (tuple(tokenizer.encode(form)) for form in (space + text, text))
    return Phrase(inside, alone, times, partial(count_term, text), LETTERS.match(text[-1]) is not None)


@lru_cache(maxsize=4)
def word_continuations(tokenizer: Tokenizer) -> Tensor:
    """(vocab,) bool: tokens that begin with a letter, without a space before it."""
    texts = (tokenizer.decode([number]) for number in range(tokenizer.size))
    return torch.tensor([LETTERS.match(text) is not None for text in texts])
