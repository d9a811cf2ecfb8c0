"""Rule 4: right- or left-padded, packed, alone or in a batch, the same sentence gets the same numbers.

Every case is a model with one registered part in it; the reference is the sentence computed alone.
"""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from allyouneed.nn.batch import IGNORE, Batch, Rows
from any_part import (
    DECODER_CASES,
    LONGEST,
    MOST_CASES,
    PAIRS,
    VOCAB,
    build,
    case,
    case_logits,
    decodable,
    pack,
    pairs,
    reference_logits,
    sentence,
    tree,
)
from property_tests import explicit

every_case = pytest.mark.parametrize("name", MOST_CASES)
gap_lists = st.lists(st.integers(0, 3), min_size=5, max_size=5)
row_lists = st.lists(st.integers(0, 2), min_size=5, max_size=5)


def close(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


def logits(model, target, source):
    with torch.no_grad():
        return model.logits(Batch(target, source))


def check_causality(model, source, target, at, other):
    changed = [*target[:at], *other][:LONGEST]
    before, after = reference_logits(model, (source, target))[:at], reference_logits(model, (source, changed))[:at]
    close(after, before)


@pytest.mark.parametrize("name", DECODER_CASES)
@explicit(thorough=12)
@example(PAIRS[0][0], PAIRS[0][1], 4, PAIRS[2][1][:2])
@given(sentence, sentence, st.integers(0, LONGEST), sentence)
def test_a_future_token_changes_nothing_before_it(name, source, target, at, other):
    """Another end, perhaps longer or shorter; and as many rows as tokens, each with another token changed."""
    model = case(name)
    check_causality(model, source, target, min(at, len(target)), other)
    rows, size = torch.tensor(target).repeat(len(target) + 1, 1), len(target)
    rows[range(size), range(size)] = rows[range(size), range(size)] % (VOCAB - 1) + 1
    found = logits(model, Rows(rows), Rows(torch.tensor([source] * (size + 1))))
    for position in range(size):
        close(found[position, :position], found[-1, :position])


@settings(max_examples=40)
@given(decodable(), sentence, sentence, st.integers(0, LONGEST), sentence)
def test_no_causal_pattern_lets_a_token_see_later_ones(pattern, source, target, at, other):
    model = build(tree(mixer={"kind": "attention", "heads": 3, "pattern": str(pattern)}))
    check_causality(model, source, target, min(at, len(target)), other)


def test_a_past_token_does_change_what_follows():
    """The test above would also pass for a model that looks at nothing."""
    model = case("wiring post-norm")
    first, second = reference_logits(model, ([1, 2], [3, 4, 5])), reference_logits(model, ([1, 2], [6, 4, 5]))
    assert (first[1:] - second[1:]).abs().amax(-1).min() > 1e-3


sides = st.sampled_from(["right", "left"])


@every_case
@explicit(thorough=12)
@example(PAIRS, 4, "left", "right", [1, 0, 1, 0], [0, 2, 3, 1], [2, 0, 1, 3])
@given(pairs, st.integers(1, VOCAB - 1), sides, sides, row_lists, gap_lists, gap_lists)
def test_neither_padding_nor_other_sentences_change_a_sentence(
    name, pairs, pad, source_side, target_side, rows, source_gaps, target_gaps
):
    """One sentence a row, padded; then several sentences a row, with padding before, between and behind them."""
    model, count, alone = case(name), len(pairs), case_logits(name, pairs)
    for first, second in ((source_side, target_side), (target_side, source_side)):
        source = Rows.of([s for s, _ in pairs], pad=pad, side=first)
        target = Rows.of([t for _, t in pairs], pad=pad, side=second)
        found = logits(model, target, source)
        for row, expected in enumerate(alone):
            size = len(expected)
            close(found[row, :size] if second == "right" else found[row, -size:], expected)
        assert found.isfinite().all()

    source, _ = pack([s for s, _ in pairs], rows[:count], source_gaps[:count])
    target, places = pack([t for _, t in pairs], rows[:count], target_gaps[:count])
    found = logits(model, target, source)
    for (row, span), expected in zip(places, alone, strict=True):
        close(found[row, span], expected)
    assert found.isfinite().all()


@every_case
@explicit(thorough=6)
@example(PAIRS[1:], [1, 0, 1], [2, 0, 1])
@given(pairs, row_lists, gap_lists)
def test_packed_sentences_give_the_gradients_of_separate_ones(name, pairs, rows, gaps):
    model, count = case(name), len(pairs)
    source, _ = pack([s for s, _ in pairs], rows[:count], gaps[:count])
    target, places = pack([t for _, t in pairs], rows[:count], gaps[:count])
    labels = torch.full_like(target.tokens, IGNORE)
    for (_, tokens), (row, span) in zip(pairs, places, strict=True):
        labels[row, span] = torch.tensor(tokens).roll(-1)
    parameters = list(model.parameters())
    together = torch.autograd.grad(loss(model, target, source, labels), parameters, allow_unused=True)
    summed = sum(
        loss(model, Rows(torch.tensor([t])), Rows(torch.tensor([s])), torch.tensor([t]).roll(-1, 1)) for s, t in pairs
    )
    apart = torch.autograd.grad(summed, parameters, allow_unused=True)
    assert any(gradient is not None and gradient.abs().max() > 1e-3 for gradient in apart)
    for one, other in zip(together, apart, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            close(one, other)


def loss(model, target, source, labels):
    scores = model.logits(Batch(target, source))
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")


@given(pairs)
@settings(max_examples=4)
def test_the_order_of_rows_does_not_matter(pairs):
    model = case("wiring pre-norm")
    found = logits(model, Rows.of([t for _, t in pairs]), Rows.of([s for s, _ in pairs]))
    turned = logits(model, Rows.of([t for _, t in pairs[::-1]]), Rows.of([s for s, _ in pairs[::-1]]))
    close(turned.flip(0), found)


def test_packed_rows_beside_rows_that_are_not_are_refused():
    model = build(tree())
    packed = Rows(torch.tensor([[1, 2, 3]]), segments=torch.tensor([[1, 2, 2]]))
    with pytest.raises(ValueError, match="pack both or neither"):
        model(Batch(packed, Rows.of([[4, 5]])))
