"""ROUGE, error rates and edits by hand; the ROUGE values are those of rouge-score 0.1.2, the rates those of jiwer 4."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allyouneed.errors import UserError
from allyouneed.metrics.corrections import (
    TextEdit,
    correction_scores,
    count_edits,
    edit_scores,
    read_m2,
    text_edits,
)
from allyouneed.metrics.rewriting import METRICS, common_subsequence, rewriting_figures, rouge_l, rouge_n, words
from allyouneed.tasks.seq2seq import Correction, SequenceToSequence, Summarisation

FOUND = ["The cat's mat, 3.14 on the sat", "police killed the gunman"]
EXPECTED = ["the cat sat on a mat U.S. 3.14", "police kill the gunman"]


def test_rouge_equals_rouge_score() -> None:
    assert words(FOUND[0]) == ["the", "cat", "s", "mat", "3", "14", "on", "the", "sat"]
    assert rouge_n(FOUND[0], EXPECTED[0], 1) == pytest.approx(2 * 8 / (9 + 10))
    assert rouge_n(FOUND[0], EXPECTED[0], 2) == pytest.approx(2 * 2 / (8 + 9))
    assert rouge_l(FOUND[0], EXPECTED[0]) == pytest.approx(2 * 5 / (9 + 10))
    assert rouge_l(FOUND[1], EXPECTED[1]) == rouge_n(FOUND[1], EXPECTED[1], 1) == 0.75  # Lin 2004, section 3
    assert rouge_n(FOUND[1], EXPECTED[1], 2) == pytest.approx(1 / 3)
    assert rouge_n("", "a", 1) == rouge_l("", "a") == rouge_n("a", "a", 2) == 0


def test_rouge_counts_the_characters_of_chinese() -> None:
    assert words("我爱 Transformer。2017年") == ["我", "爱", "transformer", "2017", "年"]
    assert rouge_l("我爱北京", "我爱南京") == 0.75


def test_error_rates_equal_jiwers() -> None:
    assert METRICS["wer"](FOUND, EXPECTED) == pytest.approx(100 * 9 / 12)
    assert METRICS["cer"](["abc d", "x"], ["abcd", "xyz"]) == pytest.approx(100 * 3 / 7)


def slow(one: str, other: str) -> int:
    """The definition."""
    if not one or not other:
        return 0
    if one[0] == other[0]:
        return 1 + slow(one[1:], other[1:])
    return max(slow(one[1:], other), slow(one, other[1:]))


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_the_common_subsequence_matches_its_definition(one: str, other: str) -> None:
    assert common_subsequence(one, other) == slow(one, other)


def test_all_metrics_of_the_tasks_are_computed() -> None:
    figures, text = rewriting_figures(FOUND, FOUND)
    assert figures["exact"] == figures["rouge-2"] == figures["chrf"] == 100 and figures["cer"] == 0
    assert "of 2 texts" in text and "tok:13a" in text
    assert set(SequenceToSequence.metrics) == set(Summarisation.metrics) == {*figures, "loss"}
    assert set(Correction.metrics) - set(figures) == {"f0.5", "precision", "recall", "loss"}
    assert "tok:zh" in rewriting_figures(["我爱北京"], ["我爱南京"])[1]
    with pytest.raises(UserError, match="no examples"):
        rewriting_figures([], [])


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("the cat see teh sea", "the cat sees the sea", [(8, 11, "see", "sees"), (12, 15, "teh", "the")]),
        ("I like alot of it", "I like a lot of it", [(7, 11, "alot", "a lot")]),
        ("He go home .", "He goes home.", [(3, 5, "go", "goes")]),
        ("我门去学校。", "我们去了学校。", [(1, 2, "门", "们"), (3, 3, "", "了")]),
        ("a b", "b", [(0, 1, "a", "")]),
        ("", "a b", [(0, 0, "", "a b")]),
        ("same  here", "same here", []),
    ],
)
def test_edits_are_the_least_change_of_tokens(source: str, target: str, expected: list[tuple[object, ...]]) -> None:
    assert text_edits(source, target) == [TextEdit(*one) for one in expected]  # type: ignore[arg-type]


@given(st.lists(st.sampled_from("abc"), max_size=7), st.lists(st.sampled_from("abc"), max_size=7))
def test_applied_edits_give_the_target(one: list[str], other: list[str]) -> None:
    source, target = " ".join(one), " ".join(other)
    for edit in reversed(text_edits(source, target)):
        source = f"{source[: edit.begin]} {edit.after} {source[edit.end :]}"
    assert source.split() == target.split()


def test_f_of_edits_by_hand() -> None:
    sources, expected = ["a teh cat", "one tow", "fine"], ["a the cat", "one two", "fine"]
    scores = correction_scores(sources, ["a the cat", "one toe", "fin"], expected)
    precision, recall = 1 / 3, 1 / 2
    assert scores == pytest.approx((100 / 3, 50, 100 * 1.25 * precision * recall / (0.25 * precision + recall)))
    assert correction_scores(sources, expected, expected) == (100, 100, 100)
    assert correction_scores(["fine"], ["fine"], ["fine"]) == (100, 100, 100)
    assert correction_scores(sources, sources, expected) == (100, 0, 0)  # nothing changed, nothing wrong


M2 = """S The cat sat at mat .
A 3 4|||Prep|||on|||REQUIRED|||-NONE-|||0
A 4 4|||ArtOrDet|||the|||REQUIRED|||-NONE-|||0

S The dog .
A 1 2|||NN|||dogs|||REQUIRED|||-NONE-|||0
A -1 -1|||noop|||-NONE-|||-NONE-|||-NONE-|||1

S Giant otters is an apex predator .
A 2 3|||SVA|||are|||REQUIRED|||-NONE-|||0
A 3 4|||ArtOrDet|||-NONE-|||REQUIRED|||-NONE-|||0
A 5 6|||NN|||predators|||REQUIRED|||-NONE-|||0
A 1 2|||NN|||otter|||REQUIRED|||-NONE-|||1
"""


def test_edits_of_annotators_by_hand() -> None:
    """Four of five edits are right, and four of the five edits of the better annotators are found: precision, recall
    and F0.5 are 0.8."""
    sources, wanted = zip(*read_m2(M2.splitlines(keepends=True)), strict=True)
    assert [[len(edits) for edits in some] for some in wanted] == [[2], [1, 0], [3, 1]]
    found = ["A cat sat on the mat .", "The dog .", "Giant otters are apex predator ."]
    assert edit_scores(sources, found, wanted) == pytest.approx((80, 80, 80))
    assert count_edits(sources[0], found[0], wanted[0][0]) == (2, 3)  # "on the" is two edits, as wanted


def test_the_reference_that_suits_best_counts() -> None:
    sources, found = ["He go home now", "I likes it"], ["He goes home now", "I like it"]
    references = [["He went home now", "He goes home now"], ["I like it", "I loved it"]]
    assert correction_scores(sources, found, references) == (100, 100, 100)
    assert correction_scores(sources, found, [[first] for first, _ in references]) == (50, 50, 50)
    assert correction_scores(sources[:1], sources[:1], [["He went home now", sources[0]]]) == (100, 100, 100)


@pytest.mark.parametrize(
    ("source", "found", "wanted", "expected"),
    [
        ("the cat sat", "a big cat sat", "a cat sat", (1, 2)),
        ("the cat sat", "a cat sat", "a big cat sat", (0, 1)),
        ("a b c d", "a c d e", "a c d", (1, 2)),
        ("b", "b", "b", (0, 0)),
        ("b", "a a b", "a b", (1, 2)),  # what is wanted once is right once
        ("", "a", "a", (1, 1)),
        ("a", "", "", (1, 1)),
    ],
)
def test_wanted_edits_are_found_beside_others(source: str, found: str, wanted: str, expected: tuple[int, int]) -> None:
    assert count_edits(source, found, text_edits(source, wanted)) == expected


@given(*[st.lists(st.sampled_from("abc"), max_size=6).map(" ".join)] * 3)
def test_no_edit_is_counted_that_is_not_there(source: str, found: str, other: str) -> None:
    wanted = text_edits(source, other)
    right, made = count_edits(source, found, wanted)
    assert set(text_edits(source, found)) & set(wanted) == set() or right > 0
    assert right <= min(made, len(wanted)) and (made == 0) == (source == found)
    assert count_edits(source, other, wanted) == (len(wanted), len(wanted))
