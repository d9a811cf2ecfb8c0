"""Special tokens around the source and at the start of the target, and decoding of framed sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.repetition import has_repeats
from allyouneed.infer.engine import Engine

if TYPE_CHECKING:
    from allyouneed.data.shortlist import Shortlist

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
    """The frame of a model without language tokens."""
    target = vocabularies.target
    return Frame(*vocabularies.source.source_affixes, target.opening, target.template.forced)


def forbidden_tokens(target: Tokenizer) -> list[int]:
    """Tokens that must not be generated: special tokens, or what an imported model's config lists."""
    if target.foreign:
        return list(target.template.never)
    return [target.pad, target.bos, *target.languages.values()]


def sequence_engine(
    model: Any,
    vocabularies: Vocabularies,
    limit: int | None,
    kind: type[E] = Engine,  # type: ignore[assignment]
    shortlist: Shortlist | None = None,
) -> E:
    """The engine of a model that reads a source and generates a target."""
    source, target = vocabularies.source, vocabularies.target
    template = target.template
    engine = kind(
        model,
        target.opening[0] if target.opening else target.bos,
        target.eos,
        source.pad,
        forbidden_tokens(target),
        limit,
        ends=template.stops,
        ended=template.ended,
    )
    engine.runner.shortlist = shortlist
    return engine


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
