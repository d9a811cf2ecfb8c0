"""Text in, text out: lines and whitespace are kept, long texts are split and joined, nothing is cut silently."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, overload

from allyouneed.config import tree_of
from allyouneed.data.files.pairs import Pair
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError, near
from allyouneed.evaluate.translation import TranslationScores, evaluate
from allyouneed.folder import Folder
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import Judged, Predictor, checked, spread
from allyouneed.infer.speculative.decode import DraftStats, check_draft_options, total_stats
from allyouneed.infer.speculative.drafts import Draft, draft_for
from allyouneed.infer.translation.alignment import attention
from allyouneed.infer.translation.frames import Frame, guessing, plain_frame, write
from allyouneed.infer.translation.routes import Route, Routes
from allyouneed.infer.translation.split import Cutter, Piece, Plan, quoted

TOGETHER = 64
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Candidate:
    """One whole translation; `score` is the mean of its parts' scores (log-probability over length penalty)."""

    text: str
    score: float


@dataclass(frozen=True)
class Link:
    """A target token and the source token it looked at most, as text and as places in the two whole texts."""

    source: str
    target: str
    source_span: tuple[int, int]
    target_span: tuple[int, int]


@dataclass(frozen=True)
class Translation:
    """A translation and all there is to say about it."""

    source: str
    candidates: list[Candidate]  # best first
    notes: list[str] = field(default_factory=list)  # what a reader should know: splits, missing ends
    alignment: list[Link] | None = None  # of the best candidate, when asked for
    route: list[str] = field(default_factory=list)  # the languages it went through, of a model that tells them apart
    guesses: DraftStats | None = None  # how often a draft was right, where there was one

    @property
    def text(self) -> str:
        return self.candidates[0].text

    @property
    def score(self) -> float:
        return self.candidates[0].score


class Translator(Predictor):
    """Translates with a model folder.

    A line is translated whole while it has at most `together` tokens, or is one sentence of at most `max_tokens`;
    otherwise sentence by sentence. A sentence of more than `max_tokens` (what the model was trained for) is translated
    in parts, and a note says so.
    """

    def __init__(self, folder: Folder, max_tokens: int | None = None, together: int | None = None) -> None:
        super().__init__(folder)
        self._places: int | None = getattr(getattr(self.model, "embed", None), "limit", None)
        trained = max_tokens or folder.max_tokens
        self.max_tokens = trained if self._places is None else min(trained, self._places)
        whole = next(number for number in (together, folder.together, TOGETHER) if number is not None)
        self.together = min(whole, self.max_tokens)
        self.routes = Routes(folder.directions, folder.detector)

    @property
    def source(self) -> Tokenizer:
        return self.folder.tokenizers.source

    @property
    def target(self) -> Tokenizer:
        return self.folder.tokenizers.target

    @property
    def languages(self) -> list[str]:
        """The languages `to` may name; none for a model that knows only one."""
        return sorted(self.source.languages)

    @overload
    def translate(self, texts: str, to: str | None = None, **options: Any) -> str: ...

    @overload
    def translate(self, texts: Sequence[str], to: str | None = None, **options: Any) -> list[str]: ...

    def translate(self, texts: str | Sequence[str], to: str | None = None, **options: Any) -> str | list[str]:
        """The translation of a text, or of each text of a list. `options` are those of `translate_full`: `beam=1`, …"""
        many = [texts] if isinstance(texts, str) else texts
        found = [full.text for full in self.translate_full(many, to, **options)]
        return found[0] if isinstance(texts, str) else found

    def translate_full(
        self,
        texts: Sequence[str],
        to: str | None = None,
        *,
        from_: str | None = None,
        decoding: Decoding | None = None,
        align: bool = False,
        on_progress: Progress | None = None,
        first: int = 0,
        draft: Any = None,
        ahead: int | None = None,
        **changes: Any,
    ) -> list[Translation]:
        """Translations with scores, the n best (`best=5`), notes and, with `align`, who looked at whom.

        A model with a detector sees by itself which language a text is in, and chooses the one to translate into when
        `to` does not. `first` is the place of the first text in a longer request; samples depend on it and on the seed
        alone. `draft`: a smaller model, or "lookup", that guesses `ahead` tokens at a time, so that they come sooner.
        """
        texts = checked(texts, "translate_full")
        self._checked(to, from_)
        defaults = self.folder.decoding if decoding is None else tree_of(decoding)
        settled = Decoding.of(defaults, **changes)
        guesser = draft_for(self, draft, ahead, guessing)
        if guesser is not None:
            check_draft_options(settled)
        ways: dict[Route, list[int]] = {}
        for number, text in enumerate(texts):
            ways.setdefault(self.routes.of(text, to, from_), []).append(number)
        found: dict[int, Translation] = {}
        for way, numbers in ways.items():
            some, places = [texts[number] for number in numbers], [first + number for number in numbers]
            found |= zip(numbers, self._along(way, some, places, settled, align, on_progress, guesser), strict=True)
        for number, text in enumerate(texts):
            if self.routes.detector is not None and from_ is None and self.routes.detector.is_unfamiliar(text):
                known = ", ".join(self.routes.detector.languages)
                note = f"{quoted(text)}: is written as none of its languages is ({known})"
                found[number] = replace(found[number], notes=[note, *found[number].notes])
        return [found[number] for number in range(len(texts))]

    def _along(
        self,
        way: Route,
        texts: Sequence[str],
        places: list[int],
        settled: Decoding,
        align: bool,
        on_progress: Any,
        draft: Draft | None,
    ) -> list[Translation]:
        """Texts of one route: left alone, translated, or translated again from the best translation into another."""
        route = way.named if self.routes.detector is not None else []
        if not way.into:
            note = f"is in {way.here} already"
            return [
                Translation(t, [Candidate(t, 0.0)], [f"{quoted(t)}: {note}"], [] if align else None, route)
                for t in texts
            ]
        if align and len(way.into) > 1:
            raise UserError(f"alignment is of one step, and this goes {' → '.join(route)}; name another --to")
        asked = list(texts)
        notes: list[list[str]] = [[] for _ in texts]
        for there in way.into[:-1]:
            once = settled.model_copy(update={"best": 1})
            hop = self._hop(asked, places, self._frame(there, None), once, draft=draft)
            asked, notes = [one.text for one in hop], [one.notes for one in hop]
        frame = self._frame(way.into[-1], None if self.routes.detector is not None else way.here)
        last = self._hop(asked, places, frame, settled, align, on_progress, draft)
        return [
            replace(one, source=text, notes=[*said, *one.notes], route=route)
            for text, said, one in zip(texts, notes, last, strict=True)
        ]

    def _hop(
        self,
        texts: Sequence[str],
        numbers: Sequence[int],
        frame: Frame,
        settled: Decoding,
        align: bool = False,
        on_progress: Progress | None = None,
        draft: Draft | None = None,
    ) -> list[Translation]:
        """From one language into another; `numbers`: the places of the texts in the whole request."""
        plans = Cutter(self.source, self.max_tokens, self.together, frame.marks).plans(texts)
        pieces = [piece for plan in plans for piece in plan.pieces]
        places = [
            (number, part) for number, plan in zip(numbers, plans, strict=True) for part in range(len(plan.pieces))
        ]
        encoded = self.source.encode_batch([piece.text for piece in pieces])
        sources = [frame.source(ids) for ids in encoded]
        both, options = self.folder.tokenizers, {"on_progress": on_progress, "sample_keys": places, "draft": draft}
        answers = iter(write(self.model, both, frame, sources, settled, self._places, self.exact, **options))
        return [self._assembled(p, list(islice(answers, len(p.pieces))), settled.best, frame, align) for p in plans]

    def translate_stream(
        self, texts: Iterable[str], to: str | None = None, *, chunk: int = 1000, **options: Any
    ) -> Iterator[Translation]:
        """Any number of texts, e.g. the lines of a file, in order; at most `chunk` of them are held at a time."""
        self._checked(to, options.get("from_"))
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise UserError(f"texts come one by one from a list, a file or the like, not from {type(texts).__name__}")
        return self._stream(iter(texts), to, chunk, options)

    def _stream(
        self, texts: Iterator[str], to: str | None, chunk: int, options: dict[str, Any]
    ) -> Iterator[Translation]:
        first = 0
        while held := list(islice(texts, chunk)):
            yield from self.translate_full(held, to, first=first, **options)
            first += len(held)

    def judge(
        self, examples: Sequence[Pair], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> Judged:
        """BLEU and chrF from 0 to 100, and which share is exactly right, in per cent."""
        found = [""] * len(examples)
        several: dict[str, TranslationScores] = {}
        for way in dict.fromkeys((pair.from_, pair.to) for pair in examples):
            numbers = [n for n, pair in enumerate(examples) if (pair.from_, pair.to) == way]
            here = way[0] if self.routes.detector is not None else None  # else it changes nothing
            texts = self.translate([examples[n].source for n in numbers], way[1], from_=here, decoding=decoding)
            for n, text in zip(numbers, texts, strict=True):
                found[n] = text
            name, targets = "-".join(filter(None, way)), [examples[n].target for n in numbers]
            several[name] = evaluate(texts, targets, way[1], resamples=resamples)
        samples = [
            {"source": pair.source, "reference": pair.target, "hypothesis": text}
            for pair, text in spread(list(zip(examples, found, strict=True)), show)
        ]
        every = [{"bleu": one.bleu, "chrf": one.chrf, "exact": 100 * one.exact} for one in several.values()]
        figures = {name: sum(one[name] for one in every) / len(every) for name in every[0]}  # of all directions alike
        if len(several) == 1:
            return Judged(figures, next(iter(several.values())).text(), samples)
        figures |= {f"bleu/{name}": one.bleu for name, one in several.items()}
        return Judged(figures, "\n".join(f"{name}\n{one.text()}" for name, one in several.items()), samples)

    def _checked(self, to: str | None, from_: str | None) -> None:
        """Refuse languages the model does not know, before anything is translated."""
        detector = self.routes.detector
        if detector is None:
            self._frame(to, from_)
            return
        unknown = from_ is not None and from_ not in detector.languages
        if unknown and to is None:
            names = detector.languages
            raise UserError(
                f"this model does not translate from {from_!r}{near(from_, names)}; it knows: {', '.join(names)}"
            )
        if to is not None:
            self._frame(to, from_ if unknown else None)

    def _frame(self, to: str | None, from_: str | None) -> Frame:
        """What stands around every source, and how its target begins, for these languages."""
        known, plain = self.languages, plain_frame(self.folder.tokenizers)
        if self.source.template.language is not None:
            return self._spoken(plain, to, from_)
        if not known:
            if to is not None or from_ is not None:
                raise UserError(f"this model translates into one language only; leave out {to or from_!r}")
            return plain
        if to is None and len(known) > 1:
            raise UserError(f"this model translates into several languages; say which: {', '.join(known)}")
        to = to or known[0]
        if to not in known:
            raise UserError(f"this model does not translate into {to!r}{near(to, known)}; it knows: {', '.join(known)}")
        sources = sorted({source for source, target in self.folder.directions if source and target == to})
        if from_ is not None and from_ not in sources:
            meant = near(from_, sources)
            raise UserError(
                f"this model has not learned to translate from {from_!r} into {to!r}{meant}; from: {sources}"
            )
        return replace(plain, before=(*plain.before, self.source.language(to)))

    def _spoken(self, plain: Frame, to: str | None, from_: str | None) -> Frame:
        """A model that hears which language a source is in, and begins with the one it is to say."""
        source, codes = self.source, set(self.source.languages.values())
        begins = next((number for number in (*plain.forced, *plain.opening) if number in codes), None)
        here = source.template.spoken if from_ is None else source.language(from_)
        there = begins if to is None else source.language(to)
        if here is None or there is None:
            what = 'which language a text is in (from_="…")' if here is None else 'which to translate into (to="…")'
            raise UserError(f"this model knows {len(codes)} languages; say {what}: {', '.join(self.languages)}")
        if plain.opening[0] in codes:  # the language itself is where it starts
            plain = replace(plain, opening=(there,), forced=())
        else:
            plain = replace(plain, forced=(there,))
        if source.template.language == "before":
            return replace(plain, before=(here, *plain.before))
        return replace(plain, after=(*plain.after, here))

    def _assembled(
        self, plan: Plan, answers: list[list[Hypothesis]], best: int, frame: Frame, align: bool
    ) -> Translation:
        chosen: list[tuple[float, list[int]]] = [(0.0, [])]  # the best ways to combine the pieces' hypotheses
        for hypotheses in answers:
            ways = [(s + h.score, [*ranks, r]) for s, ranks in chosen for r, h in enumerate(hypotheses)]
            chosen = sorted(ways, key=lambda way: -way[0])[:best]
        texts = [[_one_line(t) for t in self.target.decode_batch([h.tokens for h in hs])] for hs in answers]
        candidates, places = [], []
        for total, ranks in chosen:
            text, starts = plan.joined([piece[rank] for piece, rank in zip(texts, ranks, strict=True)])
            candidates.append(Candidate(text, total / max(1, len(answers))))
            places.append(starts)
        firsts = [hypotheses[rank] for hypotheses, rank in zip(answers, chosen[0][1], strict=True)]
        notes = plan.notes + [_unfinished(p, h) for p, h in zip(plan.pieces, firsts, strict=True) if not h.finished]
        links = self._links(plan, firsts, places[0], candidates[0].text, frame) if align else None
        return Translation(plan.source, candidates, notes, links, guesses=total_stats(answers))

    def _links(self, plan: Plan, answers: list[Hypothesis], starts: list[int], text: str, frame: Frame) -> list[Link]:
        """The source token (not the marks around the sentence) that weighs most for each target token."""
        links = []
        for piece, answer, at in zip(plan.pieces, answers, starts, strict=True):
            heard = self.source.encode(piece.text)
            if not heard or not answer.tokens:
                continue
            said = [*frame.begin, *answer.tokens[:-1]]
            (weights,) = attention(self.model, [frame.source(heard)], [said], self.source.pad)
            first = len(frame.before)
            looks = weights[len(frame.begin) - 1 :, first : first + len(heard)].argmax(-1).tolist()
            spans = self.source.spans(piece.text)
            for look, (begin, end) in zip(looks, self._target_spans(answer.tokens), strict=True):
                left, right = (place + piece.start for place in spans[look])
                if begin < end:
                    here = (at + begin, at + end)
                    links.append(Link(plan.source[left:right], text[slice(*here)], (left, right), here))
        return links

    def _target_spans(self, ids: list[int]) -> list[tuple[int, int]]:
        """The characters of the stripped text each token stands for; tokens that share a character share its place."""
        whole = self.target.decode(ids)
        size = len(_one_line(whole))
        shift = len(whole) - len(whole.lstrip())
        ends = [len(self.target.decode(ids[: n + 1]).rstrip("\ufffd")) for n in range(len(ids))]
        ends[-1] = len(whole)
        spans, begin = [], 0
        for n, end in enumerate(ends):
            reach = next((e for e in ends[n:] if e > begin), begin)
            spans.append((min(max(begin - shift, 0), size), min(max(reach - shift, 0), size)))
            begin = max(begin, end)
        return spans


def _one_line(text: str) -> str:
    """A piece holds no line break, so its translation gets none: lines stay lines."""
    return re.sub(r"[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]", " ", text).strip()


def _unfinished(piece: Piece, answer: Hypothesis) -> str:
    if answer.repeats:
        return (
            f"{quoted(piece.text)}: repeats itself; stopped after {len(answer.tokens)} tokens (loops=0 lets it go on)"
        )
    loops = "; it repeats itself" if repeats(answer.tokens) else ""
    return f"{quoted(piece.text)}: stopped after {len(answer.tokens)} tokens without coming to an end{loops}"


def repeats(tokens: Sequence[int], times: int = 4, longest: int = 10) -> bool:
    """Does it end with the same few tokens, `times` times over?"""
    return any(
        len(tokens) >= times * size and list(tokens[-size:]) * times == list(tokens[-size * times :])
        for size in range(1, longest + 1)
    )
