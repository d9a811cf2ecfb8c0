"""Special tokens around the source and at the start of the target, and decoding of framed sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from allyouneed.data.languages import resolve
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.errors import UserError, near
from allyouneed.folder import Folder
from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.phrases import ForcedPhrases, Phrase
from allyouneed.infer.decoding.repetition import has_repeats
from allyouneed.infer.engine import Engine
from allyouneed.infer.inside.reading import Reading, next_tokens, output_name, tokens_of
from allyouneed.infer.request import Request
from allyouneed.infer.translation.glossary import LETTERS, count_term
from allyouneed.infer.translation.routes import Route, Routes
from allyouneed.infer.translation.scripts import ChineseScripts
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


class LanguageFrames:
    """The languages of a model by any of their names, and the special tokens of each direction."""

    def __init__(self, folder: Folder, routes: Routes) -> None:
        self.folder, self.routes, self.source = folder, routes, folder.tokenizers.source
        self.languages = sorted(self.source.languages)  # of targets; empty for a model with one target language
        self.scripts = ChineseScripts.of(self.languages, folder.detector)

    @property
    def written_languages(self) -> list[str]:
        """`languages`, and traditional Chinese where answers are converted."""
        chinese = self.scripts.simplified
        return self.languages if chinese is None else sorted([*self.languages, f"{chinese}-Hant"])

    def resolve(self, to: str | None, from_: str | None) -> tuple[str | None, str | None]:
        """The model's codes for language names in any form. Unknown ones are refused before anything is translated."""
        detector = self.routes.detector
        if to is not None and self.languages:
            to = resolve(to, self.languages, "target language", self.written_languages)
        if detector is not None:
            known = sorted({*detector.languages, *(here for here, _ in self.routes.directions if here is not None)})
            return to, None if from_ is None else resolve(from_, known, "source language")
        if from_ is not None and self.languages:
            known = sorted({*self.languages, *(here for here, _ in self.folder.directions if here is not None)})
            from_ = resolve(from_, known, "source language")
        self.frame(to, from_)
        return to, from_

    def frame(self, to: str | None, from_: str | None) -> Frame:
        """The special tokens around every source and at the start of its target, for these languages."""
        known, plain = self.languages, default_frame(self.folder.tokenizers)
        if self.source.template.language is not None:
            return self._language_frame(plain, to, from_)
        if not known:
            if to is not None or from_ is not None:
                raise UserError(f"this model has one target language; remove {to or from_!r}")
            return plain
        if to is None and len(known) > 1:
            raise UserError(f"this model has several target languages; set one: {', '.join(known)}")
        to = to or known[0]
        sources = sorted({source for source, target in self.folder.directions if source and target == to})
        if from_ is not None and from_ not in sources:
            hint = near(from_, sources)
            raise UserError(
                f"this model was not trained to translate from {from_!r} into {to!r}{hint}; from: {sources}"
            )
        return replace(plain, before=(*plain.before, self.source.language(to)))

    def last_of(self, route: Route) -> Frame:
        """Of the last direction of a route."""
        return self.frame(route.into[-1], None if self.routes.detector is not None else route.here)

    def _language_frame(self, plain: Frame, to: str | None, from_: str | None) -> Frame:
        """For models with language tokens on both sides: the source's around it, the target's at its start."""
        source, codes = self.source, set(self.source.languages.values())
        begins = next((number for number in (*plain.forced, *plain.opening) if number in codes), None)
        here = source.template.spoken if from_ is None else source.language(from_)
        there = begins if to is None else source.language(to)
        if here is None or there is None:
            what = 'the source language (from_="…")' if here is None else 'the target language (to="…")'
            raise UserError(f"this model has {len(codes)} languages; set {what}: {', '.join(self.languages)}")
        if plain.opening[0] in codes:  # the language token is the begin token
            plain = replace(plain, opening=(there,), forced=())
        else:
            plain = replace(plain, forced=(there,))
        if source.template.language == "before":
            return replace(plain, before=(here, *plain.before))
        return replace(plain, after=(*plain.after, here))


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
    decoding = frame.without_forced(decoding)
    spec, given = engine.spec(decoding, len(frame.forced)), list[tuple[Request, DecodingSpec]]()
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
