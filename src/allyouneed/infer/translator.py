"""Text in, text out: lines and whitespace are kept, long texts are split and joined, nothing is cut silently."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, overload

from allyouneed.config import tree_of
from allyouneed.data.pairs import Pair
from allyouneed.errors import UserError
from allyouneed.evaluate.translation import evaluate
from allyouneed.folder import Folder
from allyouneed.infer.alignment import attention
from allyouneed.infer.decoding import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.pieces import Cutter, Piece, Plan, quoted
from allyouneed.infer.predictor import Judged, Predictor, spread
from allyouneed.infer.search import Hypothesis

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

    def __init__(self, folder: Folder, max_tokens: int | None = None, together: int = TOGETHER) -> None:
        super().__init__(folder)
        self.source, self.target = folder.vocabularies.source, folder.vocabularies.target
        limit: int | None = getattr(getattr(self.model, "embed", None), "limit", None)
        trained = max_tokens or folder.max_tokens
        self.max_tokens = trained if limit is None else min(trained, limit)
        self.together = min(together, self.max_tokens)
        specials = [self.target.pad, self.target.bos, *self.target.languages.values()]
        self.engine = Engine(self.model, self.target.bos, self.target.eos, self.source.pad, specials, limit)

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
        **changes: Any,
    ) -> list[Translation]:
        """Translations with scores, the n best (`best=5`), notes and, with `align`, who looked at whom.

        `first` is the place of the first text in a longer request; samples depend on it and on the seed alone.
        """
        if isinstance(texts, str):
            raise UserError("translate_full takes a list of texts; write [text] for a single one")
        start = self._start(to, from_)
        defaults = self.folder.decoding if decoding is None else tree_of(decoding)
        settled = Decoding.of(defaults, **changes)
        plans = Cutter(self.source, self.max_tokens, self.together, len(start) + 1).plans(texts)
        pieces = [piece for plan in plans for piece in plan.pieces]
        places = [(first + number, part) for number, plan in enumerate(plans) for part in range(len(plan.pieces))]
        encoded = self.source.encode_batch([piece.text for piece in pieces])
        sources = [[*start, *ids, self.source.eos] for ids in encoded]
        answers = iter(self.engine.generate(sources, settled, on_progress=on_progress, places=places))
        return [self._assembled(p, list(islice(answers, len(p.pieces))), settled.best, start, align) for p in plans]

    def translate_stream(
        self, texts: Iterable[str], to: str | None = None, *, chunk: int = 1000, **options: Any
    ) -> Iterator[Translation]:
        """Any number of texts, e.g. the lines of a file, in order; at most `chunk` of them are held at a time."""
        self._start(to, options.get("from_"))
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
        for to in dict.fromkeys(pair.to for pair in examples):
            numbers = [n for n, pair in enumerate(examples) if pair.to == to]
            texts = self.translate([examples[n].source for n in numbers], to, decoding=decoding)
            for n, text in zip(numbers, texts, strict=True):
                found[n] = text
        languages = {pair.to for pair in examples}
        language = languages.pop() if len(languages) == 1 else None
        scores = evaluate(found, [pair.target for pair in examples], language, resamples=resamples)
        samples = [
            {"source": pair.source, "reference": pair.target, "hypothesis": text}
            for pair, text in spread(list(zip(examples, found, strict=True)), show)
        ]
        figures = {"bleu": scores.bleu, "chrf": scores.chrf, "exact": 100 * scores.exact}
        return Judged(figures, scores.text(), samples)

    def _start(self, to: str | None, from_: str | None) -> list[int]:
        """The tokens before every source: the language that is wanted, for a model that knows languages by name."""
        known = self.languages
        if not known:
            if to is not None or from_ is not None:
                raise UserError(f"this model translates into one language only; leave out {to or from_!r}")
            return []
        if to is None and len(known) > 1:
            raise UserError(f"this model translates into several languages; say which: {', '.join(known)}")
        to = to or known[0]
        if to not in known:
            raise UserError(f"this model does not translate into {to!r}; it knows: {', '.join(known)}")
        sources = sorted({source for source, target in self.folder.directions if source and target == to})
        if from_ is not None and from_ not in sources:
            raise UserError(f"this model has not learned to translate from {from_!r} into {to!r}; from: {sources}")
        return [self.source.language(to)]

    def _assembled(
        self, plan: Plan, answers: list[list[Hypothesis]], best: int, start: list[int], align: bool
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
        links = self._links(plan, firsts, places[0], candidates[0].text, start) if align else None
        return Translation(plan.source, candidates, notes, links)

    def _links(
        self, plan: Plan, answers: list[Hypothesis], starts: list[int], text: str, start: list[int]
    ) -> list[Link]:
        """The source token (not the marks around the sentence) that weighs most for each target token."""
        links = []
        for piece, answer, at in zip(plan.pieces, answers, starts, strict=True):
            heard = self.source.encode(piece.text)
            if not heard or not answer.tokens:
                continue
            source = [*start, *heard, self.source.eos]
            (weights,) = attention(self.model, [source], [[self.target.bos, *answer.tokens[:-1]]], self.source.pad)
            looks = weights[:, len(start) : len(start) + len(heard)].argmax(-1).tolist()
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
    loops = "; it repeats itself" if repeats(answer.tokens) else ""
    return f"{quoted(piece.text)}: stopped after {len(answer.tokens)} tokens without coming to an end{loops}"


def repeats(tokens: Sequence[int], times: int = 4, longest: int = 10) -> bool:
    """Does it end with the same few tokens, `times` times over?"""
    return any(
        len(tokens) >= times * size and list(tokens[-size:]) * times == list(tokens[-size * times :])
        for size in range(1, longest + 1)
    )
