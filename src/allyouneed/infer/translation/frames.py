"""Special tokens around the source and at the start of the target, and decoding of framed sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.phrases import ForcedPhrases, Phrase
from allyouneed.infer.decoding.repetition import has_repeats
from allyouneed.infer.engine import Engine
from allyouneed.infer.inside.reading import Reading, next_tokens, output_name, tokens_of
from allyouneed.infer.request import Request
from allyouneed.infer.translation.glossary import LETTERS, count_term
from allyouneed.infer.translation.sentences import EAST_ASIAN
from allyouneed.nn.batch import Batch, Rows

E = TypeVar("E", bound=Engine)


@dataclass(frozen=True)
class Frame:
    """Tokens before and after a source, and at the start of its target: `opening` is the prompt, `forced` tokens follow
    it and count as generated."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    opening: tuple[int, ...]
    forced: tuple[int, ...] = ()

    @property
    def marks(self) -> int:
        """Special tokens added to a source."""
        return len(self.before) + len(self.after)

    def source(self, ids: Sequence[int]) -> list[int]:
        return [*self.before, *ids, *self.after]

    @property
    def begin(self) -> list[int]:
        return [*self.opening, *self.forced]

    def without_forced(self, decoding: Decoding) -> Decoding:
        """The options for what follows the forced tokens."""
        if not self.forced or decoding.max_length is None:
            return decoding
        return decoding.model_copy(update={"max_length": max(1, decoding.max_length - len(self.forced))})


def default_frame(vocabularies: Vocabularies) -> Frame:
    """For a model without language tokens."""
    target = vocabularies.target
    return Frame(*vocabularies.source.source_affixes, target.opening, target.template.forced)


def forbidden_tokens(target: Tokenizer) -> list[int]:
    """Tokens that must not be generated: special tokens, or what an imported model's config lists."""
    if target.foreign:
        return list(target.template.never)
    return [target.pad, target.bos, *target.languages.values()]


def sequence_engine(model: Any, vocabularies: Vocabularies, limit: int | None, kind: type[E] = Engine) -> E:  # type: ignore[assignment]
    """The engine of a model that reads a source and generates a target."""
    source, target = vocabularies.source, vocabularies.target
    template = target.template
    return kind(
        model,
        target.opening[0] if target.opening else target.bos,
        target.eos,
        source.pad,
        forbidden_tokens(target),
        limit,
        ends=template.stops,
        ended=template.ended,
    )


def draft_engine(predictor: Any) -> Engine:
    """The engine of a predictor that drafts for another model (speculative decoding)."""
    both = predictor.folder.tokenizers

    def build() -> Engine:
        return Engine(predictor.model, both.target.bos, both.target.eos, both.source.pad, limit=predictor.limit)

    engine: Engine = predictor.cached_engine("draft", build)
    return engine


def generate_targets(
    engine: Engine, frame: Frame, sources: Sequence[Sequence[int]], decoding: Decoding, **options: Any
) -> list[list[Hypothesis]]:
    """The hypotheses of each framed source, best first, without the forced tokens. A source that repeats itself is
    decoded without loop detection, since its target may repeat as well."""
    forced, decoding = len(frame.forced), frame.without_forced(decoding)
    per_source: dict[str, Any] = {
        "prompts": [frame.begin] * len(sources),
        "sample_keys": [(number,) for number in range(len(sources))],
        "counted": forced,
    } | options
    repetitive = [decoding.loops is not None and has_repeats(source, decoding.loops) for source in sources]
    if not any(repetitive):
        return engine.generate(sources, decoding, **per_source)
    found: dict[int, list[Hypothesis]] = {}
    for repeats, settings in ((False, decoding), (True, decoding.model_copy(update={"loops": None}))):
        numbers = [number for number, one in enumerate(repetitive) if one == repeats]
        own = {name: [per_source[name][number] for number in numbers] for name in ("prompts", "sample_keys")}
        found |= zip(numbers, engine.generate([sources[n] for n in numbers], settings, **per_source | own), strict=True)
    return [found[number] for number in range(len(sources))]


def force_phrases(
    engine: Engine,
    frame: Frame,
    vocabularies: Vocabularies,
    sources: Sequence[Sequence[int]],
    decoding: Decoding,
    keys: Sequence[tuple[int, ...]],
    phrases: Sequence[Mapping[str, int]],
) -> list[list[Hypothesis]]:
    """As `generate_targets`, but each target contains its phrases, as often as given."""
    target, found, decoding = vocabularies.target, [], frame.without_forced(decoding)
    spec = engine.spec(decoding, len(frame.forced))
    for source, key, some in zip(sources, keys, phrases, strict=True):
        given = [_phrase(target, text, times) for text, times in some.items()]
        limit, eos = decoding.limit(len(source)), sorted(spec.eos_ids)
        forced = ForcedPhrases(given, eos, limit, target.decode, word_continuations(target))
        request = Request(frame.begin, limit, key, source)
        found += engine.decode([request], replace(spec, logits_processor=forced))
    return found


def _phrase(tokenizer: Tokenizer, text: str, times: int) -> Phrase:
    space = "" if EAST_ASIAN.match(text) else " "
    inside, alone = (tuple(tokenizer.encode(form)) for form in (space + text, text))
    return Phrase(inside, alone, times, partial(count_term, text), LETTERS.match(text[-1]) is not None)


@lru_cache(maxsize=4)
def word_continuations(tokenizer: Tokenizer) -> Tensor:
    """(vocab,) bool: tokens that begin with a letter, without a space before it."""
    texts = (tokenizer.decode([number]) for number in range(tokenizer.size))
    return torch.tensor([LETTERS.match(text) is not None for text in texts])


def read_pair(
    engine: Engine, folder: Any, frame: Frame, source: Sequence[int], target: Any, options: Mapping[str, Any]
) -> Reading:
    """A source and its target, given as text or decoded greedily, as the model reads them (`Predictor.inside`)."""
    vocabularies, config = folder.tokenizers, engine.model.config
    limit = getattr(config, "source_limit", config.limit)
    if limit is not None and len(source) > limit:
        raise UserError(f"{len(source)} tokens with special tokens, more than the model's {limit}; shorten the text")
    if target is None:
        decoding = Decoding.of(folder.decoding, **({"method": "greedy"} | dict(options)))
        best = generate_targets(engine, frame, [list(source)], decoding)[0][0]
        answer = [*best.tokens, *([vocabularies.target.eos] if best.finished else [])]
    elif not isinstance(target, str):
        raise UserError(f"target: expected a text, got {type(target).__name__}")
    else:
        answer = [*vocabularies.target.encode(target), vocabularies.target.eos]
    begin = frame.begin
    inputs = [*begin, *answer[:-1]]
    batch = Batch(Rows.of([inputs]), Rows.of([list(source)])).to(engine.device)
    tokens = {
        "encoder": tokens_of(vocabularies.source, source),
        "decoder": tokens_of(vocabularies.target, inputs),
    }
    answers = next_tokens(inputs, answer[-1] if answer else None, len(begin))
    never, ends = tuple(engine.forbidden), (engine.eos, *engine.ends)
    name = output_name(vocabularies.target)
    return Reading(batch, tokens, answers, given=len(begin), name=name, never=never, ends=ends)
