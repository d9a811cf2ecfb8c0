"""Word error rate, by hand and by definition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allyouneed.errors import UserError
from allyouneed.metrics.words import character_error_rate, edits, plain, word_error_rate


def test_word_error_rates_match_hand_counts():
    assert edits(["the", "cat", "sat"], ["the", "cat", "sat"]) == 0
    assert edits(["the", "cat"], ["the", "cat", "sat"]) == 1
    assert edits(["a", "the", "cat", "sat"], ["the", "cat", "sat"]) == 1
    assert edits(["the", "dog", "sat", "on"], ["the", "cat", "sat"]) == 2
    assert word_error_rate(["the dog sat on"], ["the cat sat"]) == pytest.approx(200 / 3)
    assert word_error_rate(["a b c d", ""], ["a b c d", "e f g h"]) == 50.0
    assert word_error_rate(["a b c"], ["x"]) == 300.0


def slow(found, expected):
    """The definition."""
    if not found or not expected:
        return len(found) + len(expected)
    change = slow(found[1:], expected[1:]) + (found[0] != expected[0])
    return min(change, slow(found[1:], expected) + 1, slow(found, expected[1:]) + 1)


@given(st.text("abc", max_size=5), st.text("abc", max_size=5))
def test_word_error_rate_matches_its_definition(found, expected):
    assert edits(found, expected) == slow(found, expected)


def test_case_and_punctuation_are_ignored_by_default():
    found, expected = ["Ask not, what YOUR country's doing."], ["ask not what your country’s doing"]
    assert word_error_rate(found, expected) == 0
    assert word_error_rate(found, expected, as_written=True) == pytest.approx(100 * 5 / 6)
    assert plain("¿Qué tal? — 'Bien', it's ½") == "qué tal bien it's 1 2"


def test_character_error_rate_ignores_spaces():
    assert character_error_rate(["今天天气很好"], ["今天 天气真好。"]) == pytest.approx(100 / 6)


def test_invalid_input_is_refused():
    with pytest.raises(UserError, match="1 transcripts but 2"):
        word_error_rate(["a"], ["a", "b"])
    with pytest.raises(UserError, match="contain no words"):
        word_error_rate(["a"], ["…"])
