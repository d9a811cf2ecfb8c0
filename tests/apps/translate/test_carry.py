"""Spans survive any model: one that copies, and ones that lose, double, move or rewrite words."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allyouneed.apps.translate.numbers.numbers import has_quantity
from allyouneed.apps.translate.spans.carry import AttentionMap, Carrier, read
from allyouneed.apps.translate.spans.spans import protect, restore
from allyouneed.apps.translate.splitting.edits import Edit, apply, in_order, moved
from allyouneed.infer.decoding.base import Hypothesis

Model = Callable[[str], str]
TEXTS = [
    "Please open https://x.com/a and read `code` first.",
    "Hello {name}, you have %d new messages from @tom.",
    "The <b>red <i>car</i></b> is very 😀 fast and **new** again.",
    "It weighs 5 kg and costs $1,000.50 in 1887.",
    "请打开https://x.com并登录，谢谢{name}。",
    "Tom told Facebook that `x` in Boston, Paris and Tokyo is not Tatoeba.",
    "`a` or `b`, then `c` and `d` with `e` for `f` but `g` of `h`.",
]


def carrier(model: Model, attends: bool = True) -> tuple[Carrier, list[str]]:
    """Decodes by a function; attention goes from the n-th to the n-th word."""
    heard: list[str] = []

    def decode(texts: list[str], keys: list[tuple[int, ...]]) -> list[list[Hypothesis]]:
        heard.extend(texts)
        return [[Hypothesis([ord(char) for char in model(text)], -1.0, -1.0, [-1.0], True)] for text in texts]

    def words(text: str) -> list[tuple[int, int]]:
        ends = [n for n, char in enumerate(text) if char == " "] + [len(text)]
        return list(zip([0, *ends], ends, strict=False))

    def attention(pairs: Sequence[tuple[str, Hypothesis]]) -> list[AttentionMap]:
        return [attention_of(text, found) for text, found in pairs]

    def attention_of(text: str, found: Hypothesis) -> AttentionMap:
        here, there = words(text), words(text_of(text, found))
        weights = torch.full((len(there), len(here)), 0.01)
        for n in range(len(there)):
            weights[n, min(n, len(here) - 1)] = 1.0
        return AttentionMap(weights, here, there)

    def text_of(source: str, found: Hypothesis) -> str:
        return "".join(map(chr, found.tokens))

    return Carrier(decode, text_of, attention if attends else None), heard


def translate(text: str, model: Model, attends: bool = True) -> str:
    found = protect(text)
    made, _ = carrier(model, attends)
    return made.translate([found.template], [found.spans], [(0,)])[0][0].text


def chaos(seed: int) -> Model:
    """Loses, doubles, moves and rewrites words."""

    def model(text: str) -> str:
        dice = random.Random(f"{seed} {text}")
        words = [word for word in text.split(" ") for _ in range(dice.choice([0, 1, 1, 1, 2]))]
        dice.shuffle(words)
        return " ".join(dice.choice([word, word, word[::-1], word + "s"]) for word in words)

    return model


@pytest.mark.parametrize("text", TEXTS)
def test_a_model_that_copies_gives_the_text_back(text: str) -> None:
    expected = text if text[0] < "z" else "请打开 https://x.com 并登录，谢谢 {name}。"  # apart from Chinese
    assert translate(text, str) == expected
    assert translate("Just words, nothing else.", str) == "Just words, nothing else."


def must_survive(text: str) -> Counter[str]:
    """Its spans but for numbers, which may be written otherwise."""
    found = protect(text)
    spans = [found.spans[char] for char in found.template if char in found.spans]
    return Counter(span.text for span in spans if span.kind.role != "number")


@settings(max_examples=150)
@given(st.sampled_from(TEXTS), st.integers(0, 10**6), st.booleans())
def test_no_model_loses_or_doubles_a_span(text: str, seed: int, attends: bool) -> None:
    answer = translate(text, chaos(seed), attends)
    for span, count in must_survive(text).items():
        assert answer.count(span) == count, (span, answer)
    assert answer.count("%d") == text.count("%d")
    assert all(has_quantity(one, answer) for one in ("5 kg", "$1,000.50") if one in text), answer
    opened = []
    for part in answer.replace("<", "\n<").replace(">", ">\n").split("\n"):
        if part in ("<b>", "<i>"):
            opened.append(part)
        elif part in ("</b>", "</i>"):
            assert opened.pop() == part.replace("/", ""), answer


def test_plain_text_is_read_once_and_as_it_is() -> None:
    made, heard = carrier(chaos(1))
    texts = ["Where is the station?", "I have 3 dogs."]
    made.translate(texts, [{}, {}], [(0,), (1,)])
    assert heard == texts


def test_without_protection_private_characters_are_text() -> None:
    made, heard = carrier(str)
    texts = ["a \U000f0000 b", "\U00108000"]
    assert [one[0].text for one in made.translate(texts, [{}, {}], [(0,), (1,)])] == heard == texts


def test_a_lost_stand_in_is_replaced_by_another() -> None:
    found = protect("Open {file} now.")
    made, heard = carrier(lambda text: text.replace("Tom", "him"))
    assert made.translate([found.template], [found.spans], [(0,)])[0][0].text == "Open {file} now."
    assert heard == ["Open Tom now.", "Open Facebook now."]


def test_pieces_are_the_last_resort_and_lose_inner_full_stops() -> None:
    model: Model = lambda text: "Words." if "Tom" not in text and "Facebook" not in text else "nothing"  # noqa: E731
    assert translate("Open `x` now, please.", model) == "Words `x` Words."
    assert translate("请看`x`吧。", model) == "Words `x` Words."


def test_numbers_are_read_as_they_are_at_first() -> None:
    made, heard = carrier(lambda text: text.replace("5 kg", "fünf Kilo").replace("1887", "187"))
    found = protect("It weighs 5 kg.")
    assert made.translate([found.template], [found.spans], [(0,)])[0][0].text == "It weighs fünf Kilo."
    found = protect("It was in 1887.")
    assert made.translate([found.template], [found.spans], [(0,)])[0][0].text == "It was in 1887."
    assert heard == ["It weighs 5 kg.", "It was in 1887.", "It was in 47."]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("attempt", [0, 1])
def test_what_is_read_can_be_turned_into_the_source(text: str, attempt: int) -> None:
    found = protect(text)
    reading = read(found.template, found.spans, attempt)
    if reading is not None:
        assert apply(reading.text, reading.edits) == restore(found.template, found.spans) == text
        assert "  " not in reading.text


def test_edits_move_characters() -> None:
    edits = in_order([Edit(2, 5, "XY"), Edit(2, 2, "<"), Edit(5, 5, ">"), Edit(8, 8, "!!")])
    assert apply("abcdefghij", edits) == "ab<XY>fgh!!ij"
    for span, expected in (
        ((0, 2), "ab"),
        ((2, 5), "XY"),
        ((3, 4), "XY"),
        ((5, 6), "f"),
        ((8, 10), "ij"),
        ((7, 9), "h!!i"),
    ):
        begin, end = moved(span, edits)
        assert "ab<XY>fgh!!ij"[begin:end] == expected
