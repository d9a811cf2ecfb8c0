"""LaTeX: the words of paragraphs, headings, captions, footnotes and cells. Mathematics, verbatim text, the preamble and
the arguments of commands that are not known to have words are copied."""

from __future__ import annotations

import re
import unicodedata

from allyouneed.apps.translate.documents.html import names
from allyouneed.apps.translate.documents.parts import Builder, Document, Part, free_symbols
from allyouneed.apps.translate.documents.tokens import Ends

COPIED = names(
    "equation align alignat gather multline eqnarray math displaymath flalign verbatim Verbatim lstlisting minted "
    "tikzpicture algorithmic comment filecontents"
)
ARGUMENTS = names(  # environments whose arguments are no words
    "tabular tabularx tabulary longtable array minipage multicols wrapfigure column thebibliography adjustbox figure "
    "table"
)
TABLES = names("tabular tabularx tabulary longtable array")
UNSEEN = names("label index vspace hspace setlength setcounter addtocounter selectlanguage color phantomsection")
INLINE = names(
    "emph textbf textit textsc texttt textrm textsf textsl textup textmd underline uline text mbox enquote alert "
    "textcolor href hyperref MakeUppercase"
)
BLOCKS = names(
    "title subtitle part chapter section subsection subsubsection paragraph subparagraph caption frametitle "
    "framesubtitle item par maketitle newpage clearpage centering hline toprule midrule bottomrule tableofcontents "
    "bigskip medskip smallskip appendix"
)
NESTED = names("footnote footnotetext thanks marginpar todo sidenote endnote")
TEXT_BEFORE = names("title subtitle")  # of the preamble
ACCENTS = dict(zip("`'^\"~=.uvHcrdbk", "\u0300\u0301\u0302\u0308\u0303\u0304\u0307\u0306\u030c\u030b\u0327\u030a\u0323"
                   "\u0331\u0328", strict=True))  # fmt: skip
SYMBOLS = {"ss": "ß", "ae": "æ", "AE": "Æ", "oe": "œ", "OE": "Œ", "o": "ø", "O": "Ø", "aa": "å", "AA": "Å", "l": "ł",
           "L": "Ł", "i": "ı", "ldots": "…", "dots": "…", "textendash": "–", "textemdash": "—", "S": "§"}  # fmt: skip
TOKEN = re.compile(
    r"(?P<comment>%[^\n]*\n?[ \t]*)|(?P<blank>[ \t]*\n(?:[ \t]*\n)+[ \t]*)|(?P<line>\\\\\*?(?:\[[^\]\n]{0,40}\])?)"
    r"|(?P<verb>\\(?:verb|lstinline|mintinline\{\w+\})\*?(?P<mark>[^\w\s*{])[^\n]{0,999}?(?P=mark))"
    r"|(?P<accent>\\(?:[`'^\"~=.]|[uvHcrdbk](?![A-Za-z]))[ ]?(?:\{\\?[A-Za-z]\}|\\[ij](?![A-Za-z])|[A-Za-z]))"
    r"|(?P<escaped>\\[#$%&_{}])|(?P<math>\$\$?|\\\(|\\\[)|(?P<command>\\(?:[A-Za-z@]+\*?|.))"
    r"|(?P<quote>``|''|~|---?)|(?P<brace>[{}])|(?P<cell>&)",
    re.DOTALL,
)
QUOTES = {"``": "“", "''": "”", "~": "\u00a0", "--": "–", "---": "—"}
SPECIAL = {char: "\\" + char for char in "#$%&_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\u00a0": "~",
}  # fmt: skip
CLOSES = {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}
SPACE = re.compile(r"[ \t]*\n?[ \t]*")
DEEPEST = 100


def read_latex(text: str) -> Document:
    return Document(_LatexReader(text).read())


def encode(text: str) -> str:
    """Text as LaTeX: nothing in it is a command."""
    return "".join(SPECIAL.get(char, char) for char in text)


class _LatexReader:
    def __init__(self, text: str) -> None:
        self.text, self.ends, self.symbols = text, Ends(text), free_symbols(text)
        self.closing = self._braces()
        self.tables = 0  # that are open

    def _braces(self) -> dict[int, int]:
        """Where each brace and each bracket of an argument is closed."""
        found: dict[int, int] = {}
        opened: list[int] = []
        for token in re.finditer(r"\\.|%[^\n]*|[{}]", self.text, re.DOTALL):
            if token[0] == "{":
                opened.append(token.start())
            elif token[0] == "}" and opened:
                found[opened.pop()] = token.start()
        return found

    def read(self) -> list[Part]:
        builder = Builder(self.symbols, encode)
        begin = re.search(r"\\begin\{document\}", self.text)
        at = 0
        if begin is not None:
            for title in re.finditer(r"(?m)^[ \t]*\\(\w+)(?=\{)", self.text[: begin.start()]):
                if title[1] in TEXT_BEFORE and (end := self.closing.get(title.end())) is not None and title.end() >= at:
                    builder.skip(self.text[at : title.end() + 1])
                    self._add(builder, title.end() + 1, end, 0)
                    builder.end()
                    at = end
            builder.skip(self.text[at : begin.end()])
            at = begin.end()
        end_of_text = self.text.rfind(r"\end{document}")
        self._add(builder, at, end_of_text if end_of_text >= at else len(self.text), 0)
        builder.skip(self.text[end_of_text:] if end_of_text >= at else "")
        return builder.parts

    def _add(self, builder: Builder, at: int, end: int, depth: int) -> None:
        """Add this part of the text to a passage, and end it where a paragraph does."""
        while at < end:
            token = TOKEN.search(self.text, at, end)
            start = end if token is None else token.start()
            if at < start:
                builder.text(self.text[at:start], self.text[at:start])
            if token is None:
                return
            at = self._token(builder, token, end, depth)

    def _token(self, builder: Builder, token: re.Match[str], end: int, depth: int) -> int:
        """Where the text goes on after this token."""
        kind, raw = str(token.lastgroup), token[0]
        if kind in ("blank", "cell"):
            builder.skip(raw)
        elif kind == "comment" or (kind == "line" and self.tables):
            (builder.skip if kind == "line" else builder.aside)(raw)
        elif kind == "line":
            builder.separate()
            builder.mark([raw])
        elif kind == "mark":  # of \verb
            builder.noun([raw])
        elif kind == "escaped":
            builder.text(raw, raw[1])
        elif kind == "accent":
            letter = re.findall("[A-Za-z]", raw[2:])[-1]
            builder.text(raw, unicodedata.normalize("NFC", letter + ACCENTS[raw[1]]))
        elif kind == "quote" and raw in ("``", "''"):  # in German, “ closes what „ opens
            builder.text(raw, QUOTES[raw])
        elif kind == "quote":
            builder.entity(raw, QUOTES[raw])
        elif kind == "brace":
            builder.mark([raw], ("{", raw == "}"))
        elif kind == "math":
            close = min(self.ends.find(CLOSES[raw], token.end()), end)
            if not close or close <= token.end():
                builder.text(raw, raw)
                return token.end()
            if raw in ("$$", r"\["):
                builder.skip(self.text[token.start() : close])
            else:
                builder.noun([self.text[token.start() : close]])
            return close
        else:
            return self._command(builder, token, end, depth)
        return token.end()

    def _arguments(self, at: int, end: int) -> list[tuple[str, int, int]]:
        """The arguments that follow a command: their bracket, and where they begin and end."""
        found: list[tuple[str, int, int]] = []
        while True:
            space = SPACE.match(self.text, at)
            begin = at if space is None else space.end()
            mark = self.text[begin : begin + 1]
            close = self.closing.get(begin, -1) if mark == "{" else -1
            if mark == "[":
                close = self.text.find("]", begin, min(end, begin + 400))
            if not 0 <= close < end:
                return found
            found.append((mark, begin, close + 1))
            at = close + 1

    def _command(self, builder: Builder, token: re.Match[str], end: int, depth: int) -> int:
        name, start, at = token[0][1:].rstrip("*"), token.start(), token.end()
        if name in SYMBOLS:
            after = at + 2 if self.text.startswith("{}", at) else at + (self.text[at : at + 1] == " ")
            builder.text(self.text[start:after], SYMBOLS[name])
            return after
        arguments = self._arguments(at, end)
        if name in ("begin", "end"):
            return self._environment(builder, token, arguments, end)
        braces = [one for one in arguments if one[0] == "{"]
        after = arguments[-1][2] if arguments else at
        if depth < DEEPEST and (name in INLINE or name in NESTED or name in BLOCKS) and braces:
            _, begin, close = braces[1 if name in ("textcolor", "href") and len(braces) > 1 else 0]
            if name in NESTED:
                inner = Builder(self.symbols, encode)
                self._add(inner, begin + 1, close - 1, depth + 1)
                inner.end()
                builder.mark([self.text[start : begin + 1], *inner.parts, "}"])
            elif name in BLOCKS:
                builder.skip(self.text[start : begin + 1])
                self._add(builder, begin + 1, close - 1, depth + 1)
                builder.skip("}")
            else:
                builder.mark([self.text[start : begin + 1]], (f"{name} {start}", False))
                self._add(builder, begin + 1, close - 1, depth + 1)
                builder.mark(["}"], (f"{name} {start}", True))
            return close
        if name in BLOCKS:
            optional = arguments[0][2] if arguments and name == "item" else at
            builder.skip(self.text[start:optional])
            return optional
        if not arguments:
            following = SPACE.match(self.text, at)
            letters = name.isalpha()
            after = following.end() if letters and following is not None and following.end() <= end else at
            if name in ("LaTeX", "TeX", "today"):
                builder.noun([self.text[start:at]])
                return at
            builder.aside(self.text[start:after])
            return after
        if name in UNSEEN:
            builder.aside(self.text[start:after])
        else:
            builder.noun([self.text[start:after]])
        return after

    def _environment(
        self, builder: Builder, token: re.Match[str], arguments: list[tuple[str, int, int]], end: int
    ) -> int:
        if not arguments or arguments[0][0] != "{":
            builder.mark([token[0]])
            return token.end()
        name = self.text[arguments[0][1] + 1 : arguments[0][2] - 1]
        after = arguments[0][2]
        if name.rstrip("*") in TABLES:
            self.tables += 1 if token[0] == r"\begin" else -1
        if token[0] == r"\end":
            builder.skip(self.text[token.start() : after])
            return after
        if name.rstrip("*") in COPIED:
            close = self.ends.find(rf"\end{{{name}}}", after) or end
            builder.skip(self.text[token.start() : min(close, end)])
            return min(close, end)
        for mark, _, close in arguments[1:]:
            if mark == "{" and name.rstrip("*") not in ARGUMENTS:
                break
            after = close
        builder.skip(self.text[token.start() : after])
        return after
