"""Rule 2: a mixer gives the same results for whole sequences, chunks and single tokens, and its state can be reordered,
copied and trimmed.

The reference is always the whole sentence at once, alone and without a state.
"""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from allyouneed.nn.batch import Rows
from any_part import (
    CASES,
    DECODER_CASES,
    LONGEST,
    PAIRS,
    STATE_CASES,
    VOCAB,
    build,
    case,
    case_logits,
    decodable,
    pairs,
    reference_logits,
    sentence,
    tree,
)
from property_tests import examples, explicit


def close(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


def step(model, states, chunks, pad=0):
    """Read one chunk per row (unequal, perhaps empty); each row's new logits."""
    tokens = Rows.of(chunks, pad=pad)
    with torch.no_grad():
        found = model.head(model.advance(tokens, states))
    return [found[row, : len(chunk)] for row, chunk in enumerate(chunks)]


def start(model, sources, side="right"):
    with torch.no_grad():
        return model.start(Rows.of(sources, pad=3, side=side))


def check_tempos(model, pairs, cuts, side="right", alone=None):
    states = start(model, [s for s, _ in pairs], side)
    seen = [0] * len(pairs)
    found = [[] for _ in pairs]
    for turn in range(4 * LONGEST):
        sizes = [cuts[(turn + row) % len(cuts)] for row in range(len(pairs))]
        ends = [min(len(t), at + size) for (_, t), at, size in zip(pairs, seen, sizes, strict=True)]
        chunks = [t[at:end] for (_, t), at, end in zip(pairs, seen, ends, strict=True)]
        if not any(chunks):
            if all(at == len(t) for (_, t), at in zip(pairs, seen, strict=True)):
                break
            continue
        for row, logits in enumerate(step(model, states, chunks, pad=5)):
            found[row].append(logits)
        seen = ends
        assert states.lengths == seen
    for logits, expected in zip(found, alone or [reference_logits(model, pair) for pair in pairs], strict=True):
        close(torch.cat(logits), expected)


@pytest.mark.parametrize("name", DECODER_CASES)
@explicit(thorough=12)
@example(PAIRS, [0, 4, 1, 3], "left")
@given(pairs, st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any), st.sampled_from(["right", "left"]))
def test_chunks_and_single_tokens_give_the_results_of_whole_sequences(name, pairs, cuts, side):
    """Chunks of unequal lengths in one batch, where a row may also get nothing and wait; tokens; the first row alone,
    in chunks and tokens."""
    model, alone = case(name), case_logits(name, pairs)
    check_tempos(model, pairs, cuts, side, alone)
    check_tempos(model, pairs, [1], alone=alone)
    check_tempos(model, pairs[:1], [4, 2, 1, 2], alone=alone[:1])


@settings(max_examples=40)
@given(decodable(), pairs, st.lists(st.integers(0, 4), min_size=1, max_size=3).filter(any))
def test_every_decodable_pattern_decodes_as_the_whole_sequence(pattern, pairs, cuts):
    check_tempos(build(tree(mixer={"kind": "attention", "heads": 3, "pattern": str(pattern)})), pairs, cuts)


def check_rows(model, states, rows, token):
    """Every row's next logits equal those of its own tokens, computed without a state."""
    new = [[(token + 3 * number) % (VOCAB - 1) + 1] for number in range(len(rows))]
    found = step(model, states, new)
    for (source, target), added, logits in zip(rows, new, found, strict=True):
        target += added
        close(logits, reference_logits(model, (source, target))[-1:])


moves = st.lists(
    st.one_of(
        st.tuples(st.just("fan"), st.integers(2, 3), st.just([])),
        st.tuples(st.just("select"), st.just(0), st.lists(st.integers(0, 50), min_size=12, max_size=12)),
        st.tuples(st.just("drop"), st.integers(0, 50), st.just([])),
        st.tuples(st.just("trim"), st.integers(1, LONGEST), st.just([])),
        st.tuples(st.just("cut"), st.just(0), st.lists(st.integers(1, LONGEST), min_size=12, max_size=12)),
    ),
    max_size=4,
)


@pytest.mark.parametrize("name", STATE_CASES)
@examples(4, thorough=12)
@given(
    st.lists(st.tuples(sentence, st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=4)), min_size=1, max_size=3),
    moves,
)
def test_a_rearranged_state_gives_the_results_of_a_fresh_start(name, pairs, moves):
    """fan: copies that share a source. select: beams of a source in another order, sources in another order.
    drop: a source and its beams go. trim: the last tokens of all rows are taken back; cut: of each row as many as it
    likes."""
    model = case(name)
    rows = [(list(s), list(t)) for s, t in pairs]
    states = start(model, [s for s, _ in rows])
    step(model, states, [t for _, t in rows])
    group = 1
    for number, (move, amount, picks) in enumerate(moves):
        if move == "fan" and group * amount <= 6:
            states.repeat_rows(amount)
            rows = [(s, list(t)) for s, t in rows for _ in range(amount)]
            group *= amount
        elif move == "select":
            order = sorted(range(len(rows) // group), key=lambda source: picks[source])
            kept = [source * group + picks[n] % group for source in order for n in range(group)]
            states.select(kept)
            rows = [(rows[row][0], list(rows[row][1])) for row in kept]
        elif move == "drop" and len(rows) > group:
            gone = amount % (len(rows) // group)
            kept = [row for row in range(len(rows)) if row // group != gone]
            states.select(kept)
            rows = [rows[row] for row in kept]
        elif move == "trim":
            states.trim(amount)
            rows = [(s, t[:amount]) for s, t in rows]
        elif move == "cut":
            own = [picks[n % len(picks)] for n in range(len(rows))]
            states.trim(own)
            rows = [(s, t[:left]) for (s, t), left in zip(rows, own, strict=True)]
        assert states.lengths == [len(t) for _, t in rows]
        if max(len(t) for _, t in rows) < LONGEST:
            check_rows(model, states, rows, number)


def test_beams_of_different_sources_never_mix():
    states = start(case("wiring post-norm"), [[1, 2], [3]])
    states.repeat_rows(2)
    with pytest.raises(ValueError, match="must stay together"):
        states.select([0, 2, 1, 3])


def test_a_source_is_not_copied_for_its_beams():
    model = case("wiring post-norm")
    states = start(model, [[1, 2, 3], [4, 5, 6]])
    step(model, states, [[1], [2]])
    shared = [state for layer in states.layers for state in layer.values() if state.shared]
    before = sum(state.bytes for state in shared)
    states.repeat_rows(4)
    step(model, states, [[1]] * 8)
    assert shared and sum(state.bytes for state in shared) == before


@pytest.mark.parametrize("name", CASES)
def test_layers_that_cannot_decode_are_refused_with_the_reason(name):
    """Decoding states exist exactly for the mixers that declare themselves causal."""
    model = case(name)
    layers = [layer for layer in model.config.encoder for _ in range(layer.repeat)]
    for block, layer in zip(model.encoder.blocks, layers, strict=True):
        if layer.mixer is not None and not layer.mixer.causal:
            with pytest.raises(ValueError, match="cannot decode"):
                block.new_states()
