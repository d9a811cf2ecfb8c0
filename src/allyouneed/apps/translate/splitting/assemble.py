"""The translation of a text from the translations of its chunks: the best combinations, notes, confidence, links."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from allyouneed.apps.translate.alignment import Aligner
from allyouneed.apps.translate.checks import confidence_notes, number_notes, score_notes
from allyouneed.apps.translate.confidence import evidence_of, words_of
from allyouneed.apps.translate.context import Contexts
from allyouneed.apps.translate.glossary import Glossary
from allyouneed.apps.translate.numbers.amounts import expanded
from allyouneed.apps.translate.numbers.numbers import localized_text, translated_amount
from allyouneed.apps.translate.result import AlignmentLink, Candidate, Translation
from allyouneed.apps.translate.spans.carry import VALUED, ChunkTranslation
from allyouneed.apps.translate.spans.spans import Span, restore
from allyouneed.apps.translate.spans.spans import protect as protect_spans
from allyouneed.apps.translate.splitting.split import Chunk, SplitText
from allyouneed.errors import quote
from allyouneed.folder import Folder
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.notes import invalid_notes, loop_note
from allyouneed.infer.speculative.stats import total_stats

if TYPE_CHECKING:
    from allyouneed.infer.predictors.generating import CallOptions


@dataclass(frozen=True)
class TranslationSettings:
    """How the texts of a call are translated. `protect`: keep URLs, code and other spans. `write`: converts the answers
    to another script. `direction`: of the calibration (`en-de`)."""

    call: CallOptions
    protect: bool
    align: bool = False
    glossary: Glossary | None = None
    write: Callable[[str], str] | None = None
    words: bool = False
    direction: str = ""
    sentences: bool = True
    contexts: Contexts | None = None


def assemble(
    folder: Folder,
    split: SplitText,
    answers: list[list[ChunkTranslation]],
    settings: TranslationSettings,
    aligner: Aligner,
) -> Translation:
    """The translation of a text from the answers for its chunks, best first."""
    tokenizer = folder.tokenizers.target
    chosen: list[tuple[float, list[int]]] = [(0.0, [])]  # the best combinations of the chunks' answers
    for some in answers:
        combined = [(s + answer.score, [*ranks, r]) for s, ranks in chosen for r, answer in enumerate(some)]
        chosen = sorted(combined, key=lambda one: -one[0])[: settings.call.decoding.best]
    candidates, offsets = [], []
    for total, ranks in chosen:
        text, starts = split.join([some[rank].text for some, rank in zip(answers, ranks, strict=True)])
        candidates.append(Candidate(text, total / max(1, len(answers))))
        offsets.append(starts)
    firsts = [some[rank] for some, rank in zip(answers, chosen[0][1], strict=True)]
    notes = list(split.notes)
    known = folder.confidence if settings.protect and firsts else None
    evidence, sure = [], []
    for chunk, answer in zip(split.chunks, firsts, strict=True):
        notes += _chunk_notes(folder, chunk, answer, settings.protect)
        if known is not None:
            evidence.append(evidence_of(chunk, answer))
            sure.append(known.sentence(evidence[-1], settings.direction))
            notes += confidence_notes(chunk.text, sure[-1]) if evidence[-1].finished else []
    words = None
    if settings.words and known is not None:
        words = [
            word
            for answer, at, sentence in zip(firsts, offsets[0], sure, strict=True)
            for word in words_of(answer, at, candidates[0].text, tokenizer, known, sentence)
        ]
    links = None
    if settings.align:
        links = [
            AlignmentLink(split.source[slice(*source)], candidates[0].text[slice(*target)], source, target)
            for chunk, answer, at in zip(split.chunks, firsts, offsets[0], strict=True)
            for source, target in aligner.links(answer, chunk.start, at)
        ]
    decoded = [[part.hypothesis for answer in some for part in answer.parts] for some in answers]
    return Translation(
        split.source,
        candidates,
        notes,
        links,
        guesses=total_stats(decoded),
        confidence=None if known is None else known.text(evidence, settings.direction),
        words=words,
    )


def _chunk_notes(folder: Folder, chunk: Chunk, answer: ChunkTranslation, natural: bool) -> list[str]:
    """What the reader of a translation should know or doubt. `natural`: the texts are in natural languages."""
    found = [part.hypothesis for part in answer.parts]
    notes = [_unfinished_note(chunk, one) for one in found if not one.finished]
    for one in found:
        notes += invalid_notes(chunk.text, folder.tokenizers.target.decode(one.tokens))
    if natural:
        notes += number_notes(chunk.text, answer.text)
    if natural and folder.confidence is None and all(one.finished for one in found):
        notes += score_notes(chunk.text, [log_prob for one in found for log_prob in one.log_probs])
    return notes


def localized_spans(spans: Mapping[str, Span], here: str, there: str) -> Mapping[str, Span]:
    """The spans, with numbers as the target language writes them."""
    return {
        symbol: _localized(span, here, there) if span.kind.name in VALUED else span for symbol, span in spans.items()
    }


def _localized(span: Span, here: str, there: str) -> Span:
    if span.kind.name == "amount":
        return replace(span, target=translated_amount(span.text, here, there), reading=expanded(span.text, here))
    return replace(span, target=localized_text(span.text, here, there))


def untranslated(text: str, route: list[str], language: str | None, settings: TranslationSettings) -> Translation:
    """A text that is in the target language already, in the script that was asked for."""
    written = text
    if settings.write is not None:
        found = protect_spans(text)
        written = restore(settings.write(found.template), found.spans)
    note = f"{quote(text)}: is already in {language}" + ("" if written == text else "; its script was converted")
    links: list[AlignmentLink] | None = [] if settings.align else None
    return Translation(text, [Candidate(written, 0.0)], [note], links, route, None, written == text)


def copied(text: str, found: Translation) -> Translation:
    """The result for a line that is not translated, such as code; `found`: that of an empty text."""
    return replace(found, source=text, candidates=[Candidate(text, 0.0)], skipped=True)


def one_line(text: str) -> str:
    """A chunk has no line break, so its translation must not have one."""
    return re.sub(r"[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]", " ", text).strip()


def _unfinished_note(chunk: Chunk, answer: Hypothesis) -> str:
    if answer.repeats:
        return loop_note(chunk.text, len(answer.tokens))
    suffix = "; it repeats itself" if ends_in_loop(answer.tokens) else ""
    return f"{quote(chunk.text)}: stopped after {len(answer.tokens)} tokens without an end token{suffix}"


def ends_in_loop(tokens: Sequence[int], times: int = 4, longest: int = 10) -> bool:
    """Whether a text ends with the same few tokens, repeated `times` times."""
    return any(
        len(tokens) >= times * size and list(tokens[-size:]) * times == list(tokens[-size * times :])
        for size in range(1, longest + 1)
    )
