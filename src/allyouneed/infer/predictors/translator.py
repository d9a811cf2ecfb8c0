"""Translation: lines and whitespace are kept, long texts are split and joined, nothing is truncated silently."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, overload

from allyouneed.data.files.pairs import Pair
from allyouneed.data.languages import resolve
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError, near
from allyouneed.evaluate.translation import TranslationScores, evaluate
from allyouneed.folder import Folder
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.options import MAX_TOKENS, Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.inside.reading import Reading
from allyouneed.infer.predictors.base import EvaluationResult, check_texts, evenly_spaced, loop_note
from allyouneed.infer.predictors.generating import CallOptions, GeneratingPredictor
from allyouneed.infer.speculative.decode import total_stats
from allyouneed.infer.translation.alignment import Aligner
from allyouneed.infer.translation.carry import VALUED, Answer, Carrier
from allyouneed.infer.translation.checks import (
    INVALID,
    confidence_notes,
    drop_invalid,
    invalid_notes,
    number_notes,
    score_notes,
)
from allyouneed.infer.translation.confidence import evidence_of, words_of
from allyouneed.infer.translation.context import (
    ContextOption,
    ContextReader,
    Contexts,
    find_contexts,
    last_sentence,
    trained_context,
)
from allyouneed.infer.translation.documents.translate import DocumentTranslation, translate_documents
from allyouneed.infer.translation.figures import localized_text, put_right
from allyouneed.infer.translation.frames import (
    Frame,
    default_frame,
    draft_engine,
    force_phrases,
    generate_targets,
    read_pair,
    sequence_engine,
)
from allyouneed.infer.translation.glossary import Glossary
from allyouneed.infer.translation.result import AlignmentLink, Candidate, Translation
from allyouneed.infer.translation.routes import Route, Routes
from allyouneed.infer.translation.scoring import score_targets
from allyouneed.infer.translation.scripts import ChineseScripts
from allyouneed.infer.translation.spans import Span, restore, same_spans, without_spans
from allyouneed.infer.translation.spans import protect as protect_spans
from allyouneed.infer.translation.split import Chunk, Splitter, SplitText, in_capitals, quote

__all__ = ["AlignmentLink", "Candidate", "Translation", "Translator"]
WHOLE = 64  # tokens of a line that is not split into sentences


@dataclass(frozen=True)
class _Settings:
    """How the texts of a call are translated. `write`: converts the answers to another script."""

    call: CallOptions
    protect: bool
    align: bool = False
    glossary: Glossary | None = None
    write: Callable[[str], str] | None = None
    words: bool = False
    direction: str = ""  # of the calibration: en-de
    sentences: bool = True
    contexts: Contexts | None = None


class Translator(GeneratingPredictor):
    """Translates texts.

    A line of at most `together` tokens, or of one sentence of at most `max_tokens`, is translated whole; otherwise
    sentence by sentence. A sentence of more than `max_tokens` (the training length) is translated in parts, with a
    note. With `unlimited`, every line is translated whole.
    """

    writes_whole_targets = False  # True: not token by token, so that no scheduler decodes for it

    def __init__(self, folder: Folder, max_tokens: int | None = None, together: int | None = None) -> None:
        super().__init__(folder)
        self._limit: int | None = getattr(getattr(self.model, "embed", None), "limit", None)
        trained = max_tokens or folder.max_tokens
        self.max_tokens = trained if self._limit is None else min(trained, self._limit)
        whole = next(number for number in (together, folder.together, WHOLE) if number is not None)
        self.together = min(whole, self.max_tokens)
        self.routes = Routes(folder.directions, folder.detector)
        self.scripts = ChineseScripts.of(self.languages, folder.detector)
        self.context = trained_context(folder.task)
        self.marks_terms = bool(folder.task.get("marked_terms"))  # it was trained with marked terms
        # a model without languages may translate anything (dates, formulas): its digits and symbols are its own
        self.protects = bool(folder.detector is not None or self.languages or self.source.foreign)

    def build_engine(self) -> Engine:
        return sequence_engine(self.model, self.folder.tokenizers, self._limit)

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
        return sorted(self.source.languages)

    @property
    def written_languages(self) -> list[str]:
        """`languages`, and traditional Chinese where answers are converted."""
        chinese = self.scripts.simplified
        return self.languages if chinese is None else sorted([*self.languages, f"{chinese}-Hant"])

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
        words: bool = False,
        sentences: bool = True,
        context: ContextOption = None,
        preceding: Sequence[str] = (),
        **options: Any,
    ) -> list[Translation]:
        """Translations with scores, the n best (`best=5`), confidence, notes and, with `align`, an alignment.

        A model with a language detector detects `from_`, and chooses a default for `to`. `protect`: keep URLs, code,
        tags and other spans (docs/translator.md) as they are; default: if the model was trained with languages.
        `glossary`: terms with a fixed translation (docs/documents.md). `words`: the confidence of each word, where the
        model folder has a calibration. `sentences`: false to translate a line as a whole, if it does not exceed the
        training length. `options`: see `call_options`.

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
        asked, (to, from_) = to, self._resolve_languages(to, from_)
        write = self.scripts.writer(asked, to)
        call = self.call_options(**options)
        settings = _Settings(call, protect, align, terms, write, words, sentences=sentences)
        contexts = find_contexts(context, texts, check_texts(preceding, "preceding"), call.first, self.context)
        settings = replace(settings, contexts=contexts)
        routes = [Route(to, ())] * len(texts)  # from one script of a language into the other
        if write is None or from_ != to:
            routes = self.routes.of_all([without_spans(text) for text in texts], to, from_)
        by_route: dict[Route, list[int]] = {}
        for number, route in enumerate(routes):
            by_route.setdefault(route, []).append(number)
        found: dict[int, Translation] = {}
        for route, numbers in by_route.items():
            some, indices = [texts[number] for number in numbers], [call.first + number for number in numbers]
            found |= zip(numbers, self._translate_route(route, some, indices, settings), strict=True)
        for number, text in enumerate(texts):
            if self.routes.detector is not None and from_ is None and self.routes.detector.is_unfamiliar(text):
                known = ", ".join(self.routes.detector.languages)
                note = f"{quote(text)}: its script is not that of a known language ({known})"
                found[number] = replace(found[number], notes=[note, *found[number].notes])
        return [found[number] for number in range(len(texts))]

    def translate_document(
        self,
        text: str,
        to: str | None = None,
        *,
        format: str,
        from_: str | None = None,
        glossary: Glossary | Mapping[str, str] | None = None,
        reading: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> DocumentTranslation:
        """Translate a document; its markup is kept (docs/documents.md). `format`: html, md, srt, vtt, po, xml or text.
        `reading`: options of the format, such as `{"ignore_tags": ["code"]}` of XML. `options`: see
        `translate_full`."""
        return self.translate_documents(
            [text], to, format=format, from_=from_, glossary=glossary, reading=reading, **options
        )[0]

    def translate_documents(
        self,
        texts: Sequence[str],
        to: str | None = None,
        *,
        format: str,
        from_: str | None = None,
        glossary: Glossary | Mapping[str, str] | None = None,
        reading: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[DocumentTranslation]:
        """`translate_document` of each of several documents, at once."""
        return translate_documents(self, texts, to, format, from_, glossary, reading, options)

    def _translate_route(
        self, route: Route, texts: Sequence[str], indices: list[int], settings: _Settings
    ) -> list[Translation]:
        """Texts of one route: unchanged, translated, or translated via a pivot language."""
        names = route.named if self.routes.detector is not None else []
        if not route.into:
            return [_untranslated(text, names, route.here, settings) for text in texts]
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
            step = self._translate_direct(sources, indices, self._frame(pivot, None), best)
            if settings.contexts is not None:
                settings = replace(settings, contexts=settings.contexts.without_texts())
            glossary, here = glossary and glossary.of_targets(), pivot
            sources, notes = [same_spans(one.text, one.source) for one in step], [one.notes for one in step]
            confidences = [one.confidence for one in step]
        settings = replace(settings, glossary=glossary, direction=f"{here}-{route.into[-1]}")
        last = self._translate_direct(sources, indices, self._route_frame(route), settings)
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
        codes = self._resolve_languages(to, from_)
        if self.scripts.writer(to, codes[0]) is not None:
            return None
        (route,) = self.routes.of_all([text], *codes)
        if len(route.into) != 1:
            return None
        frame = self._route_frame(route)
        (split,) = self._splitter(frame, self.protects).split([text])
        return frame if [chunk.template for chunk in split.chunks] == [text] else None

    def frame(self, to: str | None = None, from_: str | None = None) -> Frame:
        """The special tokens around every source and at the start of its target, for these languages."""
        return self._frame(*self._resolve_languages(to, from_))

    def read_input(self, given: Any, target: Any = None, **options: Any) -> Reading:
        """One sentence, translated directly, without protected spans: what the model itself reads."""
        (text,) = check_texts([given], "inside")
        to, from_ = self._resolve_languages(options.pop("to", None), options.pop("from_", None))
        route = self.routes.of(text, to, from_)
        if len(route.into) != 1:
            why = f"goes via {route.into[0]}: take one step at a time" if route.into else f"is already in {route.here}"
            raise UserError(f"{quote(text)}: {why}; set to= or from_=")
        frame = self._route_frame(route)
        source = frame.source(self.source.encode(text))
        return read_pair(self.engine, self.folder, frame, source, target, options)

    def _route_frame(self, route: Route) -> Frame:
        """Of the last direction of a route."""
        return self._frame(route.into[-1], None if self.routes.detector is not None else route.here)

    def _translate_direct(
        self, texts: Sequence[str], indices: Sequence[int], frame: Frame, settings: _Settings
    ) -> list[Translation]:
        """From one language into another; `indices`: of the texts in the whole request."""
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
        spans = [_localized_spans(chunk.spans, here, there) for chunk in chunks]
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
            text = self._text(found)
            if protect:
                text = put_right(source, text, here, there)
            return text if settings.write is None else settings.write(text)

        def force(texts: list[str], keys: list[tuple[int, ...]], phrases: list[Counter[str]]) -> list[list[Hypothesis]]:
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
        return [self._assemble(split, list(islice(found, len(split.chunks))), settings, aligner) for split in splits]

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
        self._resolve_languages(to, options.get("from_"))
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
        return score_targets(self, sources, targets, self.frame(to, from_), context, target_context)

    def judge(
        self, examples: Sequence[Pair], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        """BLEU and chrF from 0 to 100, and the percentage of exact matches; with several directions, their mean."""
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

    def _resolve_languages(self, to: str | None, from_: str | None) -> tuple[str | None, str | None]:
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
        self._frame(to, from_)
        return to, from_

    def _frame(self, to: str | None, from_: str | None) -> Frame:
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

    def _text(self, found: Hypothesis) -> str:
        return drop_invalid(one_line(self.target.decode(found.tokens)))

    def _assemble(
        self, split: SplitText, answers: list[list[Answer]], settings: _Settings, aligner: Aligner
    ) -> Translation:
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
        known = self.folder.confidence if settings.protect and firsts else None
        evidence, sure = [], []
        for chunk, answer in zip(split.chunks, firsts, strict=True):
            notes += self._notes(chunk, answer, settings.protect)
            if known is not None:
                evidence.append(evidence_of(chunk, answer))
                sure.append(known.sentence(evidence[-1], settings.direction))
                notes += confidence_notes(chunk.text, sure[-1]) if evidence[-1].finished else []
        words = None
        if settings.words and known is not None:
            words = [
                word
                for answer, at, sentence in zip(firsts, offsets[0], sure, strict=True)
                for word in words_of(answer, at, candidates[0].text, self.target, known, sentence)
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

    def _notes(self, chunk: Chunk, answer: Answer, natural: bool) -> list[str]:
        """What the reader of a translation should know or doubt. `natural`: the texts are in natural languages."""
        found = [part.hypothesis for part in answer.parts]
        notes = [_unfinished_note(chunk, one) for one in found if not one.finished]
        for one in found:
            notes += invalid_notes(chunk.text, self.target.decode(one.tokens))
        if natural:
            notes += number_notes(chunk.text, answer.text)
        if natural and self.folder.confidence is None and all(one.finished for one in found):
            notes += score_notes(chunk.text, [log_prob for one in found for log_prob in one.log_probs])
        return notes


def _localized_spans(spans: Mapping[str, Span], here: str, there: str) -> Mapping[str, Span]:
    """With numbers as the target language writes them."""
    if not any(span.kind.name in VALUED for span in spans.values()):
        return spans
    return {
        symbol: replace(span, target=localized_text(span.text, here, there)) if span.kind.name in VALUED else span
        for symbol, span in spans.items()
    }


def _untranslated(text: str, route: list[str], language: str | None, settings: _Settings) -> Translation:
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
    """Whether it ends with the same few tokens, repeated `times` times."""
    return any(
        len(tokens) >= times * size and list(tokens[-size:]) * times == list(tokens[-size * times :])
        for size in range(1, longest + 1)
    )
