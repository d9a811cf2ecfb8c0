"""The figures are their definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allyouneed.errors import UserError
from allyouneed.metrics.answers import EntitySpan, accuracy, macro_f1, pearson, recall_at_1, span_f1, spans, spearman


def test_accuracy_and_macro_f1_by_hand() -> None:
    found, expected = ["a", "a", "b", "c"], ["a", "b", "b", "b"]
    assert accuracy(found, expected) == 50
    # a: 2·1/(2+1), b: 2·1/(1+3), c: 0
    assert macro_f1(found, expected) == pytest.approx(100 * (2 / 3 + 2 / 4 + 0) / 3)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("B-NP I-NP O B-VP", [EntitySpan(0, 2, "NP"), EntitySpan(3, 4, "VP")]),
        ("B-NP B-NP I-NP", [EntitySpan(0, 1, "NP"), EntitySpan(1, 3, "NP")]),
        ("O I-NP I-NP I-VP O", [EntitySpan(1, 3, "NP"), EntitySpan(3, 4, "VP")]),
        (
            "B-PER E-PER S-LOC S-LOC B-ORG M-ORG E-ORG",
            [EntitySpan(0, 2, "PER"), EntitySpan(2, 3, "LOC"), EntitySpan(3, 4, "LOC"), EntitySpan(4, 7, "ORG")],
        ),
        ("B-A E-A I-A", [EntitySpan(0, 2, "A"), EntitySpan(2, 3, "A")]),
        ("NN VBZ O", []),
        ("", []),
    ],
)
def test_tags_become_spans(tags: str, expected: list[EntitySpan]) -> None:
    assert spans(tags.split()) == expected


def test_span_f1_counts_whole_spans_of_the_right_kind() -> None:
    expected = [["B-A", "I-A", "O", "B-B"], ["O"]]
    assert span_f1(expected, expected) == 100
    found = [["B-A", "O", "O", "B-B"], ["B-A"]]  # one of three found is right, one of two expected is found
    assert span_f1(found, expected) == pytest.approx(100 * 2 * 1 / (3 + 2))
    assert span_f1([["O"]], [["O"]]) == 100


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=3, max_size=30))
def test_correlations_by_their_definitions(pairs: list[tuple[int, int]]) -> None:
    one, other = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    if len(set(one)) > 1 and len(set(other)) > 1:
        assert pearson(one, other) == pytest.approx(100 * np.corrcoef(one, other)[0, 1])
        ranks = [[np.mean([n for n, v in enumerate(sorted(side)) if v == x]) for x in side] for side in (one, other)]
        assert spearman(one, other) == pytest.approx(100 * np.corrcoef(*ranks)[0, 1])
    else:
        assert pearson(one, other) == 0
    assert spearman(one, [x**3 for x in one]) == pytest.approx(100 if len(set(one)) > 1 else 0)


def test_recall_at_1_shares_ties() -> None:
    scores = np.array([[3.0, 1, 2], [0, 0, 0], [5, 4, 1]])
    assert recall_at_1(scores, np.array([0, 1, 2])) == pytest.approx(100 * (1 + 1 / 3 + 0) / 3)


def test_empty_and_unequal_lists_are_refused() -> None:
    with pytest.raises(UserError, match="nothing to evaluate"):
        accuracy([], [])
    with pytest.raises(UserError, match="2 answers but 1 expected"):
        accuracy(["a", "b"], ["a"])
