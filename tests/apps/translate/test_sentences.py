"""A text is cut where a reader would cut it, and its parts joined are the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import allyouneed as ayn
from allyouneed.apps.translate.spans.spans import SYMBOL
from allyouneed.apps.translate.splitting.sentences import clauses, fit, join, sentences
from allyouneed.apps.translate.splitting.split import frame


@pytest.mark.parametrize(
    "parts",
    [
        ["Hello there. ", "How are you? ", "Fine!"],
        ["Dr. Smith paid $3.50 to J. S. Bach. ", "He left."],
        ["It costs 1.5 million, e.g. in the U.S. Army. ", "See fig. 3 and No. 5."],
        ["Wait... no, really. ", "Yes."],
        ['He said "Go." ', "Then he left (at last!). ", "«Fin.» ", "Bon."],
        ['"Why?" she asked. ', "Nobody knew."],
        ["Am 3. Oktober war es z. B. warm. ", "Das war 1990. ", "Schön!"],
        ["What?! ", "No!!  ", "Yes."],
        ["你好！", "我说：“走吧。”", "然后……他离开了。", "好；", "行？"],
        ["彼は「はい。」", "と言った。"],
        ["Version 2.0 已发布。", "Hello world! ", "你好!", "我很好。"],
        ["यह एक वाक्य है। ", "यह दूसरा है।"],
        ["Great! ", "😀 Next one."],
        ["no stop at all"],
        ["www.example.com is a site. ", "Mail a.b@c.de now."],
    ],
)
def test_a_line_is_split_into_its_sentences(parts: list[str]) -> None:
    assert sentences("".join(parts)) == parts


def test_clauses_leave_numbers_whole() -> None:
    parts = ["First, ", "1,000 or 12:30: ", "then — ", "on, ", "end"]
    assert clauses("".join(parts)) == parts
    assert clauses("春天，夏天、秋天") == ["春天，", "夏天、", "秋天"]


def characters(text: str) -> list[tuple[int, int]]:
    return [(place, place + 1) for place in range(len(text))]


ANY = st.text(alphabet=st.sampled_from("aB1 .,!?…。！，“”\"')（\n\u3000é\u0301字あ👍\ufe0f"), max_size=80)


@given(ANY, st.integers(1, 20))
def test_parts_joined_are_the_text_and_none_is_too_long(text: str, budget: int) -> None:
    assert "".join(sentences(text)) == text == "".join(clauses(text))
    parts = fit(text, budget, characters)
    assert "".join(part.text for part in parts) == text
    assert all(0 < len(part.text) <= budget for part in parts)
    assert not parts or parts[-1].cut == "end"


def test_a_long_sentence_is_split_between_clauses_then_words_then_characters() -> None:
    assert [part.text for part in fit("one two, three four, five. Six.", 20, characters)] == [
        "one two, ",
        "three four, five. ",
        "Six.",
    ]
    assert fit("aaa bbb ccc ddd", 9, characters) == [("aaa bbb ", "word"), ("ccc ddd", "end")]
    assert fit("abcdefgh", 3, characters) == [("abc", "word"), ("def", "word"), ("gh", "end")]
    assert [part.text for part in fit("e\u0301e\u0301e\u0301", 3, characters)] == ["e\u0301", "e\u0301", "e\u0301"]


@pytest.mark.parametrize("text", ["春" * 20_000, "a" * 20_000, "word " * 4_000, "No. " * 5_000, "e\u0301" * 10_000])
def test_splitting_takes_linear_time(text: str) -> None:
    """Counted in characters that are tokenized: each part looks at its own surroundings, not at all of the rest."""
    read = 0

    def spans(some: str) -> list[tuple[int, int]]:
        nonlocal read
        read += len(some)
        return characters(some)

    parts = fit(text, 40, spans)
    assert "".join(part.text for part in parts) == text
    assert read <= 20 * len(text)


@pytest.mark.parametrize(
    ("left", "space", "right", "cut", "around", "between"),
    [
        ("One.", " ", "Two.", "sentence", "", " "),
        ("One.", "", "Two.", "sentence", "。我", " "),  # from Chinese into English
        ("一。", " ", "二。", "sentence", "", ""),  # from English into Chinese
        ("一。", "", "二。", "sentence", "", ""),
        ("One.", "   ", "Two.", "sentence", "", "   "),
        ("一。", "\t", "二。", "sentence", "", "\t"),
        ("abc", "", "def", "word", "cd", ""),  # a word put together again
        ("one", "", "two", "word", "春夏", " "),
        ("", " ", "Two.", "sentence", "", " "),
    ],
)
def test_separators_fit_the_script(left: str, space: str, right: str, cut: str, around: str, between: str) -> None:
    assert join(left, space, right, cut, around) == between


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2. Weltkrieg begann früh.", ["2. Weltkrieg begann früh."]),
        ("  1. Bundesliga und\nmehr", ["1. Bundesliga und", "mehr"]),
        ("3. Oktober", ["3. Oktober"]),
        ("2. Türen öffnen", ["Türen öffnen"]),
        ("2. Open the door.", ["Open the door."]),
        ("1. Anfang\n\n2. Weltkrieg\n", ["Anfang", "Weltkrieg"]),  # a list
        ("2. Weltkrieg\n3. Ende", ["Weltkrieg", "Ende"]),
        ("1. Klasse\n1. Klasse", ["1. Klasse", "1. Klasse"]),
    ],
)
def test_an_ordinal_is_not_a_list_mark(text: str, expected: list[str]) -> None:
    segments, after = frame(text)
    assert [segment.template for segment in segments] == expected
    assert "".join(one.before + one.template for one in segments) + after == text


def test_a_chunk_has_its_own_spans_only() -> None:
    """Each span is looked at once, however long the line is; all together would take quadratic time."""
    translator = ayn.load()
    splitter = translator._splitter(translator.frame("de", "en"), protect=True)
    (split,) = splitter.split([" ".join(f"See http://a.com/{n} for the {n + 1000} books." for n in range(200))])
    assert len(split.chunks) == 200
    assert all(set(chunk.spans) == set(SYMBOL.findall(chunk.template)) != set() for chunk in split.chunks)
