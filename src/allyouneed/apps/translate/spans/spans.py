r"""Protected spans: parts of a text that a translation must contain unchanged, such as URLs, code, tags and emoji.

One table says what they are and how each is carried through translation (carry.py):

- `noun`: stands for a thing or a person in its sentence (`https://…`, `{name}`). The model reads a stand-in for it.
- `number`: a number with a unit. The model reads it as it is; a stand-in, if its value is lost.
- `mark`: has no place in the grammar (`<b>`, `**`, emoji). The model does not read it; it is inserted afterwards, where
  the words around it went.
- `break`: separates what is translated on its own (`<p>`).

While a text is split into sentences, each span is one private-use character, so that no span is ever split.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from allyouneed.apps.translate.glossary import LETTERS, Glossary
from allyouneed.apps.translate.numbers.amounts import AMOUNT

Role = Literal["noun", "number", "mark", "break"]
# private-use characters that stand for spans: the role of a span can be told from its character
MOST = 0x7FF0  # spans of a role in a line
FIRST: dict[Role, int] = {"noun": 0xF0000, "number": 0xF8000, "mark": 0x100000, "break": 0x108000}
NOUN, NUMBER_SPAN, MARK, BREAK = (f"[{chr(first)}-{chr(first + MOST)}]" for first in FIRST.values())
SYMBOL = re.compile(f"[{chr(FIRST['noun'])}-{chr(FIRST['break'] + MOST)}]")

# no space, no quotes, no East Asian letters or punctuation: a Chinese sentence goes on without a space
URL_CHAR = r"""[^\s<>"'`“”‘’«»{}|\\^\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef]"""
URL_END = r"""[^\s<>"'`“”‘’«»{}|\\^\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef.,;:!?()\[\]*_~…]"""
URL_REST = rf"(?:(?![()]){URL_CHAR}|\([^\s()<>]*\))*(?:{URL_END}|\([^\s()<>]*\)|(?<=/))"
DOMAINS = "com|org|net|edu|gov|mil|int|info|io|ai|dev|app|eu|uk|us|de|at|ch|fr|be|cn|jp|ru|tv|me|cc|gl"
EXTENSIONS = (
    "txt|md|rst|pdf|docx?|xlsx?|pptx?|odt|csv|tsv|jsonl?|ya?ml|toml|ini|cfg|conf|xml|html?|css|js|ts|jsx|tsx|py|ipynb|"
    "c|h|cc|cpp|hpp|cs|go|rs|rb|php|java|kt|swift|sh|bat|ps1|sql|log|zip|tar|gz|zst|7z|exe|dll|so|jar|whl|deb|rpm|iso|"
    "jpe?g|png|gif|svg|webp|bmp|ico|mp[34]|wav|flac|ogg|avi|mkv|mov|srt|vtt|po|pot|tex|bib|safetensors|pt|onnx"
)
UNITS = (
    "[kKMGT]i?[Bb]|Bytes?|[kMG]?Hz|[kMG]?Wh?|kV|mV|V|mA|mAh|dB|[kcdmµμn]?m[²³23]?|km/h|m/s|mph|kph|[kKmµμ]?g|kcal|kJ|"
    "[mcd]?l|mL|[mµμn]s|min|h|px|pt|dpi|fps|rpm|hPa|bar|°[CF]?|K|%|‰|€|\\$|£|¥|元|EUR|USD|GBP|CNY|CHF|RMB|oz|lbs?|ft"
)
NUMBER = r"[+\-−±]?\d+(?:[.,'\u2019\u00a0\u202f]\d+)*"
ARROW = r"(?:[\u2190-\u21ff]|<?[-=]>)"
CODE = r"[A-Za-zÀ-ɏ0-9_](?:[A-Za-zÀ-ɏ0-9_.+-]{0,40}[A-Za-zÀ-ɏ0-9_])?"  # beside an arrow: en→de
TAG_NAME = r"[A-Za-z][A-Za-z0-9:._-]*"
ATTRIBUTES = r"""(?:\s+[\w:@.\-]+(?:\s*=\s*(?:"[^"<>]*"|'[^'<>]*'|[^\s"'<>=]+))?)*\s*"""
BLOCKS = (
    "p|div|li|ul|ol|dl|dt|dd|table|thead|tbody|tfoot|tr|td|th|h[1-6]|br|hr|section|article|header|footer|main|nav|aside|"
    "blockquote|pre|form|fieldset|option|select|title|head|body|html|figure|figcaption|caption|textarea|button|label"
)
EMOJI_BASE = (
    "[\u203c\u2049\u2122\u2139\u2190-\u21ff\u2300-\u23ff\u24c2\u2500-\u27bf\u2900-\u297f\u2b00-\u2bff\u3030\u303d\u3297"
    "\u3299\U0001f000-\U0001f1e5\U0001f200-\U0001faff]"
)
EMOJI = (
    f"(?:[\U0001f1e6-\U0001f1ff]{{2}}|[0-9#*]\ufe0f?\u20e3|{EMOJI_BASE}[\ufe0e\ufe0f\U0001f3fb-\U0001f3ff]*"
    f"[\U000e0020-\U000e007f]*(?:\u200d{EMOJI_BASE}[\ufe0e\ufe0f\U0001f3fb-\U0001f3ff]*)*)"
)


class SpanKind(NamedTuple):
    """A line of the table. Where several match, the first does."""

    name: str
    role: Role
    pattern: str


TABLE = (
    SpanKind("code", "noun", r"(?P<ticks>`{1,3})(?!`).{1,400}?(?<!`)(?P=ticks)(?!`)"),
    SpanKind("comment", "mark", r"<!--.{0,500}?-->|<!\[CDATA\[.{0,500}?\]\]>|<[?%].{1,400}?[?%]>|<![A-Za-z][^<>]*>"),
    SpanKind("code", "noun", rf"<(?P<raw>code|kbd|samp|var|script|style){ATTRIBUTES}>[^<>]{{0,400}}</(?P=raw)\s*>"),
    SpanKind("block tag", "break", rf"</?(?i:{BLOCKS})(?![A-Za-z0-9_:.-]){ATTRIBUTES}/?>"),
    SpanKind("tag", "mark", rf"<(?i:img|wbr|input|embed|source|area|col|link|meta)(?![A-Za-z0-9_:.-]){ATTRIBUTES}/?>"),
    SpanKind("placeholder", "noun", rf"<{TAG_NAME}{ATTRIBUTES}/>"),  # <x id="7"/>
    SpanKind("tag", "mark", rf"</?{TAG_NAME}{ATTRIBUTES}>"),
    SpanKind("entity", "mark", r"&(?:[A-Za-z][A-Za-z0-9]{1,30}|#\d{1,7}|#[xX][0-9A-Fa-f]{1,6});"),
    SpanKind("link", "mark",
         r"!?\[(?=[^\[\]\n]{1,300}\]\()|\]\([^()\s]*(?:\([^()\s]*\)[^()\s]*)?\)"),
    SpanKind("code", "noun",
         r"(?<![A-Za-z0-9_.])[A-Za-z_][A-Za-z0-9_.]*\(\)|(?<![A-Za-z0-9_])_*[A-Za-z0-9]+(?:_+[A-Za-z0-9]+)+_*(?![A-Za-z0-9_])"
         r"|(?<![A-Za-z0-9_])__[a-z]+__(?![A-Za-z0-9_])"),
    SpanKind("emphasis", "mark",
         r"(?P<em>\*\*|__|~~|==)(?=[^\s*_~=])(?=.{0,400}?[^\s](?P=em))|(?<=[^\s*_~=])(?:\*\*|__|~~|==)"),
    SpanKind("emphasis", "mark", r"(?<![A-Za-z0-9_*])\*(?=[^\s*][^*\n]{0,300}\*)|(?<=[^\s*])\*(?![A-Za-z0-9_*])"),
    SpanKind("placeholder", "noun", r"\$\{[^{}\n]{1,100}\}|\{[{%#][^\n]{0,200}?[}%#]\}|\[\[[^\[\]\n]{1,100}\]\]"),
    SpanKind("placeholder", "noun",
         r"\{[A-Za-z0-9_.:,<>^+*\-$@\[\] ]{0,60}\}|%\([\w.]{1,60}\)[sdifrgxeu]|%\{[^{}\n]{1,60}\}"),
    SpanKind("count", "number",
         r"(?<![A-Za-z0-9_%])%(?:\d+\$)?[-+#0]*\d*(?:\.\d+)?(?:hh?|ll?|[Lzjt])?[diufFeEgGxXo](?![A-Za-z])"),
    SpanKind("placeholder", "noun", r"(?<![A-Za-z0-9_%])%(?:\d+\$)?-?\d*(?:[scr@](?![A-Za-z])|\d(?!\d))"),
    SpanKind("placeholder", "noun", r"(?<![A-Za-z0-9_$])\$[A-Za-z_]\w*"),
    SpanKind("e-mail", "noun",
         r"(?<![A-Za-z0-9_.+-])(?:mailto:)?[A-Za-z0-9][\w.+-]*@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}"),
    SpanKind("URL", "noun", rf"(?<![A-Za-z0-9])[A-Za-z][A-Za-z0-9+.-]{{1,15}}://{URL_REST}|(?<![A-Za-z0-9_@./-])www\.{URL_REST}"),
    SpanKind("URL", "noun",
         rf"(?<![A-Za-z0-9_@./-])(?:[A-Za-z0-9-]{{1,63}}\.){{1,8}}(?:{DOMAINS})(?![A-Za-z0-9_-]"
         rf"|\.\w)(?::\d+)?(?:/(?:{URL_REST})?|[?#]{URL_REST})?"),
    SpanKind("path", "noun", r"(?<![A-Za-z0-9_])(?:[A-Za-z]:|\\\\[\w.-]+)\\[\w.\\+$-]*[\w\\$]"),
    SpanKind("path", "noun",
         r"(?<![A-Za-z0-9_/.\\<])(?:~|\.{1,2})?/[\w.+@-]*[A-Za-z][\w.+@-]*(?:/[\w.+@-]+)*/?(?<![.])"),
    SpanKind("path", "noun",
         rf"(?<![A-Za-z0-9_/.-])(?:[A-Za-z0-9_.-]+/)+[A-Za-z0-9_-][\w-]*\.(?:{EXTENSIONS})(?![A-Za-z0-9_-])"),
    SpanKind("path", "noun", rf"(?<![A-Za-z0-9_/.-])[A-Za-z0-9_][A-Za-z0-9_.-]*\.(?:{EXTENSIONS})(?![A-Za-z0-9_/-])"),
    SpanKind("mention", "noun",
         r"(?<![A-Za-z0-9_@])@[A-Za-z0-9_](?:[A-Za-z0-9_-]|\.(?=\w))*|(?<![A-Za-z0-9_@])@[\u4e00-\u9fff]{1,10}(?=[\s，：:])"),
    SpanKind("tag word", "noun",
         r"(?<![A-Za-z0-9_#&])#(?:[^\s#]{1,30}#(?![A-Za-z0-9_#])|[A-Za-z_](?:[A-Za-z0-9_]|-(?=\w))*|\d+(?![A-Za-z0-9_])"
         r"|[\u4e00-\u9fff]+(?=\s|$))"),
    SpanKind("mapping", "noun",
         rf"(?<![A-Za-zÀ-ɏ0-9_.+-])(?:{CODE}(?:{ARROW}{CODE})+|[A-Za-z0-9]{{1,3}}(?: {ARROW} [A-Za-z0-9]{{1,3}})+)"
         rf"(?![A-Za-zÀ-ɏ0-9_])"),
    SpanKind("option", "noun", r"(?<![A-Za-z0-9_-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?:=[^\s,;]*[\w/])?"),
    SpanKind("date", "number",
         r"(?<![A-Za-z0-9_.-])\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z"
         r"|[+-]\d{2}:?\d{2})?)?(?![A-Za-z0-9_-])"),
    SpanKind("version", "number",
         r"(?<![A-Za-z0-9_.,])(?!\d{1,3}(?:\.\d{3}){2}(?![.\d]))v?\d+(?:\.\d+){2,}(?![A-Za-z0-9_])"
         r"|(?<![A-Za-z0-9_.])v\d+(?:\.\d+)+(?![A-Za-z0-9_])"),
    SpanKind("amount", "number", AMOUNT),
    SpanKind("number with unit", "number",
         rf"(?<![A-Za-z0-9_.,])(?:(?:[$€£¥₹]|USD|EUR|US\$)[ \u00a0\u202f]?{NUMBER}"
         rf"|{NUMBER}[ \u00a0\u202f]?(?:{UNITS})(?![A-Za-zÀ-ɏ0-9_]| \d{{2}}(?!\d)))"),
    SpanKind("number", "number",
         r"(?<![A-Za-z0-9_.,])\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![A-Za-z0-9_]|,\d)|(?<![A-Za-z0-9_.,])(?:\d{1,3}(?:\.\d{3}){2,}"
         r"|\d{4,})(?:[.,]\d+)?(?![A-Za-z0-9_]|,\d)"),
    SpanKind("emoji", "mark", rf"{EMOJI}(?:[ \t]*{EMOJI}){{0,999}}"),
    SpanKind("emoji", "mark",
         r"(?<!\S)(?:[:;=8][-o^']?[)(DPpO/\\|*\]\[]|[:;=][-o^']?3|<3|\^_?\^|:[a-z0-9_+-]{2,30}:)(?![^\s.,!?。！？])"
         r"|(?<![A-Za-z0-9_]):[a-z][a-z0-9_+-]{1,30}:(?![A-Za-z0-9_])"),
    SpanKind("escape", "mark", r"\\[nrtabfv0\"'\\]"),
    SpanKind("control", "mark",
         "[\x00-\x08\x0e-\x1b\x7f\u200b\u200e\u200f\u2060\ufeff\ue000-\uf8ff\U000f0000-\U0010ffff]+"),
)  # fmt: skip
WINDOW, REACH = 16_384, 4_096  # characters
_PATTERN = re.compile("|".join(f"(?P<k{number}>{kind.pattern})" for number, kind in enumerate(TABLE)))
# what every span begins with or contains; most sentences have none of it and are not searched further
_TRIGGER = re.compile(
    r"[^\w\s.,;:!?'\"()\-–—…“”‘’«»。，！？；：、（）「」《》·]|\d{4}|\d[^\w\s?!;:]|\d\s?[A-Za-z°元十百千万萬亿億]|[一二两兩三四五六七八九十百千][万萬亿億]|[._:]\w|:[-()DPp]|--\w|\(\)|\w_"
)
# `v{version}`, `{first} {last}`, `%s/%s` are one thing to the sentence
_COMPOUND = re.compile(
    rf"(?<![A-Za-z0-9_])[A-Za-z0-9_]*{NOUN}(?:(?:[ /\\\-–_:.=+&|~]|[ ]?[/&+=|][ ]?)?{NOUN})*[A-Za-z0-9_]*"
)


@dataclass(frozen=True)
class Span:
    """A protected part of a text. `target`: what stands for it in the translation, if not the same. `pair`: what a mark
    opens or closes, and whether it closes; for marks whose text does not say so (`markup.py`). `reading`: a number as
    the model reads it, if not the same."""

    text: str
    kind: SpanKind
    target: str | None = None
    pair: tuple[str, bool] | None = None
    reading: str | None = None

    @property
    def written(self) -> str:
        return self.text if self.target is None else self.target

    @property
    def read(self) -> str:
        return self.text if self.reading is None else self.reading


class Passage(str):
    """A text of a document. Each of the `spans` is one private-use character of it, its own text."""

    spans: Mapping[str, Span]

    def __new__(cls, text: str, spans: Mapping[str, Span]) -> Passage:
        made = super().__new__(cls, text)
        made.spans = spans
        return made


def same_spans(text: str, source: str) -> str:
    """A translation of a passage, with its spans; of another text, as it is."""
    return Passage(text, source.spans) if isinstance(source, Passage) else text


TERM = SpanKind("term", "noun", "")


@dataclass(frozen=True)
class Protected:
    """A text with a private-use character in place of each span."""

    template: str
    spans: dict[str, Span]  # by its character


def restore(template: str, spans: Mapping[str, Span]) -> str:
    """A template, or a part of one, with its spans."""
    return SYMBOL.sub(lambda found: spans[found[0]].text, template) if spans else template


def written(template: str, spans: Mapping[str, Span]) -> str:
    """A part of a template that is not translated, as it is in the translation: with the targets of its terms."""
    return SYMBOL.sub(lambda found: spans[found[0]].written, template) if spans else template


def protect(text: str, given: Mapping[str, Span] | None = None, glossary: Glossary | None = None) -> Protected:
    """Find the spans of a text and put a character in place of each. `given`: spans that are known, by the character
    that stands for them in the text."""
    if not given and glossary is None and not _TRIGGER.search(text):
        return Protected(text, {})
    spans: dict[str, Span] = {}
    counts = dict.fromkeys(FIRST, 0)

    def symbol(span: Span) -> str:
        role = span.kind.role
        if counts[role] >= MOST:
            return span.text
        found = chr(FIRST[role] + counts[role])
        counts[role] += 1
        spans[found] = span
        return found

    def merge(found: re.Match[str]) -> str:
        if len(found[0]) == 1:
            return found[0]
        kind = next(spans[char].kind for char in found[0] if char in spans)
        return symbol(Span(restore(found[0], spans), kind, _join(found[0], spans)))

    template = ""
    for part in re.split(f"([{''.join(given)}])", text) if given else [text]:
        if given and part in given:
            template += symbol(given[part])
            continue
        at = 0
        for start, end, span in _find(part, glossary):
            template += part[at:start] + symbol(span)
            at = end
        template += part[at:]
    return Protected(_COMPOUND.sub(merge, template), spans)


def _join(compound: str, spans: Mapping[str, Span]) -> str:
    """A compound in the translation: words are apart that were so by their script (纳粹政权: Nazi regime)."""
    whole, before = "", ""
    for char in compound:
        text, target = (spans[char].text, spans[char].written) if char in spans else (char, char)
        touching = LETTERS.match(whole[-1:]) and LETTERS.match(target)
        apart = touching and not (LETTERS.match(before[-1:]) and LETTERS.match(text))
        whole, before = whole + (" " if apart else "") + target, text
    return whole


def _kind(found: re.Match[str]) -> SpanKind:
    return TABLE[int(str(found.lastgroup)[1:])]


def _matches(text: str) -> Iterator[re.Match[str]]:
    """Matches of the table. A long text is searched in windows, for no other thread runs during a search. A span is
    found whole if it begins at least `REACH` before the end of its window."""
    if len(text) <= WINDOW:
        yield from _PATTERN.finditer(text)
        return
    at = 0
    while at < len(text):
        last = at + WINDOW - REACH  # where a span of this window may begin
        found = _PATTERN.search(text, at, at + WINDOW)
        if found is None or found.start() > last:
            at = last
            continue
        at = found.start()
        if found.end() > last:  # it may go on behind the window, or be none
            found = _PATTERN.match(text, at)
        at = at + 1 if found is None else found.end()
        if found is not None:
            yield found


def _find(text: str, glossary: Glossary | None) -> list[tuple[int, int, Span]]:
    """The spans of a text, in order. A term inside another span (an address, code) is none."""
    known = [(one.start(), one.end(), Span(one[0], _kind(one))) for one in _matches(text)]
    if glossary is None:
        return known
    found: list[tuple[int, int, Span]] = []
    rest = known[::-1]
    for start, end, target in glossary.find(text):
        while rest and rest[-1][1] <= start:
            found.append(rest.pop())
        touched = []
        while rest and rest[-1][0] < end:
            touched.append(rest.pop())
        if all(start <= one[0] and one[1] <= end for one in touched):
            found.append((start, end, Span(text[start:end], TERM, target)))
        else:
            rest += reversed(touched)
    return found + rest[::-1]


def without_spans(text: str) -> str:
    """The words of a text: what its language is detected from."""
    found = protect(text)
    return SYMBOL.sub(" ", found.template) if found.spans else text
