"""Documents keep everything but their words, whatever the translator answers."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from allyouneed.apps.translate.documents.formats import FORMATS, format_of, read_document
from allyouneed.apps.translate.documents.xml import read_xml
from allyouneed.errors import UserError

HTML = """<!DOCTYPE html>
<html><head><title>Hi there</title><script>if (a<b) "x"</script></head><body class=x>\r
<p title="A &quot;note&quot;">
Hello <b>big  <i>world</i></b> &amp; <code>x &lt; y</code>, see <img alt='a dog' src=1>.<br>
Next &lt;b&gt; line\n</p><!-- c --><pre>no\n</pre><div translate=no>No <div>x</div></div>
<ul><li>One<li class="a notranslate">Two<li>Three</ul> <x id="7"/> 5 < 6 && a <a href="?a=1&b=2">link</a> &nbsp;é
"""
MARKDOWN = """---
title: x
---
# Head *one* #

Para **one**
more [link](http://x "t") and `code`  \nhard ![img](a.png) [ref][r] [r] \\*x\\* &amp; <b>html</b>

- item one
  goes on
1. [ ] task

> quote
> more

| a b | c \\| d |
|---|:-:|
| x *y* | `y` |

```py
code here
```

    indented code

<div title="a tip">
<p>Hello</p>
</div>

[r]: http://x
[^1]: note text

Setext\\
line
===
"""
SRT = """1
00:00:01,000 --> 00:00:02,000
<i>Hello there, my</i>
old

2
00:00:03,000 --> 00:00:04,000 X1:0
friend of mine.

3
00:00:05,000 --> 00:00:06,000
- Yes.
- {\\an8}No.
"""
VTT = """WEBVTT - x

NOTE a note

STYLE
::cue { color: red }

id1
00:01.000 --> 00:02.000 align:start
<v Bob>Hello &amp; welcome <00:00:01.500>to

00:03.000 --> 00:04.000
the show.
"""
PO = r"""# A comment
msgid ""
msgstr ""
"Language: de\n"
"Plural-Forms: nplurals=2; plural=(n != 1);\n"

#: a.c:1
#, c-format
msgctxt "menu"
msgid ""
"Open \"%s\"\n"
"now"
msgstr ""

msgid "Done"
msgstr "Fertig"

#, fuzzy
#| msgid "one thing"
msgid "one file"
msgid_plural "%d files"
msgstr[0] "falsch"
msgstr[1] ""

#~ msgid "old"
#~ msgstr "alt"
"""
XML = '<?xml version="1.0"?>\n<doc><p a="Words">Hello <B>x</B> you &amp; me</p><sec><t>One</t><ig>no</ig></sec></doc>'
CSV = 'id;"text"\r\n1;"Hi; ""you"""\r\n\r\n2;and me\r\n'
XLIFF = """<?xml version="1.0"?>
<xliff version="1.2"><file source-language="en"><body>
 <trans-unit id="1">
  <source>The <g id="1">red car</g> is <x id="2"/> fast.</source>
 </trans-unit>
 <trans-unit id="2"><source>Done</source><target state="final">Fertig</target></trans-unit>
 <trans-unit id="3"><source>Draft</source><target state="new">Draft</target></trans-unit>
 <trans-unit id="4" translate="no"><source>Not this</source></trans-unit>
</body></file></xliff>
"""
XLIFF2 = """<xliff xmlns="urn:oasis:names:tc:xliff:document:2.0" srcLang="en"><file><unit id="1">\
<segment state="initial"><source>Hello <pc id="1">you</pc></source></segment>\
<segment><source>Bye <ph id="2"/></source><target/></segment>\
<segment state="final"><source>Done</source><target>Fertig</target></segment></unit></file></xliff>"""
TMX = """<tmx version="1.4"><header srclang="en"/><body>
<tu>
 <tuv xml:lang="fr"><seg>Bonjour</seg></tuv>
 <tuv xml:lang="en-US"><seg>Hello <bpt i="1">&lt;b></bpt>you<ept i="1">&lt;/b></ept></seg></tuv>
</tu>
<tu><tuv xml:lang="en"><seg>Known</seg></tuv><tuv xml:lang="de-DE"><seg>Bekannt</seg></tuv></tu>
</body></tmx>
"""
TS = """<!DOCTYPE TS>
<TS version="2.1" language="de_DE"><context><name>Main</name>
<message><source>Open &amp;file</source><translation type="unfinished"></translation></message>
<message numerus="yes"><source>%n files</source>
 <translation type="unfinished"><numerusform></numerusform><numerusform></numerusform></translation></message>
<message><source>Done</source><translation>Fertig</translation></message>
<message><source>Gone</source><translation type="vanished">Weg</translation></message>
</context></TS>
"""
JSON = """{"@@locale": "en", "title": "Say \\"Hi\\"", "@title": {"description": "not this"}, "n": 3, "none": null,
 "list": ["one \\u00e4", {"deep": "two"}], "": "",
 "items": "{count, plural, =0{No items} other{{count} items in {place}}} left"}
"""
YAML = """# comment
en:
  hello: Hello world   # not this
  quoted: "He said \\"no\\"" # nor this
  single: 'It''s me'
  number: 5
  flag: no
  date: 2020-01-01
  list: [one apple, "two", &a three]
  text: |
    First line.
      Second line.

  fold: >-
    A long
    text.

    And more.
  ref: *a
  multi: this is
    two lines
"""
PROPERTIES = "# note\nkey = Hello \\\n   world\n a\\:b:It''s {0}\r\nc=\\u00e4 pie\\n more\n!x\nempty=\nalone\nd e f\n"
STRINGS = '/* "no" = "no"; */\n"a" = "Hello %@ \\"you\\"";\n// "x" = "y";\nkey = "Next\\nline";\n'
NOTEBOOK = """{"cells": [
  {"cell_type": "markdown", "source": [
    "# Title\\n",
    "\\n",
    "Some **bold** words, $x^2 + a$."
   ]},
  {"cell_type": "code", "source": ["print('hello')"], "outputs": [{"source": "not this"}]},
  {"cell_type": "markdown", "source": "One *line*"}, {"cell_type": "raw", "source": ["raw"]}
 ], "nbformat": 4, "metadata": {"source": "nor this"}}
"""
TEX = r"""\documentclass{article}
\title{The fast car} % not this
\author{Jane Doe}
\begin{document}
\maketitle
\section*{A \emph{good} start}\label{sec:a}
It costs 5\,\% of $x^2 + y$ and is \textbf{very fast}, see~\cite[p. 3]{smith} and
\ref{fig:a}.\footnote{A note about \textit{cars}.} % a comment
A ``nice'' caf\'e, na\"{\i}ve \verb|code here|.\\[2pt] Next \LaTeX{} line, \href{http://x}{a link}

\begin{equation} a = b \text{ not this} \end{equation}
\begin{itemize}[nosep]
  \item[(a)] First \& last
\end{itemize}
\begin{tabular}{l|r}
Name & Price \\ \hline
Bread & 3.50 \\
\end{tabular}
\begin{lstlisting}
not % this
\end{lstlisting}
\[ E = mc^2 \]
\end{document} not this
"""
EXAMPLES = {
    "html": HTML, "md": MARKDOWN, "srt": SRT, "vtt": VTT, "po": PO, "xml": XML, "text": " Hi,\r\n\n you.\n", "csv": CSV,
    "tsv": CSV.replace(";", "\t"), "xliff": XLIFF, "tmx": TMX, "ts": TS, "json": JSON, "yaml": YAML,
    "properties": PROPERTIES, "strings": STRINGS, "ipynb": NOTEBOOK, "tex": TEX,
}  # fmt: skip
TEXTS = {name for name, one in FORMATS.items() if not one.data}
OPTIONS = {"csv": {"column": "text"}, "tsv": {"column": "text"}}
TARGETS = re.compile(r"\n  (?=<target)|<(target|numerusform|translation)\b.*?</\1>")
ENTRY = re.compile(r'^msgstr(?:\[\d\])? "(?:.*)"\n(?:".*"\n)*', re.MULTILINE)

PIECES = {
    "html": ["<p>", "</p>", "<b>", "</b>", "<i>", "</i>", "<a href='?a&b'>", "</a>", "<br>", "<br/>", "&lt;", "&amp",
             "&#60;", "&unknown;", "<", ">", "</", "<!--", "-->", "<!x>", "<?x?>", "<script>", "</script>", "<code>",
             "</code>", "<textarea>", '<img alt="a dog">', "<img alt=dog>", "<li>", "<x id='7'/>", '"',
             "<![CDATA[", "]]>"],
    "md": ["*", "**", "_", "`", "```", "\n", "\n\n", "- ", "> ", "# ", "[", "]", "](x)", "![", "[r]: y", "|", "|-|-|",
           "  \n", "\\", "<b>", "</b>", "<div>", "---", "    ", "1. ", "&amp;", "[^1]", "<http://x.y>", "\r\n",
           "~~", "\t"],
    "srt": ["\n", "\n\n", "1\n", "00:00:01,000 --> 00:00:02,000\n", "<i>", "</i>", "{\\an8}", "- ", "<", ". ", "\r\n"],
    "vtt": ["\n", "\n\n", "id\n", "00:01.000 --> 00:02.000\n", "<v Bob>", "</v>", "&lt;", "<c.x>", "NOTE ", ". "],
    "xml": ["<p>", "</p>", "<b>", "</b>", "<x/>", "&lt;", "<!-- c -->", "<ig>", "<", "\n"],
    "text": ["\n", "\r\n", "# ", "<b>", "```"],
    "json": ['"a": "b"', ",", "{", "}", "[", "]", ' "x"', "1", '"\\u00e4"', "\n", '"{n, select, a{b} other{c}}"'],
    "yaml": ["a: ", "\n", "- ", "  ", "'", '"', "#", " | ", ">-\n", "[", "]", "&x ", "*x", "{", "}", ": ", "? "],
    "properties": ["=", ":", " ", "\\", "\n", "\r\n", "#", "\\u00e4", "'", "{0}", "\\\n"],
    "strings": ['"a" = "b";', "/*", "*/", "//", '"', "=", "\\", "\n"],
    "tex": ["{", "}", "$", "$$", "\\[", "\\]", "\\emph{", "\\section{", "\\begin{equation}", "\\end{equation}", "%",
            "\\", "\n\n", "\\item", "[", "]", "&", "\\\\", "~", "\\verb|", "|", "\\footnote{", '\\"a',
            "\\begin{document}"],
}  # fmt: skip
WORDS = ["word", "Hello", " ", " ", "two words", "Größe", "你好", "5", ",", ". ", "\ue000", "\x00", "\ufffd"]
REFUSES = ("json", "yaml", "strings", "ipynb")  # formats in which not every text is a document
HEADS = {"srt": "1\n00:00:01,000 --> 00:00:02,000\n", "vtt": "WEBVTT\n\n"}


def documents(format: str) -> st.SearchStrategy[str]:
    pieces = st.lists(st.sampled_from(PIECES[format] + WORDS), max_size=25)
    return pieces.map(lambda parts: HEADS.get(format, "") + "".join(parts))


def shuffled(text: str, seed: int = 0) -> str:
    """Words in another order and in other letters; every private-use character once, anywhere."""
    parts = [part for part in re.split("([\ue000-\uf8ff]|\\s+)", text) if part]
    random.Random(seed).shuffle(parts)
    return "".join(part if "\ue000" <= part <= "\uf8ff" else part.swapcase() for part in parts)


def translated(text: str, format: str, translate: object = shuffled) -> str:
    document = read_document(text, format, **OPTIONS.get(format, {}))
    return document.write([translate(unit.passage) for unit in document.units])  # type: ignore[operator]


def skeleton(text: str) -> Counter[str]:
    """The tags of a page, without the attributes that are translated; comments and other declarations."""
    found: Counter[str] = Counter()

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found[f"<{tag} {[(n, v) for n, v in attrs if n not in ('alt', 'title')]}>"] += 1

        def handle_endtag(self, tag: str) -> None:
            found[f"</{tag}>"] += 1

        def handle_comment(self, data: str) -> None:
            found[f"<!--{data}"] += 1

    parser = Parser()
    parser.feed(text)
    parser.close()
    return found


@pytest.mark.parametrize("format", sorted(EXAMPLES))
def test_an_unchanged_document_is_the_same_byte_for_byte(format: str) -> None:
    text = EXAMPLES[format]
    assert set(EXAMPLES) == TEXTS
    if format == "po":
        assert ENTRY.sub("", translated(text, format, str)) == ENTRY.sub("", text)
    elif format in ("xliff", "ts"):
        assert TARGETS.sub("", translated(text, format, str)) == TARGETS.sub("", text)
    else:
        assert translated(text, format, str) == text
    document = read_document(text, format, **OPTIONS.get(format, {}))
    assert document.write([shuffled(unit.passage) for unit in document.units], "fr") != text


@pytest.mark.parametrize("format", sorted(PIECES))
def test_any_document_unchanged_is_the_same_byte_for_byte(format: str) -> None:
    @settings(max_examples=80, deadline=None)
    @given(documents(format))
    def check(text: str) -> None:
        try:
            same, _ = translated(text, format, str), translated(text, format)
        except UserError:
            assert format in REFUSES
        else:
            assert same == text

    check()


@settings(max_examples=100, deadline=None)
@given(documents("html"), st.integers(0, 5))
def test_words_never_become_tags_and_tags_are_never_lost(text: str, seed: int) -> None:
    after = translated(text, "html", lambda passage: shuffled(passage, seed))
    assert skeleton(after) == skeleton(text)


@settings(max_examples=50, deadline=None)
@given(st.recursive(st.sampled_from(["one ", "two", "."]), lambda inner: st.lists(inner, min_size=1, max_size=3).map(
    lambda parts: f"<b>{''.join(parts)}</b> <i>x</i>")), st.integers(0, 5))  # fmt: skip
def test_nesting_stays_balanced(text: str, seed: int) -> None:
    after = translated(text, "html", lambda passage: shuffled(passage, seed))
    open_tags: list[str] = []
    for close, name in re.findall(r"<(/?)(\w+)>", after):
        if close:
            assert open_tags.pop() == name
        else:
            open_tags.append(name)
    assert not open_tags and skeleton(after) == skeleton(text)


@settings(max_examples=80, deadline=None)
@given(documents("md"), st.integers(0, 5))
def test_targets_code_and_tags_of_markdown_are_never_lost(text: str, seed: int) -> None:
    def kept(text: str) -> Counter[str]:
        return Counter(raw for unit in read_document(text, "md").units for (raw,) in unit.marks.values())

    after = translated(text, "md", lambda passage: shuffled(passage, seed))
    for raw, count in kept(text).items():
        assert after.count(raw) >= count


def test_what_is_translated_in_a_page() -> None:
    passages = [re.sub("[\ue000-\uf8ff]", "·", unit.passage) for unit in read_document(HTML, "html").units]
    assert passages == [
        "Hi there", 'A "note"', "Hello ·big ·world·· & ·, see ·. · Next <b> line", "a dog", "One", "Three",
        "· 5 < 6 && a ·link· \xa0é",
    ]  # fmt: skip


def test_text_is_escaped_in_each_format() -> None:
    def attack(passage: str) -> str:
        return passage.replace("word", '<b a="\'">&lt;|*x*](y)')

    assert translated("<p title='word'>word</p>", "html", attack) == (
        '<p title=\'&lt;b a="&#39;"&gt;&amp;lt;|*x*](y)\'>&lt;b a="\'"&gt;&amp;lt;|*x*](y)</p>'
    )
    assert translated("<img alt=word>", "html", attack).startswith('<img alt="&lt;b a=&quot;')
    assert translated("word\n\n| word |\n|---|\n", "md", attack) == (
        '&lt;b a="\'">&amp;lt;|\\*x\\*\\](y)\n\n| &lt;b a="\'">&amp;lt;\\|\\*x\\*\\](y) |\n|---|\n'
    )
    assert translated("word", "md", lambda _: "# one") == "\\# one"
    assert translated("word", "md", lambda _: "1. one") == "1\\. one"
    assert '&lt;b a="\'"&gt;&amp;lt;' in translated(VTT.replace("Bob>Hello", "Bob>word"), "vtt", attack)
    po = 'msgid "word"\nmsgstr ""\n'
    assert translated(po, "po", lambda _: 'a "b"\\\tc\nd') == ('msgid "word"\nmsgstr ""\n"a \\"b\\"\\\\\\tc\\n"\n"d"\n')


def test_what_is_translated_in_markdown() -> None:
    passages = [re.sub("[\ue000-\uf8ff]", "·", unit.passage) for unit in read_document(MARKDOWN, "md").units]
    assert passages == [
        "Head ·one·", "Para ·one· more ·link· and · ·hard ·img· ·ref· ·r· *x* & ·html·", "item one goes on", "task",
        "quote more", "a b", "c | d", "x ·y·", "a tip", "Hello", "note text", "Setext ·line",
    ]  # fmt: skip
    after = translated("See [the site] now.\n\n[the site]: http://x\n", "md", str.upper)
    assert after == "SEE [THE SITE][the site] NOW.\n\n[the site]: http://x\n", "its definition is still found"


def test_a_sentence_in_several_cues_is_translated_at_once_and_divided() -> None:
    first, *rest = read_document(SRT, "srt").units
    assert re.sub("[\ue000-\uf8ff]", "·", first.passage) == "·Hello there, my· old ·friend of mine."
    assert [re.sub("[\ue000-\uf8ff]", "·", unit.passage) for unit in rest] == ["- Yes.", "- ·No."]
    cut = first.cuts[0]  # type: ignore[attr-defined]

    def lost(passage: str) -> str:  # every word is in the first cue
        return passage if cut not in passage else passage.replace(f"{cut}friend of mine.", f"friend of mine.{cut}")

    assert translated(SRT, "srt", lost) == SRT.replace("my</i>\nold\n", "my</i> old\n")


def test_the_lines_of_a_cue_are_balanced_again() -> None:
    cue = "1\r\n00:00:01,000 --> 00:00:02,000\r\nSome words\r\nand some more of them.\r\n"
    after = translated(cue, "srt", lambda passage: passage + " And then there are quite a few more.")
    assert after.endswith("\r\nSome words and some more of them.\r\nAnd then there are quite a few more.\r\n")


def test_only_missing_and_fuzzy_entries_of_po_are_translated_unless_asked_for_all() -> None:
    after = translated(PO, "po", str.upper)
    assert after == PO.replace('now"\nmsgstr ""', 'now"\nmsgstr ""\n"OPEN \\"%S\\"\\n"\n"NOW"').replace(
        'msgstr[0] "falsch"\nmsgstr[1] ""', 'msgstr[0] "ONE FILE"\nmsgstr[1] "%D FILES"'
    )
    every = read_document(PO, "po", every=True)
    assert [str(unit.passage) for unit in every.units] == ['Open "%s"\nnow', "Done", "one file", "%d files"]
    one = PO.replace("nplurals=2", "nplurals=1").replace('msgstr[1] ""\n', "")
    assert [str(unit.passage) for unit in read_document(one, "po").units][-1] == "%d files"


def test_tags_of_xml_can_be_named() -> None:
    def passages(**options: object) -> list[str]:
        return [re.sub("[\ue000-\uf8ff]", "·", unit.passage) for unit in read_xml(XML, **options).units]  # type: ignore[arg-type]

    assert passages() == ["Hello ·x· you & me", "One", "no"]
    assert passages(ignore_tags=["ig"]) == ["Hello ·x· you & me", "One"]
    assert passages(splitting_tags=["b"]) == ["Hello", "x", "you & me", "One", "no"]
    assert passages(non_splitting_tags=["t", "ig", "sec"])[-1] == "··One··no··"


def units(text: str, format: str) -> list[str]:
    return [re.sub("[\ue000-\uf8ff]", "·", unit.passage) for unit in read_document(text, format).units]


def test_what_is_translated_in_files_of_names_and_values() -> None:
    assert units(JSON, "json") == ['Say "Hi"', "one ä", "two", "No items", "{count} items in {place}", " left"]
    assert units(YAML, "yaml") == [
        "Hello world", 'He said "no"', "It's me", "one apple", "two", "three", "First line.\n  Second line.\n",
        "A long text.\nAnd more.", "this is two lines",
    ]  # fmt: skip
    assert units(PROPERTIES, "properties") == ["Hello world", "It's {0}", "ä pie\n more", "e f"]
    assert units(STRINGS, "strings") == ['Hello %@ "you"', "Next\nline"]
    assert units(NOTEBOOK, "ipynb") == ["Title", "Some ·bold· words, ·.", "One ·line·"]


def upper(passage: str) -> str:
    """In capitals, with quotes and in another script."""
    return passage.upper() + " \"'ä你:"


def test_values_are_read_by_the_libraries_of_their_formats_as_they_were_meant() -> None:
    found = json.loads(translated(JSON, "json", upper))
    assert found["title"] == upper('Say "Hi"') and found["list"][0] == upper("one ä") and found["n"] == 3
    assert found[
        "items"
    ] == f"{{count, plural, =0{{{upper('No items')}}} other{{{upper('{count} items in {place}')}}}}}" + (upper(" left"))
    before, after = yaml.safe_load(YAML)["en"], yaml.safe_load(translated(YAML, "yaml", upper))["en"]
    for name, value in before.items():
        if isinstance(value, str) and name != "ref":
            ends = value[len(value.rstrip("\n")) :]
            assert after[name] == upper(value).replace('\n "', ' "').rstrip("\n") + ends or name == "text", name
        elif not isinstance(value, list | str):
            assert after[name] == value
    assert after["text"].startswith("FIRST LINE.\n  SECOND LINE.\n") and after["ref"] == upper("three")
    assert "key = HELLO WORLD \"'\\u00e4\\u4f60:\n" in translated(PROPERTIES, "properties", upper), "it was ASCII"
    assert "IT''S {0} \"''\\u00e4" in translated(PROPERTIES, "properties", upper), "as MessageFormat writes it"
    assert '"a" = "HELLO %@ \\"YOU\\" \\"\'ä你:";' in translated(STRINGS, "strings", upper)
    cells = json.loads(translated(NOTEBOOK, "ipynb", str.upper))["cells"]
    assert cells[0]["source"] == ["# TITLE\n", "\n", "SOME **BOLD** WORDS, $x^2 + a$."]
    assert cells[1:2] + cells[3:] == json.loads(NOTEBOOK)["cells"][1:2] + json.loads(NOTEBOOK)["cells"][3:]


def test_what_is_translated_in_latex() -> None:
    assert units(TEX, "tex") == [
        "The fast car", "A ·good· start",
        "It costs 5·% of · and is ·very fast·, see\xa0· and ·.· ·A “nice” café, naïve ·. · Next · line, ·a link·",
        "A note about ·cars·.", "First & last", "Name", "Price", "Bread",
    ]  # fmt: skip
    after = translated(TEX, "tex", str.upper)
    for kept in (
        "$x^2 + y$", r"\verb|code here|", r"a = b \text{ not this}", "not % this", "E = mc^2", r"\cite[p. 3]{smith}",
        "% a comment\n", r"\author{Jane Doe}", "{l|r}", r"\href{http://x}{A LINK}", r"\section*{A \emph{GOOD} START}",
        r"\label{sec:a}", r"FIRST \& LAST", r"PRICE \\ \hline", r"\end{document} not this",
    ):  # fmt: skip
        assert kept in after, kept
    assert translated("word", "tex", lambda _: r"50% of $5 & {a}_b#~^\ ") == (
        r"50\% of \$5 \& \{a\}\_b\#\textasciitilde{}\textasciicircum{}\textbackslash{} "
    )


def test_mathematics_in_markdown_is_copied() -> None:
    text = "Let $x + y$ be $5 and $6 or a$b$c.\n\n$$\nnot this\n$$\n\nSo $$ax = b$$ holds.\n"
    assert units(text, "md") == ["Let · be $5 and $6 or a$b$c.", "So · holds."]


def test_targets_of_xliff_get_a_state_and_their_language() -> None:
    def to_german(text: str, format: str, **options: object) -> str:
        document = read_document(text, format, **options)
        return document.write([unit.passage.swapcase() for unit in document.units], "German")

    mark = 'state="translated" state-qualifier="mt-suggestion"'
    assert to_german(XLIFF, "xliff") == XLIFF.replace('"en">', '"en" target-language="de">').replace(
        "fast.</source>",
        f'fast.</source>\n  <target {mark}>tHE <g id="1">RED CAR</g> IS <x id="2"/> FAST.</target>',
    ).replace('<target state="new">Draft', f"<target {mark}>dRAFT")
    assert to_german(XLIFF2, "xliff") == XLIFF2.replace('"en">', '"en" trgLang="de">').replace(
        '"initial">', '"translated">').replace("<segment>", '<segment state="translated">').replace(
        "you</pc></source>", 'you</pc></source><target>hELLO <pc id="1">YOU</pc></target>').replace(
        "<target/>", '<target>bYE <ph id="2"/></target>')  # fmt: skip
    assert "fERTIG" not in to_german(XLIFF, "xliff") and "dONE</target>" in to_german(XLIFF, "xliff", every=True)
    assert to_german(TS, "ts") == TS.replace('ed"></', 'ed">oPEN &amp;FILE</').replace(
        "<numerusform></", "<numerusform>%N FILES</")  # fmt: skip
    assert to_german(TMX, "tmx") == TMX.replace("</ept></seg></tuv>\n", "</ept></seg></tuv>\n "
        '<tuv xml:lang="de"><seg>hELLO <bpt i="1">&lt;b></bpt>YOU<ept i="1">&lt;/b></ept></seg></tuv>\n')  # fmt: skip


def test_a_page_names_its_new_language_and_its_description_is_translated() -> None:
    page = (
        '<html lang="en-US" xml:lang=en><meta name="description" content="About cars"><meta name="x" content="no">'
        '<meta property="og:title" content=\'A "car"\'><p lang="fr">Word</p><p lang="EN">word</p></html>'
    )
    document = read_document(page, "html")
    assert document.write([str(unit.passage) for unit in document.units], "zh-TW") == page, "nothing was translated"
    assert document.write([unit.passage.swapcase() for unit in document.units], "zh-TW") == page.replace(
        '"en-US"', '"zh-Hant"').replace("=en>", "=zh-Hant>").replace('"EN">word', '"zh-Hant">WORD').replace(
        "Word", "wORD").replace("About cars", "aBOUT CARS").replace('A "car"', 'a "CAR"')  # fmt: skip


def test_the_encoding_of_a_file_is_kept() -> None:
    for encoding in ("utf-16", "utf-8-sig"):
        data = STRINGS.encode(encoding)
        document = read_document(data, "strings")
        assert document.data([str(unit.passage) for unit in document.units]) == data
        assert (
            document.data([unit.passage.upper() for unit in document.units])
            .decode(encoding)
            .endswith('NEXT\\nLINE";\n')
        )
    latin = b'<?xml version="1.0" encoding="iso-8859-1"?><p>caf\xe9</p>'
    assert read_document(latin, "xml").data(["é 你"]) == latin.replace(b"caf\xe9", b"\xe9 &#20320;")
    document = read_document("a=caf\xe9\n".encode("latin-1"), "properties")
    assert document.data(["é 你"]) == b"a=\xe9 \\u4f60\n"


@pytest.mark.parametrize(
    ("format", "text", "message"),
    [
        ("json", '{"a": }', r"not JSON: Expecting value: line 1 column 7"),
        ("json", "[" * 100_000, "not read: too many JSON objects|not JSON"),
        ("yaml", 'a: "b\n', r"line \d: not YAML: .*; mend the file"),
        ("ipynb", "{}", "not a Jupyter notebook of version 4"),
        ("strings", "hello", "not .strings: no line has the form"),
        ("ts", "export const a = 1;", "not a TS file of Qt"),
        ("tmx", "<a/>", "not TMX"),
        ("xliff", "<a/>", "not XLIFF"),
        ("srt", "no times", "not SRT: no line has times"),
        ("vtt", "1\n00:01.000 --> 00:02.000\nHi", "not WebVTT: the first line must be WEBVTT"),
        ("po", 'msgid "a"\nmsgstr "b" c\n', "line 2: expected msgid"),
        ("po", 'msgid "a"b"\n', "line 1: the string .* has a quote that is not escaped"),
        ("htm", "", r"unknown format 'htm' \(did you mean 'html'\?\) \(allowed: html, md"),
    ],
)
def test_broken_files_are_refused(format: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_document(text, format)


def test_only_the_reader_of_a_format_is_loaded() -> None:
    code = (
        "import sys; import allyouneed.apps.translate.translator; from importlib import import_module\n"
        "here = 'allyouneed.apps.translate.documents'\n"
        "assert not any(name.startswith(here) for name in sys.modules)\n"
        "import_module(here + '.formats').read_document('Hi', 'text')\n"
        "print(*sorted(name.removeprefix(here) for name in sys.modules if name.startswith(here)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == [".formats", ".parts", ".text"]


def test_the_format_of_a_file_is_known_by_its_suffix() -> None:
    assert [format_of(name) for name in ("a.HTM", "b.md", "c.pot", "d.txt")] == ["html", "md", "po", "text"]
    with pytest.raises(UserError, match=r"a\.doc: unknown suffix; set --format"):
        format_of("a.doc")
