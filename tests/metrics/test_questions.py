"""Answers are scored as the scripts of SQuAD and of CMRC 2018 do."""

from __future__ import annotations

import pytest

from allyouneed.errors import UserError
from allyouneed.metrics.questions import answer_scores, chinese_pieces, common_run, question_figures


@pytest.mark.parametrize(
    ("found", "expected", "exact", "f1"),  # the values of the script of SQuAD 2.0
    [
        ("The cat's U.S. an-other", "cats us another", 1, 1),
        ("3.5%", "35", 1, 1),
        ("a cat, the cat", "cat", 0, 2 / 3),
        ("cat —", "cat", 0, 2 / 3),
        ("the", "", 1, 1),
        ("the", "cat", 0, 0),
        ("big black cat", "black big dog cat", 0, 6 / 7),
    ],
)
def test_english_is_scored_as_by_squads_script(found: str, expected: str, exact: float, f1: float) -> None:
    assert answer_scores(found, [expected]) == pytest.approx((exact, f1))


def test_the_best_of_the_expected_answers_counts() -> None:
    assert answer_scores("the New York", ["York", "New York City", "new york"]) == (1, 1)
    assert answer_scores("New York", ["York", "New York City"]) == pytest.approx((0, 0.8))
    assert answer_scores("", []) == (1, 1) and answer_scores("York", []) == (0, 0)  # there is no answer


def test_chinese_is_scored_by_its_longest_common_run_of_characters() -> None:
    """CMRC 2018, evaluation script: hits are those of a common substring."""
    assert chinese_pieces("《格奥尔基·伊万诺夫》，33.94%") == [*"格奥尔基伊万诺夫", "33.94", "%"]
    assert common_run("abcxbcd", "bcdabc") == 3
    assert answer_scores("2009年3月22日", ["2009年3月22日举行"]) == pytest.approx((0, 2 * 6 / (6 + 8)))
    assert answer_scores("“大海”。", ["大海"]) == (1, 1)
    assert answer_scores("大的海", ["大海"]) == pytest.approx((0, 2 * 1 / (3 + 2)))


def test_figures_are_means_apart_for_unanswerable_questions() -> None:
    figures, text = question_figures(["Paris", "", "Ulm"], [["Paris"], [], []])
    assert figures == pytest.approx({"f1": 200 / 3, "exact": 200 / 3})
    assert "with an answer: F1 100.0" in text and "without: F1 50.0, exact 50.0 %  of 2" in text
    with pytest.raises(UserError, match="no questions"):
        question_figures([], [])
