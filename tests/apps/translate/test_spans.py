"""What counts as a protected span, and that taking spans out and putting them back changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allyouneed.apps.translate.spans import spans
from allyouneed.apps.translate.spans.spans import SYMBOL, protect, restore, without_spans


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("Open https://x.com/a?b=1, then www.y.org/z.", ["https://x.com/a?b=1", "www.y.org/z"]),
        ("See https://en.wiki.org/Foo_(bar) (or https://x.com).", ["https://en.wiki.org/Foo_(bar)", "https://x.com"]),
        ("请打开https://x.com/a并登录，或写信给a.b@c.org。", ["https://x.com/a", "a.b@c.org"]),
        ("Is it on example.com? Mail a@b.co.uk!", ["example.com", "a@b.co.uk"]),
        ("Run /usr/bin/x, ~/.rc, C:\\a\\b.txt or src/m.py.", ["/usr/bin/x", "~/.rc", "C:\\a\\b.txt", "src/m.py"]),
        ("Use `a b`, ``c`d``, get_x, f() and --max-len=3.", ["`a b`", "``c`d``", "get_x", "f()", "--max-len=3"]),
        ("Hi {name}, %s, ${x}: %1$s!", ["{name}", "%s", "${x}", "%1$s"]),
        ("{first} {last} and v{n}", ["{first} {last}", "v{n}"]),
        ("%d files, 50% done, 100%.", ["%d", "50%", "100%"]),
        ('A <b>b</b> <i class="x">c</i> <x id="7"/> a < b', ["<b>", "</b>", '<i class="x">', "</i>", '<x id="7"/>']),
        ("**a** *b* [c](d) ![e](f_(g))", ["**", "**", "*", "*", "[", "](d)", "![", "](f_(g))"]),
        ("Ask @tom about #python and #12.", ["@tom", "#python", "#12"]),
        ("I ❤️ you 👨‍👩‍👧 🇩🇪 :-) :smile:", ["❤️", "👨‍👩‍👧 🇩🇪", ":-)", ":smile:"]),
        ("5 kg, $1,000.50, 20 °C, 3.5%, 12 €", ["5 kg", "$1,000.50", "20 °C", "3.5%", "12 €"]),
        ("In 1887, on 2024-01-31, v1.2.3 at 10.0.0.1", ["1887", "2024-01-31", "v1.2.3", "10.0.0.1"]),
        ("他在1887年有5kg。", ["1887", "5kg"]),
        ("from en→de and A -> B, x=>y", ["en→de", "A -> B", "x=>y"]),
        ("a→b→c and größer→kleiner.", ["a→b→c", "größer→kleiner"]),
        ("Open Settings → Privacy now", ["→"]),
        ("训练→推理", ["→"]),
        ("worth €16bn or 3,5 Mio. Euro", ["€16bn", "3,5 Mio."]),
        ("投资了3亿美元和三亿元", ["3亿", "三亿"]),
        ("\u200bx\ue000y\U000f0000", ["\u200b", "\ue000", "\U000f0000"]),
        # not spans
        ('"Why?" she asked - "I don\'t know…" (really) – yes; and/or 1/2, he/she: ok.', []),
        ("It's 5 o'clock, 12:30. Dr. Smith has 3 dogs, e.g. in the U.S. Army. C# is 30 years old.", []),
        ("C'est l'été à 20h30. « Bonjour » ! Am 3. Oktober. In den 80ern, the 1990s.", []),
        ("Tom在Boston长大，他有3只狗。", []),
    ],
)
def test_each_kind_of_span_is_found(text: str, spans: list[str]) -> None:
    found = protect(text)
    assert [found.spans[char].text for char in SYMBOL.findall(found.template)] == spans
    assert restore(found.template, found.spans) == text


PARTS = [*"aB字 .1`@#/_*😀\U000f0000", "<b>", "</b>", "{x}", "%d", "http://", "x.com"]


@given(st.lists(st.sampled_from(PARTS), max_size=30).map("".join))
def test_any_text_is_restored(text: str) -> None:
    found = protect(text)
    assert restore(found.template, found.spans) == text
    assert not SYMBOL.search(without_spans(text))


def test_spans_of_a_long_text_are_found_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread runs while a search does, so that one search does not read all of a long text."""
    piece = "see <a href='x'>https://x.org/a?b=c</a> or {name} at 2020-01-02, `code`, **bold** and 1,234 km; "
    texts = [
        piece * 1000,
        "{" * 100_000,
        "<" * 100_000 + "{name}",
        "a" * 16_380 + " {name} " + "b" * 9000,
        "a" * 10_000 + " https://x.org/" + "q" * 30_000 + " {name}",  # longer than a window
    ]
    expected = [[one.span() for one in spans._PATTERN.finditer(text)] for text in texts]
    read: list[int] = []

    class Recorder:
        def search(self, text: str, begin: int, end: int) -> Any:
            read.append(end - begin)
            return pattern.search(text, begin, end)

        match = staticmethod(spans._PATTERN.match)

    pattern = spans._PATTERN
    monkeypatch.setattr(spans, "_PATTERN", Recorder())
    assert [[one.span() for one in spans._matches(text)] for text in texts] == expected
    assert max(read) == spans.WINDOW
