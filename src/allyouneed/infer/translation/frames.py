"""How a model that reads one text and writes another is set to work: what frames its source, how its target begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.repetition import has_repeats
from allyouneed.infer.engine import Engine


@dataclass(frozen=True)
class Frame:
    """What stands before and after a source, and what its target begins with: `opening` is given, `forced` counts as
    said."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    opening: tuple[int, ...]
    forced: tuple[int, ...] = ()

    @property
    def marks(self) -> int:
        return len(self.before) + len(self.after)

    def source(self, ids: Sequence[int]) -> list[int]:
        return [*self.before, *ids, *self.after]

    @property
    def begin(self) -> list[int]:
        return [*self.opening, *self.forced]


def plain_frame(vocabularies: Vocabularies) -> Frame:
    """For a model that is not told any languages."""
    target = vocabularies.target
    return Frame(*vocabularies.source.source_affixes, target.opening, target.template.forced)


def never_said(target: Tokenizer) -> list[int]:
    """Ours say no special tokens; what a foreign model may not say is its maker's affair."""
    if target.foreign:
        return list(target.template.never)
    return [target.pad, target.bos, *target.languages.values()]


def guessing(model: Any) -> Engine:
    """What a model guesses with for another."""
    both = model.folder.tokenizers
    return Engine(model.model, both.target.bos, both.target.eos, both.source.pad, limit=model.limit)


def write(
    model: Any,
    vocabularies: Vocabularies,
    frame: Frame,
    sources: Sequence[Sequence[int]],
    decoding: Decoding,
    limit: int | None,
    exact: bool = False,
    **options: Any,
) -> list[list[Hypothesis]]:
    """The best targets of each source (framed); the forced beginning is not repeated in them."""
    source, target = vocabularies.source, vocabularies.target
    forced = len(frame.forced)
    if forced and decoding.max_length is not None:
        decoding = decoding.model_copy(update={"max_length": max(1, decoding.max_length - forced)})
    engine = Engine(
        model,
        frame.opening[0],
        target.eos,
        source.pad,
        never_said(target),
        limit,
        ends=target.template.stops,
        counted=forced,
        ended=target.template.ended,
        exact=exact,
    )
    given: dict[str, Any] = {
        "prefix": [frame.begin[1:]] * len(sources),
        "sample_keys": [(number,) for number in range(len(sources))],
    } | options
    echoing = [decoding.loops is not None and has_repeats(source, decoding.loops) for source in sources]
    if not any(echoing):
        return engine.generate(sources, decoding, **given)
    found: dict[int, list[Hypothesis]] = {}
    for echo, way in ((False, decoding), (True, decoding.model_copy(update={"loops": None}))):
        numbers = [number for number, one in enumerate(echoing) if one == echo]
        own = {name: [given[name][number] for number in numbers] for name in ("prefix", "sample_keys")}
        found |= zip(numbers, engine.generate([sources[n] for n in numbers], way, **given | own), strict=True)
    return [found[number] for number in range(len(sources))]
