"""Documents keep everything but their words, whatever the translator answers."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allyouneed.apps.translate.documents.formats import READERS, format_of, read_document
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
EXAMPLES = {
    "html": HTML, "md": MARKDOWN, "srt": SRT, "vtt": VTT, "po": PO, "xml": XML, "text": " Hi,\r\n\n you.\n", "csv": CSV,
    "tsv": CSV.replace(";", "\t"),
}  # fmt: skip
OPTIONS = {"csv": {"column": "text"}, "tsv": {"column": "text"}}
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
}  # fmt: skip
WORDS = ["word", "Hello", " ", " ", "two words", "Größe", "你好", "5", ",", ". ", "\ue000", "\x00", "\ufffd"]
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
    assert set(EXAMPLES) == set(READERS)
    if format == "po":
        assert ENTRY.sub("", translated(text, format, str)) == ENTRY.sub("", text)
    else:
        assert translated(text, format, str) == text
    assert translated(text, format) != text


@pytest.mark.parametrize("format", sorted(PIECES))
def test_any_document_unchanged_is_the_same_byte_for_byte(format: str) -> None:
    @settings(max_examples=80, deadline=None)
    @given(documents(format))
    def check(text: str) -> None:
        assert translated(text, format, str) == text

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


@pytest.mark.parametrize(
    ("format", "text", "message"),
    [
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
