"""Subtitles, SRT and WebVTT: numbers, times, settings and styles are kept. Cues that form one sentence are one passage;
its translation is divided among them where the words of each went."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from html import unescape

from allyouneed.apps.translate.documents.parts import Builder, Document, Part, Unit, free_symbols
from allyouneed.errors import UserError

TIME = r"(?:\d{1,3}:)?\d{1,2}:\d{2}[.,]\d{1,3}"
TIMING = re.compile(rf"\s*{TIME}\s*-->\s*{TIME}")
MARKUP = re.compile(r"<(?P<close>/?)(?P<name>[A-Za-z]\w*)[^<>\n]*>|<\d[\d:.]*>|\{\\[^{}\n]*\}")
STOP = re.compile(r"[.!?…。！？♪♫\])）】:：]['\"”’»」』\s]*$")
COMMA = re.compile(r"[,，、;；–—-]\s*$")
SPEAKER = re.compile(r"\s*[-–—‐]\s?\S|\s*[\[(（♪♫]")
MOST_CUES = 8  # of one sentence
LINE = 42  # characters; a shorter text stays on one line
WIDE_LINE = 18  # of Chinese and Japanese
LINES = re.compile(r"[^\n]*\n|[^\n]+$")
WIDE = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


@dataclass
class Cue:
    """`before`: what precedes its text: the end of the cue before, number, times."""

    before: str
    text: str


@dataclass(frozen=True, eq=False)
class CueUnit(Unit):
    """`cuts`: the marks between cues; `lines`: of each cue; `newline`: of the file."""

    cuts: tuple[str, ...] = ()
    lines: tuple[int, ...] = (1,)
    newline: str = "\n"

    def pieces(self, text: str) -> list[str]:
        text = "".join(super().pieces(text))
        parts = _split(text, self.cuts)
        if not all(map(self._has_words, parts)):
            whole = re.sub(" +", " ", " ".join(parts)).strip()
            parts = _divide(whole, [len(part) for part in _split(self.passage, self.cuts)])
        parts = [_break(part.strip(), lines, self.newline) for part, lines in zip(parts, self.lines, strict=True)]
        joined = parts[0] + "".join(cut + part for cut, part in zip(self.cuts, parts[1:], strict=True))
        return super().pieces(joined)

    def _has_words(self, part: str) -> bool:
        return any(char.isalnum() and char not in self.marks for char in part)


def read_srt(text: str) -> Document:
    return _read(text, "SRT", str, str)


def read_vtt(text: str) -> Document:
    if not re.match("\ufeff?WEBVTT(?![^\\s])", text):
        raise UserError("not WebVTT: the first line must be WEBVTT")
    return _read(text, "WebVTT", unescape, _encode_vtt)


def _encode_vtt(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _read(text: str, name: str, decode: Callable[[str], str], encode: Callable[[str], str]) -> Document:
    cues, after = _cues(text)
    if not cues and name == "SRT" and text.strip():
        raise UserError("not SRT: no line has times such as 00:00:01,000 --> 00:00:02,500")
    ends = [bool(STOP.search(MARKUP.sub("", cue.text))) for cue in cues]
    stops = 2 * sum(ends) >= len(ends)  # whether sentences end with a stop in this file
    groups: list[list[Cue]] = []
    for number, cue in enumerate(cues):
        if number and len(groups[-1]) < MOST_CUES and _goes_on(cues[number - 1].text, cue.text, stops):
            groups[-1].append(cue)
        else:
            groups.append([cue])
    symbols, parts = free_symbols(text), list[Part]()
    for group in groups:
        parts.append(group[0].before)
        parts += _passages(group, symbols, decode, encode)
    return Document([*parts, after])


def _cues(text: str) -> tuple[list[Cue], str]:
    """The cues, and what follows the text of the last."""
    cues: list[Cue] = []
    before: list[str] = []
    inside: list[str] | None = None  # the lines of the text of a cue
    for line in [*LINES.findall(text), ""]:
        if inside is not None and line.strip():
            inside.append(line)
            continue
        if inside is not None:  # the line break at the end of the text belongs to what follows
            whole = "".join(inside)
            cues[-1].text = whole.rstrip()
            before, inside = [whole[len(cues[-1].text) :]], None
        before.append(line)
        if TIMING.match(line):
            cues.append(Cue("".join(before), ""))
            before, inside = [], []
    return cues, "".join(before)


def _goes_on(text: str, following: str, stops: bool) -> bool:
    """Whether a sentence goes on in the next cue."""
    text, following = MARKUP.sub("", text).strip(), MARKUP.sub("", following).strip()
    if not text or not following or STOP.search(text) or SPEAKER.match(following):
        return False
    return following[0].islower() or bool(COMMA.search(text)) or (stops and not WIDE.search(text + following))


def _passages(
    group: list[Cue], symbols: list[str], decode: Callable[[str], str], encode: Callable[[str], str]
) -> list[Part]:
    builder = Builder(symbols, encode, ordered=True)
    speakers = len(group) == 1 and any(SPEAKER.match(line) for line in group[0].text.split("\n")[1:])
    for number, cue in enumerate(group):
        if number:
            builder.separate()
            builder.mark([cue.before])
        for line in re.split(r"(\r?\n|\r)", cue.text):
            if re.fullmatch(r"[\r\n]+", line) and speakers:
                builder.skip(line)
            elif re.fullmatch(r"[\r\n]+", line):
                builder.text(line, " ")
            else:
                _add_line(builder, line, decode)
    builder.end()
    newline = "\r\n" if "\r\n" in group[0].before else "\n"
    befores = [(cue.before,) for cue in group[1:]]
    lines = tuple(1 if speakers else cue.text.count("\n") + 1 for cue in group)
    return [_with_cuts(part, befores, lines, newline) if isinstance(part, Unit) else part for part in builder.parts]


def _with_cuts(unit: Unit, befores: list[tuple[str]], lines: tuple[int, ...], newline: str) -> Unit:
    cuts = tuple(symbol for symbol, raw in unit.marks.items() if raw in befores)
    if len(cuts) != len(befores):
        return unit
    return CueUnit(unit.passage, unit.raw, unit.marks, unit.encode, True, cuts, lines, newline)


def _add_line(builder: Builder, line: str, decode: Callable[[str], str]) -> None:
    at = 0
    for found in MARKUP.finditer(line):
        builder.text(line[at : found.start()], decode(line[at : found.start()]))
        name = found["name"]
        builder.mark([found[0]], None if name is None else (name.lower(), bool(found["close"])))
        at = found.end()
    builder.text(line[at:], decode(line[at:]))


def _split(text: str, cuts: tuple[str, ...]) -> list[str]:
    return re.split(f"[{''.join(cuts)}]", text) if cuts else [text]


def _divide(text: str, sizes: list[int]) -> list[str]:
    """A text in parts of about these relative sizes, between words; between letters where there are no spaces."""
    places = [found.start() for found in re.finditer(" ", text)]
    if len(places) < len(sizes) - 1:
        places = list(range(1, len(text)))
    parts, at, taken, total = [], 0, 0, sum(sizes)
    for number, size in enumerate(sizes[:-1], 1):
        taken += size
        goal, left = len(text) * taken / max(1, total), len(sizes) - 1 - number
        first = bisect_right(places, at)
        last = min(len(places), max(first + 1, len(places) - left))  # leave places for the parts that follow
        near = bisect_right(places, goal, first, last)
        free = places[max(first, near - 1) : min(last, near + 1)]
        place = min(free, key=lambda place: abs(place - goal), default=len(text))
        parts.append(text[at:place])
        at = place
    return [*parts, text[at:]]


def _break(text: str, lines: int, newline: str) -> str:
    """A text on at most this many lines of about the same length."""
    if lines == 1 or len(text) <= (WIDE_LINE if WIDE.search(text) else LINE):
        return text
    return newline.join(part.strip() for part in _divide(text, [1] * lines))
