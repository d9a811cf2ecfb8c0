"""Carry protected spans (spans.py) through a model that was not trained with placeholders.

The model reads a stand-in for a span that is a noun in its sentence: a name it copies reliably. Whether it came back,
exactly once, is checked; if not, another one is tried, and at last the pieces around the span are translated one by
one. So no span is ever lost or doubled. Marks (tags, emoji) are not read at all, and are inserted by cross-attention.

The terms of a glossary are nouns as well, but a model that was trained with marked terms reads those first
(term_marks.py). If its answer lacks a translation, it is decoded once more, forced to contain it (decoding/phrases.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from allyouneed.apps.translate.glossary import count_term, find_term
from allyouneed.apps.translate.numbers.numbers import has_quantity
from allyouneed.apps.translate.spans.markup import Mark, place
from allyouneed.apps.translate.spans.spans import MARK, NOUN, NUMBER_SPAN, SYMBOL, TERM, Span, restore, written
from allyouneed.apps.translate.spans.term_marks import MARKED, MARKS, add_term, with_translations
from allyouneed.apps.translate.splitting.edits import Edit, apply, in_order
from allyouneed.data.languages import EAST_ASIAN
from allyouneed.infer.decoding.base import Hypothesis

# All forms of a stand-in are the same to the check: a model may write it in the script of the target language. Measured
# with the shipped model (docs/translator.md): each comes back exactly once in 96 to 100 % of sentences.
THINGS = (
    ("Facebook",),
    ("Tom", "汤姆", "湯姆"),
    ("Boston", "波士顿", "波士頓"),
    ("Paris", "巴黎"),
    ("Tatoeba",),
    ("Tokyo", "东京", "東京", "Tokio"),
)
PEOPLE = (THINGS[1], THINGS[0], *THINGS[2:])  # for `{name}`, `@name`, `name@example.com`
FIGURES = (("300",), ("47",), ("13",), ("2019",), ("1987",), ("250",), ("1864",), ("90",))
PERSONAL = {"placeholder", "mention", "e-mail"}
ATTEMPTS = 3
MARKED_ATTEMPTS = 2  # with marked terms: free, and forced to contain their translations
PUNCTUATION = " \t\u3000,.;:!?，。；：！？、)]}）】」』》”’\"'([{（【「『《“‘"
VALUED = {"number", "number with unit", "amount"}  # may be written otherwise in the target, but for value and unit
LETTER = "A-Za-zÀ-ɏ"
T = TypeVar("T")
Force = Callable[[list[str], list[tuple[int, ...]], list[Counter[str]]], list[list[Hypothesis]]]
END = re.compile(r"[.。!！?？]$")


@dataclass(frozen=True)
class PreparedTemplate:
    """A template as the model reads it: `text`. `edits` turn it into the source again; `forms`: of the stand-in of each
    span; `kept`: numbers that are read as they are; `marks`: what was taken out; `terms`: those that are read with
    their translation; `forced`: the answer must contain it."""

    text: str
    edits: list[Edit]
    forms: dict[str, tuple[str, ...]] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    terms: list[str] = field(default_factory=list)
    forced: bool = False

    def translations(self, spans: Mapping[str, Span]) -> Counter[str]:
        """The translations of the marked terms, and how often each must be there."""
        return Counter(spans[symbol].written for symbol in self.terms)


class DecodedPart(NamedTuple):
    """One text that the model read, and its answer. `source`, `target`: where their first characters are in the chunk
    and in its translation; the edits: how they got there from what was read and generated."""

    reading: PreparedTemplate
    hypothesis: Hypothesis
    source: int
    target: int
    edits: list[Edit]


class ChunkTranslation(NamedTuple):
    """A translation of a chunk; `parts`: one, or several if it was translated in pieces."""

    text: str
    score: float
    parts: list[DecodedPart]


class AttentionMap(NamedTuple):
    """Cross-attention of an answer (target tokens, source tokens), and the (begin, end) characters of the tokens."""

    weights: Tensor
    source: list[tuple[int, int]]
    target: list[tuple[int, int]]


@dataclass(frozen=True)
class Carrier:
    """`decode(texts, keys)`: the hypotheses of each text, best first; `text_of(text, hypothesis)`: its translation.
    `attention(pairs)`: of texts and their hypotheses; None, if the model has none to place marks by. `force(texts,
    keys, phrases)`: decodes texts with marked terms so that each has its phrases, as often as counted; None: the model
    was not trained with marked terms."""

    decode: Callable[[list[str], list[tuple[int, ...]]], list[list[Hypothesis]]]
    text_of: Callable[[str, Hypothesis], str]
    attention: Callable[[Sequence[tuple[str, Hypothesis]]], list[AttentionMap]] | None
    force: Force | None = None

    def translate(
        self, templates: Sequence[str], spans: Sequence[Mapping[str, Span]], keys: Sequence[tuple[int, ...]]
    ) -> list[list[ChunkTranslation]]:
        """The answers for each template, best first. A template without spans is decoded once, as it is."""
        found: dict[int, list[ChunkTranslation]] = {}
        inexact: dict[int, list[ChunkTranslation]] = {}  # all spans are there but the value of a plain number
        waiting = list(range(len(templates)))
        for attempt in range(ATTEMPTS + MARKED_ATTEMPTS * (self.force is not None)):
            readings = {n: r for n in waiting if (r := self._read(templates[n], spans[n], attempt)) is not None}
            decoded = self._decode(readings, spans, keys)
            every = [(readings[n], one, spans[n]) for n, some in decoded.items() for one in some]
            answered = iter(self._answers(every))
            for n, hypotheses in decoded.items():
                answers = list(islice(answered, len(hypotheses)))
                if answers[0] is not None and answers[0][1]:
                    found[n] = [answer[0] for answer in answers if answer is not None and answer[1]]
                elif answers[0] is not None and n not in inexact:
                    inexact[n] = [answer[0] for answer in answers if answer is not None]
            waiting = [n for n in waiting if n not in found]
            if not waiting:
                break
        found |= {n: inexact[n] for n in waiting if n in inexact}
        waiting = [n for n in waiting if n not in found]
        return self._with_pieces(found, waiting, templates, spans, keys)

    def _read(self, template: str, spans: Mapping[str, Span], attempt: int) -> PreparedTemplate | None:
        """What the model reads in this attempt; None: there is nothing left to try."""
        if not spans or not SYMBOL.search(template):
            return PreparedTemplate(template, []) if attempt == 0 else None
        if self.attention is None and re.search(MARK, template):
            return None
        terms = [spans[char] for char in template if char in spans and spans[char].kind is TERM]
        if self.force is not None and terms and not any(MARKS.search(one.text + one.written) for one in terms):
            if attempt < MARKED_ATTEMPTS:
                found = read(template, spans, attempt, marked=True)
                return found and replace(found, forced=attempt > 0)
            attempt -= MARKED_ATTEMPTS
        return read(template, spans, attempt) if attempt < ATTEMPTS else None

    def _decode(
        self,
        readings: Mapping[int, PreparedTemplate],
        spans: Sequence[Mapping[str, Span]],
        keys: Sequence[tuple[int, ...]],
    ) -> dict[int, list[Hypothesis]]:
        """The hypotheses of each reading, by its number."""
        free = [n for n, reading in readings.items() if not reading.forced]
        bound = [n for n, reading in readings.items() if reading.forced]
        decoded = self.decode([readings[n].text for n in free], [keys[n] for n in free])
        if self.force is not None and bound:
            phrases = [readings[n].translations(spans[n]) for n in bound]
            decoded = decoded + self.force([readings[n].text for n in bound], [keys[n] for n in bound], phrases)
        return dict(zip(free + bound, decoded, strict=True))

    def _answers(
        self, decoded: Sequence[tuple[PreparedTemplate, Hypothesis, Mapping[str, Span]]]
    ) -> list[tuple[ChunkTranslation, bool] | None]:
        """Each answer with its spans, and whether all plain numbers are right; None if a span is lost or doubled."""
        checked = [self._check(*one) for one in decoded]
        marked = [n for n, (reading, *_) in enumerate(decoded) if reading.marks and checked[n] is not None]
        places: dict[int, AttentionMap] = {}
        if marked:
            assert self.attention is not None
            pairs = [(reading.text, found) for reading, found, _ in (decoded[n] for n in marked)]
            places = dict(zip(marked, self.attention(pairs), strict=True))
        answers: list[tuple[ChunkTranslation, bool] | None] = []
        for n, ((reading, found, spans), one) in enumerate(zip(decoded, checked, strict=True)):
            if one is None:
                answers.append(None)
                continue
            text, edits, exact = one
            if n in places:
                attention = _aligned(places[n], reading, text, spans) if reading.terms else places[n]
                edits += _outside(place(text, reading.marks, spans, *attention), edits)
            edits = in_order(edits)
            answers.append(
                (ChunkTranslation(apply(text, edits), found.score, [DecodedPart(reading, found, 0, 0, edits)]), exact)
            )
        return answers

    def _check(
        self, reading: PreparedTemplate, found: Hypothesis, spans: Mapping[str, Span]
    ) -> tuple[str, list[Edit], bool] | None:
        """The text of an answer, the edits that put its spans in the place of their stand-ins, and whether all plain
        numbers are right; None if a span is lost or doubled."""
        text = self.text_of(with_translations(reading.text), found)
        if reading.terms and MARKS.search(text):
            return None
        if any(count_term(term, text) < times for term, times in reading.translations(spans).items()):
            return None
        edits = []
        for symbol, forms in reading.forms.items():
            places = list(_pattern(forms).finditer(text))
            if len(places) != 1:
                return None
            edits.append(_spaced(text, *places[0].span(), spans[symbol].written))
        exact = True
        for symbol in reading.kept:
            span = spans[symbol]
            there = has_quantity(span.read, text) if span.kind.name in VALUED else text.count(span.text) == 1
            if not there and span.kind.name != "number":
                return None
            exact = exact and there
        return text, edits, exact

    def _with_pieces(
        self,
        found: dict[int, list[ChunkTranslation]],
        waiting: Sequence[int],
        templates: Sequence[str],
        spans: Sequence[Mapping[str, Span]],
        keys: Sequence[tuple[int, ...]],
    ) -> list[list[ChunkTranslation]]:
        """Translate what is between the spans of these templates, and join it."""
        whole = {n: _pieces(templates[n], spans[n], self.attention is not None) for n in waiting}
        jobs = [(n, k, piece) for n in waiting for k, piece in enumerate(whole[n][0])]
        readings = [_kept(read(piece.template, spans[n], 0)) for n, _, piece in jobs]
        decoded = self.decode([one.text for one in readings], [(*keys[n], k) for n, k, _ in jobs])
        texts, parts = dict.fromkeys(waiting, ""), {n: list[DecodedPart]() for n in waiting}
        firsts = [(one, some[0], spans[n]) for (n, *_), one, some in zip(jobs, readings, decoded, strict=True)]
        for (n, _, piece), found_answer in zip(jobs, self._answers(firsts), strict=True):
            answer, _ = _kept(found_answer)
            words = answer.text if END.search(piece.template) else END.sub("", answer.text)
            wide = EAST_ASIAN.search(templates[n]) is not None
            texts[n] = _join(_join(texts[n], piece.before, wide), words, wide)
            parts[n].append(answer.parts[0]._replace(source=piece.source, target=len(texts[n]) - len(words)))
        for n in waiting:
            scores = [part.hypothesis.score for part in parts[n]]
            text = _join(texts[n], whole[n][1], EAST_ASIAN.search(templates[n]) is not None)
            found[n] = [ChunkTranslation(text, sum(scores) / max(1, len(scores)), parts[n])]
        return [found[n] for n in range(len(templates))]


def read(template: str, spans: Mapping[str, Span], attempt: int = 0, marked: bool = False) -> PreparedTemplate | None:
    """What the model reads for a template: stand-ins for nouns, numbers as they are (at first), no marks. `marked`:
    terms with their translations. None: there are not enough stand-ins that the text itself does not contain."""
    words = SYMBOL.sub(lambda one: _words_read(spans[one[0]], marked), template)
    free = {group: _free(group, words.casefold(), attempt) for group in (THINGS, PEOPLE, FIGURES)}
    made = PreparedTemplate("", [])
    text, swallow = "", False
    parts = re.split(f"({SYMBOL.pattern})", template)
    for number, part in enumerate(parts):
        if number % 2 == 0:
            text += part[swallow:]
            swallow = False
            continue
        span = spans[part]
        if span.kind.role == "mark":
            after = parts[number + 1][:1]
            text, swallow = _take_out(made, text, part, span.text, after)
        elif (
            span.kind.role == "number"
            and attempt == 0
            and (any(map(str.isdigit, span.text)) or span.kind.name == "amount")
            and span.kind.name != "count"
        ):
            made.kept.append(part)
            if span.read != span.text:
                made.edits.append(Edit(len(text), len(text) + len(span.read), span.text))
            text += span.read
        elif marked and span.kind is TERM:
            text = _mark_term(made, text, part, span)
        else:
            group = FIGURES if span.kind.role == "number" else PEOPLE if span.kind.name in PERSONAL else THINGS
            used = set(made.forms.values())
            forms = next((one for one in free[group] if one not in used), None)
            if forms is None:
                return None
            made.forms[part] = forms
            made.edits.append(Edit(len(text), len(text) + len(forms[0]), span.text))
            text += forms[0]
    return replace(made, text=text)


def _words_read(span: Span, marked: bool) -> str:
    """What the model may read of a span."""
    if marked and span.kind is TERM:
        return f" {span.text} {span.written} "
    return f" {span.read} " if span.kind.role == "number" else " "


def _free(group: tuple[tuple[str, ...], ...], words: str, attempt: int) -> list[tuple[str, ...]]:
    """The stand-ins that a text does not contain itself, other ones first in every attempt."""
    free = [forms for forms in group if not any(form.casefold() in words for form in forms)]
    return free[attempt:] + free[:attempt]


def _mark_term(made: PreparedTemplate, text: str, symbol: str, span: Span) -> str:
    """`text` with a marked term after it. The space before a term moves into its mark, unless another mark was taken
    out after the space."""
    fixed = bool(made.marks) and made.marks[-1].offset == len(text)
    whole = text + add_term("", span.text, span.written) if fixed else add_term(text, span.text, span.written)
    start = len(text) - (text.endswith(" ") and not fixed)
    made.edits.append(Edit(start, len(whole), text[start:] + span.text))
    made.terms.append(symbol)
    return whole


def _take_out(made: PreparedTemplate, text: str, symbol: str, mark: str, after: str) -> tuple[str, bool]:
    """Leave a mark out after `text`, with the space that it would leave doubled or before punctuation; the text, and
    whether the space after the mark is left out."""
    left, right = text[-1:].isspace(), after.isspace()
    if left and right:
        made.edits.append(Edit(len(text), len(text), mark + after))
    elif left and after and not after.isalnum() and (not made.edits or made.edits[-1].end < len(text)):
        made.edits.append(Edit(len(text) - 1, len(text) - 1, text[-1] + mark))
        text = text[:-1]
    else:
        made.edits.append(Edit(len(text), len(text), mark))
    made.marks.append(Mark(symbol, len(text), left, right))
    return text, left and right


class TemplatePiece(NamedTuple):
    """A part of a template that is translated separately. `before`: the spans and spaces before it; `source`: its
    offset in the text."""

    before: str
    template: str
    source: int


def _pieces(template: str, spans: Mapping[str, Span], with_marks: bool) -> tuple[list[TemplatePiece], str]:
    """The pieces between spans, and what follows the last one. Marks stay inside if they can be placed; plain numbers
    always do."""
    cuts = re.compile(f"{NOUN}|{NUMBER_SPAN}" if with_marks else f"{NOUN}|{NUMBER_SPAN}|{MARK}")
    pieces, before, piece, at = list[TemplatePiece](), "", "", 0

    def add(part: str) -> None:
        nonlocal before, at
        core = part.strip()
        if any(char.isalpha() for char in core):
            lead = part[: part.index(core)]
            pieces.append(TemplatePiece(before + written(lead, spans), core, at + len(restore(lead, spans))))
            before = part[part.index(core) + len(core) :]
        else:
            before += written(part, spans)
        at += len(restore(part, spans))

    for char in template:
        if cuts.match(char) and spans[char].kind.name != "number":
            add(piece)
            before, at, piece = before + spans[char].written, at + len(spans[char].text), ""
        else:
            piece += char
    add(piece)
    return pieces, before


def _pattern(forms: tuple[str, ...]) -> re.Pattern[str]:
    """Matches a stand-in as a word of its own."""
    alternatives = (
        re.escape(form) if EAST_ASIAN.match(form)
        else rf"(?<![\d.,]){form}(?!\d|[.,]\d)" if form.isdigit()
        else rf"(?<![{LETTER}\d]){form}(?![{LETTER}\d])"
        for form in forms
    )  # fmt: skip
    return re.compile("|".join(alternatives))


def _spaced(text: str, start: int, end: int, span: str) -> Edit:
    """The span in place of its stand-in, apart from Chinese or Japanese letters around it."""
    before, after = text[:start][-1:], text[end:][:1]
    left = " " if _is_wide(before) and not _is_wide(span[0]) else ""
    right = " " if _is_wide(after) and not _is_wide(span[-1]) else ""
    return Edit(start, end, left + span + right)


def _is_wide(char: str) -> bool:
    return char.isalpha() and EAST_ASIAN.match(char) is not None


def _aligned(attention: AttentionMap, reading: PreparedTemplate, text: str, spans: Mapping[str, Span]) -> AttentionMap:
    """Attention with the marked terms where we know them to be: each is attended to by its translation and by nothing
    else. (Without it, the word after a term attends to the end of the mark.)"""
    weights = attention.weights.clone()
    here, there = (torch.tensor(side, device=weights.device) for side in (attention.source, attention.target))
    seen = Counter[str]()
    for symbol, mark in zip(reading.terms, MARKED.finditer(reading.text), strict=True):
        translation = spans[symbol].written
        places = find_term(translation, text)
        start, end = places[min(seen[translation], len(places) - 1)]
        seen[translation] += 1
        columns = (here[:, 0] < mark.end()) & (here[:, 1] > mark.start())
        rows = (there[:, 0] < end) & (there[:, 1] > start)
        weights[:, columns] = 0.0
        weights[rows] = columns.to(weights.dtype)
    return attention._replace(weights=weights)


def _outside(insertions: Sequence[Edit], replaced: Sequence[Edit]) -> Iterator[Edit]:
    """Move insertions out of what is replaced."""
    for one in insertions:
        at = next((edit.end for edit in replaced if edit.start < one.start < edit.end), one.start)
        yield Edit(at, at, one.text)


def _join(left: str, right: str, wide: bool) -> str:
    """`wide`: the source is in a script without spaces, so that two words may need one between them."""
    tight = wide and left and right and left[-1] not in PUNCTUATION and right[0] not in PUNCTUATION
    return f"{left} {right}" if tight and (left[-1].isalnum() or right[0].isalnum()) else left + right


def _kept(value: T | None) -> T:
    """Pieces have no span that can be lost."""
    assert value is not None
    return value
