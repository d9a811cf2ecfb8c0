"""Split texts into chunks to translate, keeping what is between them, and join the translations."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from allyouneed.apps.translate.glossary import Glossary
from allyouneed.apps.translate.spans.markup import partners
from allyouneed.apps.translate.spans.spans import BREAK, MARK, NOUN, Passage, Span, protect, restore, written
from allyouneed.apps.translate.splitting.sentences import SentencePart, fit, join, sentences
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError, quote

CASED = re.compile("[^\\W\\d_\u0590-\U0001ffff]+")  # words of scripts with capitals: Latin, Greek, Cyrillic, Armenian
MANY_WORDS, LONG_WORD = 4, 5  # of a text all in capitals; with fewer and shorter words, it may be acronyms
NEWLINE = re.compile(r"(\r\n|\n|\r)")
FENCE = re.compile(r"\s*(`{3,}|~{3,})(?!.*`)")  # begins and ends a block of code
MONTHS = "Jan|Feb|Mär|Apr|Mai|Jun|Jul|Aug|Sep|Okt|Nov|Dez"
# what German counts with ordinals: `2. Weltkrieg`, `1. Klasse`; with their endings, and as the last part of a word
COUNTED = (
    "Weltkrieg|Platz|Stock|Etage|Klasse|Liga|Jahrhundert|Jahrtausend|Halbzeit|Hälfte|Runde|Tag|Woche|Monat|Jahr|Jahrestag|"
    "Quartal|Halbjahr|Semester|Auflage|Ausgabe|Band|Kapitel|Teil|Akt|Satz|Sinfonie|Symphonie|Advent|Mannschaft|Division|"
    "Armee|Korps|Bezirk|Senat|Kammer|Lesung|Wahlgang|Durchgang|Etappe|Lauf|Preis|Person|Fall|Grad|Stufe|Reihe|Generation|"
    "Mal|Minute|Stunde|Lebensjahr|Rang|Stelle|Versuch|Staffel|Folge|Sitzung|Kind|Sohn|Tochter|Frau|Mann"
)
ORDINAL = re.compile(rf"\s*\d{{1,3}}\.\s+(?=[A-ZÄÖÜ])\w{{0,30}}?(?i:{COUNTED})(?:e?s|e?n|e)?(?!\w)")
NUMBERED = re.compile(r"\s*(?P<number>\d{1,3})\.\s")
# what a line begins with: indentation, quotes of e-mail and Markdown, a heading or a list mark, a check box
PREFIX = re.compile(
    r"\s*(?:>\s?)*(?:#{1,6}\s+|(?:[-*+•‣◦▪●○·–—]|\d{1,3}\)|\d{1,3}\.(?!\s(?:"
    + MONTHS
    + r"))|\((?:\d{1,3}|[a-z]|[ivx]{1,5})\)|[a-zA-Z]\))\s+"
    r"|(?:\d{1,3}、|[一二三四五六七八九十]{1,3}、|（[一二三四五六七八九十\d]{1,3}）|[①-⑳])\s*)?(?:\[[ xX✓]\]\s+)?"
)
COLON = re.compile(rf"[:：]\s*{NOUN}[.。]?$")
LABEL = re.compile(rf"{NOUN}\s*[:：]\s*")


@dataclass(frozen=True)
class Chunk:
    """A part of a text that is translated at once. `template`: its words, with a character in place of each protected
    span (spans.py). `start`: its offset in the text; `before`: what is between it and the previous chunk and stays as
    it is (whitespace, line breaks, list marks); `cut`: the boundary before it: `line`, or as in `sentences.fit`."""

    template: str
    spans: Mapping[str, Span]
    start: int
    before: str
    cut: str
    capitals: bool = False  # it was all in capitals, and is read in lower case

    @property
    def text(self) -> str:
        return restore(self.template, self.spans)


@dataclass(frozen=True)
class LinePart:
    """A line, or a part of it between block tags, before it is split into sentences."""

    template: str
    spans: Mapping[str, Span]
    start: int
    before: str
    capitals: bool = False


@dataclass(frozen=True)
class SplitText:
    """A text as chunks; `after`: the characters after the last chunk."""

    source: str
    chunks: list[Chunk]
    after: str
    notes: list[str]

    def join(self, texts: Sequence[str]) -> tuple[str, list[int]]:
        """The text with these in place of the chunks, and the offset of each."""
        whole, starts = "", []
        for number, (chunk, text) in enumerate(zip(self.chunks, texts, strict=True)):
            between = chunk.before
            if chunk.cut != "line":
                around = self.chunks[number - 1].template[-1] + chunk.template[0]
                between = join(texts[number - 1], between, text, chunk.cut, around)
            whole += between
            starts.append(len(whole))
            whole += text
        return whole + self.after, starts


@dataclass(frozen=True)
class Splitter:
    """Splits texts. A line of at most `whole` tokens, or of one sentence of at most `most` tokens, is one chunk; else
    each sentence is a chunk. A sentence of more than `most` tokens is split further, with a note. `marks`: special
    tokens (language, end) added to every chunk. `protects`: list marks, code, and spans (spans.py) are not
    translated; nor are the terms of the `glossary`. `read`: changes the words, not their number of characters."""

    tokenizer: Tokenizer
    most: int
    whole: int
    marks: int
    protects: bool = True
    glossary: Glossary | None = None
    read: Callable[[str], str] | None = None

    def split(self, texts: Sequence[str]) -> list[SplitText]:
        framed = []
        for text in texts:
            if not isinstance(text, str):
                raise UserError(f"expected a string, got {type(text).__name__}")
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise UserError(f"{text[:60]!r} contains an unpaired surrogate; fix the text")
            segments, after = frame(text, self.glossary) if self.protects else lines(text)
            if self.protects:
                segments = [_without_capitals(one) for one in segments]
            if self.read is not None:
                segments = [replace(one, template=self.read(one.template)) for one in segments]
            framed.append((segments, after))
        templates = [segment.template for segments, _ in framed for segment in segments]
        lengths = iter(map(len, self.tokenizer.encode_batch(templates)))
        found = []
        for text, (segments, after) in zip(texts, framed, strict=True):
            chunks: list[Chunk] = []
            notes: list[str] = []
            between = ""
            for segment in segments:
                tokens = next(lengths) + self.marks
                some, rest = self._split_segment(replace(segment, before=between + segment.before), tokens, notes)
                chunks += some
                between = rest
            found.append(SplitText(text, chunks, between + after, notes))
        return found

    def _split_segment(self, segment: LinePart, tokens: int, notes: list[str]) -> tuple[list[Chunk], str]:
        """Its chunks, and what follows the last of them."""
        template, spans, at, before = segment.template, segment.spans, segment.start, segment.before
        parts = [SentencePart(template, "end")]
        if tokens > self.whole:
            parts = fit(template, max(1, self.most - self.marks), self.tokenizer.spans)
        chunks: list[Chunk] = []
        cut = "line"
        for part in parts:
            lead, core, tail = trim(part.text, spans) if self.protects else strip(part.text)
            if core:
                start = at + len(restore(lead, spans))
                own = {char: spans[char] for char in core if char in spans}  # a line may have thousands of them
                chunks.append(Chunk(core, own, start, before + written(lead, spans), cut, segment.capitals))
                before, cut = written(tail, spans), part.cut
            else:
                before += written(part.text, spans)
            at += len(restore(part.text, spans))
        splits = sum(part.cut in ("clause", "word") for part in parts)
        if splits:
            notes.append(
                f"{quote(restore(template, spans))}: a sentence exceeds the training length of {self.most} tokens; "
                f"it was split in {splits} place{'s' if splits > 1 else ''} and translated in parts"
            )
        return chunks, before


def _without_capitals(segment: LinePart) -> LinePart:
    """A segment all in capitals, in lower case but for the first letter of each sentence: models have seen little
    text in capitals. Its translation gets capitals again (`in_capitals`)."""
    text = segment.template
    words = CASED.findall(text)
    if len(words) < MANY_WORDS and max(map(len, words), default=0) < LONG_WORD:
        return segment  # acronyms, or another script
    if any(char.islower() for char in text if char != "ß"):
        return segment
    lower = "".join(map(_sentence_case, sentences(text)))
    return segment if len(lower) != len(text) else replace(segment, template=lower, capitals=True)


def _sentence_case(sentence: str) -> str:
    first = next((at for at, char in enumerate(sentence) if char.isalpha()), 0) + 1
    return sentence[:first] + sentence[first:].lower()


def in_capitals(text: str, spans: Mapping[str, Span]) -> str:
    """A translation in capitals, but for its protected spans. It keeps its length: ß becomes ẞ."""
    kept = sorted({re.escape(span.written) for span in spans.values()}, key=len, reverse=True)
    parts = re.split(f"({'|'.join(kept)})", text) if kept else [text]
    raised = (part if number % 2 else part.replace("ß", "ẞ").upper() for number, part in enumerate(parts))
    return "".join(one if len(one) == len(part) else part for one, part in zip(raised, parts, strict=True))


class CodeFences:
    """Knows which lines of a text are code between fences (``` or ~~~), the fences included. Sees every line once."""

    def __init__(self) -> None:
        self._fence = ""  # that began the block we are in

    def is_code(self, line: str) -> bool:
        found = FENCE.match(line)
        inside = bool(self._fence)
        if found is not None and not inside:
            self._fence = found[1]
        elif found is not None and found[1].startswith(self._fence) and not line[found.end() :].strip():
            self._fence = ""
        return inside or found is not None


def lines(text: str) -> tuple[list[LinePart], str]:
    """The lines of a text that are not blank, and what follows the last."""
    segments: list[LinePart] = []
    between, at = "", 0
    for line in NEWLINE.split(text):
        core = line.strip()
        lead = line[: line.index(core)]
        if core:
            segments.append(LinePart(core, {}, at + len(lead), between + lead))
            between = line[len(lead) + len(core) :]
        else:
            between += line
        at += len(line)
    return segments, between


def frame(text: str, glossary: Glossary | None = None) -> tuple[list[LinePart], str]:
    """The segments of a text that have something to translate, and what follows the last. Code between fences, list
    marks and block tags are between segments."""
    segments: list[LinePart] = []
    between, at, fences = "", 0, CodeFences()
    given = text.spans if isinstance(text, Passage) else None
    lines = NEWLINE.split(text)
    for number, line in enumerate(lines):
        if number % 2 or fences.is_code(line):
            between += line
            at += len(line)
            continue
        prefix = None if ORDINAL.match(line) and not _is_listed(lines, number) else PREFIX.match(line)
        lead = "" if prefix is None else prefix[0]
        found = protect(line[len(lead) :], given, glossary)
        between, at = between + lead, at + len(lead)
        for part in re.split(f"({BREAK})", found.template):
            core = part.strip()
            if any(char.isalpha() for char in core):
                before = part[: part.index(core)]
                segments.append(LinePart(core, found.spans, at + len(before), between + before))
                between = part[len(before) + len(core) :]
            else:
                between += written(part, found.spans)
            at += len(restore(part, found.spans))
    return segments, between


def _is_listed(lines: Sequence[str], number: int) -> bool:
    """Whether a numbered line has the number before or after it beside it. `lines`: with the line breaks between."""
    own = _number(lines[number])
    before = next((lines[n] for n in range(number - 1, -1, -1) if lines[n].strip()), "")
    after = next((lines[n] for n in range(number + 1, len(lines)) if lines[n].strip()), "")
    return own is not None and (_number(before) == own - 1 or _number(after) == own + 1)


def _number(line: str) -> int | None:
    found = NUMBERED.match(line)
    return None if found is None else int(found["number"])


def strip(text: str) -> tuple[str, str, str]:
    """The spaces before and after, and what is between."""
    core = text.strip()
    lead = text[: text.index(core)]
    return lead, core, text[len(lead) + len(core) :]


def trim(template: str, spans: Mapping[str, Span]) -> tuple[str, str, str]:
    """What comes before and after the words of a template: spaces, marks, and a link or a path after a colon. A mark
    stays with the words if only its partner is among them. All of it comes before, if there are no words."""
    other = partners(template, spans) if re.search(MARK, template) else {}
    begin, end = 0, len(template)
    while begin < end and (template[begin].isspace() or re.match(MARK, template[begin])):
        begin += 1
    label = LABEL.match(template, begin)
    begin = begin if label is None else label.end()
    while begin < end and (template[end - 1].isspace() or re.match(MARK, template[end - 1])):
        end -= 1
    listed = COLON.search(template, max(begin, end - 20), end)
    end = end if listed is None else listed.start() + 1
    inner = set(template[begin:end])
    while begin and any(other.get(char) in inner for char in template[:begin]):
        begin -= 1
        inner.add(template[begin])
    while end < len(template) and any(other.get(char) in inner for char in template[end:]):
        inner.add(template[end])
        end += 1
    core = template[begin:end].strip()
    if not any(char.isalpha() for char in core):
        return template, "", ""
    begin = template.index(core, begin)
    return template[:begin], core, template[begin + len(core) :]
