"""Translation: lines and whitespace are kept, long texts are split and joined, nothing is truncated silently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, overload

from allyouneed.apps.translate.alignment import Aligner
from allyouneed.apps.translate.context import (
    ContextOption,
    ContextReader,
    find_contexts,
    last_sentence,
    trained_context,
)
from allyouneed.apps.translate.glossary import Glossary
from allyouneed.apps.translate.languages import LanguageFrames
from allyouneed.apps.translate.numbers.repair import put_right
from allyouneed.apps.translate.result import AlignmentLink, Candidate, Translation
from allyouneed.apps.translate.routes import Route, Routes
from allyouneed.apps.translate.scripts import ChineseScripts
from allyouneed.apps.translate.spans.carry import Carrier
from allyouneed.apps.translate.spans.spans import same_spans, without_spans
from allyouneed.apps.translate.splitting.assemble import (
    TranslationSettings,
    assemble,
    copied,
    ends_in_loop,
    localized_spans,
    one_line,
    untranslated,
)
from allyouneed.apps.translate.splitting.split import Splitter, in_capitals
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError, quote
from allyouneed.folder import Folder
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.notes import INVALID, drop_invalid
from allyouneed.infer.decoding.options import MAX_TOKENS, Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.frames import Frame, draft_engine, generate_targets, sequence_engine
from allyouneed.infer.predictors.base import EvaluationResult, check_texts, evenly_spaced
from allyouneed.infer.predictors.generating import GeneratingPredictor

if TYPE_CHECKING:
    from allyouneed.apps.translate.documents.memory import Match, TranslationMemory
    from allyouneed.apps.translate.documents.translate import DocumentTranslation
    from allyouneed.data.files.pairs import Pair

__all__ = ["AlignmentLink", "Candidate", "Translation", "Translator", "copied", "ends_in_loop", "one_line"]
WHOLE = 64  # tokens of a line that is not split into sentences


class Translator(GeneratingPredictor):
    """Translates texts.

    A line of at most `together` tokens, or of one sentence of at most `max_tokens`, is translated whole; otherwise
    sentence by sentence. A sentence of more than `max_tokens` (the training length) is translated in parts, with a
    note. With `unlimited`, every line is translated whole.
    """

    writes_whole_targets = False  # True: not token by token, so that no scheduler decodes for it

    def __init__(self, folder: Folder, max_tokens: int | None = None, together: int | None = None) -> None:
        super().__init__(folder)
        self._limit: int | None = getattr(getattr(self.model, "config", None), "limit", None)
        trained = max_tokens or folder.max_tokens
        self.max_tokens = trained if self._limit is None else min(trained, self._limit)
        whole = next(number for number in (together, folder.together, WHOLE) if number is not None)
        self.together = min(whole, self.max_tokens)
        self.routes = Routes(folder.directions, folder.detector)
        self.context = trained_context(folder.task)
        self.marks_terms = bool(folder.task.get("marked_terms"))  # it was trained with marked terms

    # what needs a tokenizer is made when it is used: a model without one has its logits and hidden states
    @cached_property
    def frames(self) -> LanguageFrames:
        return LanguageFrames(self.folder, self.routes)

    @property
    def scripts(self) -> ChineseScripts:
        return self.frames.scripts

    @cached_property
    def protects(self) -> bool:
        """Whether spans and numbers are kept by default. A model without languages may translate anything (dates,
        formulas): its digits and symbols are its own."""
        return bool(self.folder.detector is not None or self.languages or self.source.foreign)

    def build_engine(self) -> Engine:
        return sequence_engine(self.model, self.folder.tokenizers, self._limit, shortlist=self.folder.shortlist)

    @property
    def draft_engine(self) -> Engine:
        return draft_engine(self)

    @property
    def source(self) -> Tokenizer:
        return self.folder.tokenizers.source

    @property
    def target(self) -> Tokenizer:
        return self.folder.tokenizers.target

    @property
    def languages(self) -> list[str]:
        """The values of `to`; empty for a model with one target language."""
        return self.frames.languages

    @property
    def written_languages(self) -> list[str]:
        """`languages`, and traditional Chinese where answers are converted."""
        return self.frames.written_languages

    @overload
    def translate(self, texts: str, to: str | None = None, **options: Any) -> str: ...

    @overload
    def translate(self, texts: Sequence[str], to: str | None = None, **options: Any) -> list[str]: ...

    def translate(self, texts: str | Sequence[str], to: str | None = None, **options: Any) -> str | list[str]:
        """The translation of a text, or of each text of a list. `options`: see `translate_full`."""
        many = [texts] if isinstance(texts, str) else texts
        found = [full.text for full in self.translate_full(many, to, **options)]
        return found[0] if isinstance(texts, str) else found

    def translate_full(
        self,
        texts: Sequence[str],
        to: str | None = None,
        *,
        from_: str | None = None,
        align: bool = False,
        protect: bool | None = None,
        glossary: Glossary | Mapping[str, str] | None = None,
        memory: TranslationMemory | None = None,
        words: bool = False,
        sentences: bool = True,
        context: ContextOption = None,
        preceding: Sequence[str] = (),
        **options: Any,
    ) -> list[Translation]:
        """Translations with scores, the n best (`best=5`), confidence, notes and, with `align`, an alignment.

        A model with a language detector detects `from_`, and chooses a default for `to`. `protect`: keep URLs, code,
        tags and other spans (docs/translator.md) as they are; default: if the model was trained with languages.
        `glossary`: terms with a fixed translation, `memory`: of earlier translations (docs/documents.md). `words`: the
        confidence of each word, where the model folder has a calibration. `sentences`: false to translate a line as a
        whole, if it does not exceed the training length. `options`: see `call_options`.

        `context`, of a model trained with it (docs/family/document.md): 2 reads each sentence with the 2 before it, in
        a request whose texts are consecutive; a blank text ends a document, and `preceding` are the texts before the
        first. A text is read before each of the texts; so is, for each of them, a list of sentences.
        """
        texts = check_texts(texts, "translate_full")
        if align and self.writes_whole_targets:
            raise UserError(f"align: not supported by {self.folder.task['kind']}; remove it")
        protect = self.protects if protect is None else protect
        terms = Glossary.of(glossary)
        if terms is not None and not protect:
            raise UserError("a glossary requires protected spans; remove --no-protect (protect=False)")
        texts = [text.replace(INVALID, "") if protect and INVALID in text else text for text in texts]
        asked, (to, from_) = to, self.frames.resolve(to, from_)
        write = self.scripts.writer(asked, to)
        call = self.call_options(**options)
        contexts = find_contexts(context, texts, check_texts(preceding, "preceding"), call.first, self.context)
        settings = TranslationSettings(
            call, protect, align, terms, write, words, sentences=sentences, contexts=contexts
        )
        routes = [Route(to, ())] * len(texts)  # from one script of a language into the other
        if write is None or from_ != to:
            routes = self.routes.of_all([without_spans(text) for text in texts], to, from_)
        by_route: dict[Route, list[int]] = {}
        found: dict[int, Translation] = {}
        near: dict[int, Match] = {}
        only = self.routes.directions[0] if len(self.routes.directions) == 1 else (None, None)
        for number, route in enumerate(routes):
            match = None
            if memory is not None and route.into:
                match = memory.find(texts[number], route.here or only[0], route.into[-1] or only[1])
            if match is not None and match.likeness == 1:
                found[number] = Translation(texts[number], [Candidate(match.target, 0.0)], route=route.named)
                continue
            by_route.setdefault(route, []).append(number)
            if match is not None:
                near[number] = match
        for route, numbers in by_route.items():
            some, indices = [texts[number] for number in numbers], [call.first + number for number in numbers]
            found |= zip(numbers, self._translate_route(route, some, indices, settings), strict=True)
        for number, match in near.items():
            found[number] = replace(found[number], notes=[*found[number].notes, match.note])
        for number, text in enumerate(texts):
            if self.routes.detector is not None and from_ is None and self.routes.detector.is_unfamiliar(text):
                known = ", ".join(self.routes.detector.languages)
                note = f"{quote(text)}: its script is not that of a known language ({known})"
                found[number] = replace(found[number], notes=[note, *found[number].notes])
        return [found[number] for number in range(len(texts))]

    def translate_document(
        self,
        text: str | bytes,
        to: str | None = None,
        *,
        format: str,
        from_: str | None = None,
        glossary: Glossary | Mapping[str, str] | None = None,
        reading: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> DocumentTranslation:
        """Translate a document; its markup is kept (docs/documents.md). `text`: or a file's bytes. `format`: html, md,
        docx, …; `reading`: its options, such as `{"ignore_tags": ["code"]}` of XML. `options`: see
        `translate_full`."""
        return self.translate_documents(
            [text], to, format=format, from_=from_, glossary=glossary, reading=reading, **options
        )[0]

    def translate_documents(
        self,
        texts: Sequence[str | bytes],
        to: str | None = None,
        *,
        format: str,
        from_: str | None = None,
        glossary: Glossary | Mapping[str, str] | None = None,
        reading: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[DocumentTranslation]:
        """`translate_document` of each of several documents, at once."""
        from allyouneed.apps.translate.documents.translate import translate_documents

        return translate_documents(self, texts, to, format, from_, glossary, reading, options)

    def _translate_route(
        self, route: Route, texts: Sequence[str], indices: list[int], settings: TranslationSettings
    ) -> list[Translation]:
        """Texts of one route: unchanged, translated, or translated via a pivot language."""
        names = route.named if self.routes.detector is not None else []
        if not route.into:
            return [untranslated(text, names, route.here, settings) for text in texts]
        if settings.align and len(route.into) > 1:
            raise UserError(f"alignment requires a direct direction, not {' → '.join(names)}; set another --to")
        sources = list(texts)
        notes: list[list[str]] = [[] for _ in texts]
        confidences: list[float | None] = [1.0 for _ in texts]
        glossary, here, call = settings.glossary, route.here, settings.call
        for pivot in route.into[:-1]:
            best = replace(
                settings,
                call=replace(call, decoding=call.decoding.model_copy(update={"best": 1}), on_progress=None),
                glossary=glossary,
                write=None,
                words=False,
                direction=f"{here}-{pivot}",
            )
            step = self._translate_direct(sources, indices, self.frames.frame(pivot, None), best)
            if settings.contexts is not None:
                settings = replace(settings, contexts=settings.contexts.without_texts())
            glossary, here = glossary and glossary.of_targets(), pivot
            sources, notes = [same_spans(one.text, one.source) for one in step], [one.notes for one in step]
            confidences = [one.confidence for one in step]
        settings = replace(settings, glossary=glossary, direction=f"{here}-{route.into[-1]}")
        last = self._translate_direct(sources, indices, self.frames.last_of(route), settings)
        return [
            replace(
                one,
                source=text,
                notes=[*before, *one.notes],
                route=names,
                confidence=None if first is None or one.confidence is None else round(first * one.confidence, 4),
            )
            for text, before, first, one in zip(texts, notes, confidences, last, strict=True)
        ]

    def direct_frame(self, text: str, to: str | None = None, from_: str | None = None) -> Frame | None:
        """The special tokens of a text that is translated directly and as a whole; None for one that is split, has
        protected spans, is translated via a pivot language, is converted to another script, or already in the target
        language."""
        codes = self.frames.resolve(to, from_)
        if self.scripts.writer(to, codes[0]) is not None:
            return None
        (route,) = self.routes.of_all([text], *codes)
        if len(route.into) != 1:
            return None
        frame = self.frames.last_of(route)
        (split,) = self._splitter(frame, self.protects).split([text])
        return frame if [chunk.template for chunk in split.chunks] == [text] else None

    def frame(self, to: str | None = None, from_: str | None = None) -> Frame:
        """The special tokens around every source and at the start of its target, for these languages."""
        return self.frames.frame(*self.frames.resolve(to, from_))

    def _translate_direct(
        self, texts: Sequence[str], indices: Sequence[int], frame: Frame, settings: TranslationSettings
    ) -> list[Translation]:
        """Translate texts from one language into another; `indices`: of the texts in the whole request."""
        protect, call, decoding = settings.protect, settings.call, settings.call.decoding
        engine = self.engine_for(decoding, call.draft)
        unlimited = decoding.unlimited is not None
        splitter = self._splitter(frame, protect, settings.glossary, settings.sentences, unlimited)
        splits, contexts = splitter.split(texts), settings.contexts
        before = {} if contexts is None else contexts.of_chunks(splitter, splits, indices)
        reader = ContextReader(self.source, self.max_tokens, before)
        chunks = [chunk for split in splits for chunk in split.chunks]
        keys = [
            (index, part) for index, split in zip(indices, splits, strict=True) for part in range(len(split.chunks))
        ]
        here, _, there = settings.direction.partition("-")
        spans = [localized_spans(chunk.spans, here, there) for chunk in chunks]
        on_progress = call.on_progress

        def read(texts: list[str], keys: list[tuple[int, ...]]) -> list[list[int]]:
            sources = [frame.source(ids) for ids in self.source.encode_batch(texts)]
            return [[*reader.before(key, len(ids)), *ids] for key, ids in zip(keys, sources, strict=True)]

        def written(found: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
            if contexts is None or self.context is None or not self.context.target:
                return found
            return [[last_sentence(one, self.folder.tokenizers) for one in some] for some in found]

        def decode(texts: list[str], keys: list[tuple[int, ...]]) -> list[list[Hypothesis]]:
            nonlocal on_progress
            options = {"on_progress": on_progress, "sample_keys": keys, "draft": call.draft}
            on_progress = None  # of all chunks at first; later calls repeat some
            return written(generate_targets(engine, frame, read(texts, keys), decoding, **options)) if texts else []

        def text_of(source: str, found: Hypothesis) -> str:
            text = drop_invalid(one_line(self.target.decode(found.tokens)))
            if protect:
                text = put_right(source, text, here, there)
            return text if settings.write is None else settings.write(text)

        def force(texts: list[str], keys: list[tuple[int, ...]], phrases: list[Counter[str]]) -> list[list[Hypothesis]]:
            from allyouneed.apps.translate.spans.forced_phrases import force_phrases

            both, sources = self.folder.tokenizers, read(texts, keys)
            return written(force_phrases(engine, frame, both, sources, decoding, keys, phrases))

        aligner = Aligner(engine, self.source, self.target, frame)
        if settings.align and unlimited:
            raise UserError("alignment reads sources within the model's limit only; remove align or unlimited")
        attention = aligner.attention if aligner.possible else None
        carrier = Carrier(decode, text_of, attention, force if self.marks_terms else None)
        answers = carrier.translate([c.template for c in chunks], spans, keys)
        found = iter(
            [one._replace(text=in_capitals(one.text, some)) for one in answer] if chunk.capitals else answer
            for chunk, some, answer in zip(chunks, spans, answers, strict=True)
        )
        parts = [list(islice(found, len(split.chunks))) for split in splits]
        return [assemble(self.folder, *both, settings, aligner) for both in zip(splits, parts, strict=True)]

    def _splitter(
        self,
        frame: Frame,
        protect: bool,
        glossary: Glossary | None = None,
        sentences: bool = True,
        unlimited: bool = False,
    ) -> Splitter:
        longest = MAX_TOKENS if unlimited else self.max_tokens
        whole = self.together if sentences and not unlimited else longest
        return Splitter(self.source, longest, whole, frame.marks, protect, glossary, self.scripts.read)

    def translate_stream(
        self, texts: Iterable[str], to: str | None = None, *, chunk: int = 1000, **options: Any
    ) -> Iterator[Translation]:
        """Translate any number of texts lazily, in order, `chunk` at a time: e.g. the lines of a file."""
        self.frames.resolve(to, options.get("from_"))
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise UserError(f"expected an iterable of texts, got {type(texts).__name__}")
        return self._stream(iter(texts), to, chunk, options)

    def _stream(
        self, texts: Iterator[str], to: str | None, chunk: int, options: dict[str, Any]
    ) -> Iterator[Translation]:
        first, context, preceding = 0, options.pop("context", None), list(options.pop("preceding", ()))
        while held := list(islice(texts, chunk)):
            some = context[first : first + len(held)] if isinstance(context, list | tuple) else context
            yield from self.translate_full(held, to, first=first, context=some, preceding=preceding, **options)
            first += len(held)
            preceding = [*preceding, *held][-context:] if isinstance(context, int) and context > 0 else []

    def score(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        to: str | None = None,
        *,
        from_: str | None = None,
        context: Sequence[Sequence[str]] | None = None,
        target_context: Sequence[Sequence[str]] | None = None,
    ) -> list[float]:
        """The log-probability of each target given its source, as they are, end mark included: which of two
        translations the model prefers. `context`: the sentences before each source, of a model trained with them;
        `target_context`: those before each target, if it writes them as well."""
        from allyouneed.apps.translate.scoring import score_targets

        return score_targets(self, sources, targets, self.frame(to, from_), context, target_context)

    def with_languages(
        self, examples: Sequence[Any], to: str | None, from_: str | None, options: str
    ) -> tuple[Sequence[Any], str]:
        from allyouneed.apps.translate.direction import find_direction
        from allyouneed.data.files.pairs import Pair

        if not isinstance(examples[0], Pair):
            return examples, ""
        sides = [pair.source for pair in examples], [pair.target for pair in examples]
        direction = find_direction(self.routes, *sides, to, from_, options)
        return [pair._replace(to=direction.to, from_=direction.from_) for pair in examples], direction.note

    def judge(
        self, examples: Sequence[Pair], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        """BLEU and chrF from 0 to 100, and the percentage of exact matches; with several directions, their mean."""
        from allyouneed.metrics.translation import TranslationScores, evaluate

        found = [""] * len(examples)
        several: dict[str, TranslationScores] = {}
        for direction in dict.fromkeys((pair.from_, pair.to) for pair in examples):
            numbers = [n for n, pair in enumerate(examples) if (pair.from_, pair.to) == direction]
            from_ = direction[0] if self.routes.detector is not None else None  # else it has no effect
            options: dict[str, Any] = {"decoding": decoding, "protect": False}  # the model alone is scored
            if self.context is not None:
                options["context"] = [[source for source, _ in examples[n].context] for n in numbers]
            texts = self.translate([examples[n].source for n in numbers], direction[1], from_=from_, **options)
            for n, text in zip(numbers, texts, strict=True):
                found[n] = text
            name, targets = "-".join(filter(None, direction)), [examples[n].target for n in numbers]
            several[name] = evaluate(texts, targets, direction[1], resamples=resamples)
        samples = [
            {"source": pair.source, "reference": pair.target, "hypothesis": text}
            for pair, text in evenly_spaced(list(zip(examples, found, strict=True)), show)
        ]
        every = [{"bleu": one.bleu, "chrf": one.chrf, "exact": 100 * one.exact} for one in several.values()]
        figures = {
            name: sum(one[name] for one in every) / len(every) for name in every[0]
        }  # the unweighted mean over directions
        if len(several) == 1:
            return EvaluationResult(figures, next(iter(several.values())).text(), samples)
        figures |= {f"bleu/{name}": one.bleu for name, one in several.items()}
        return EvaluationResult(figures, "\n".join(f"{name}\n{one.text()}" for name, one in several.items()), samples)
