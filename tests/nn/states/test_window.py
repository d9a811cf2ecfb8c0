"""KV cache of a window: the same numbers as the whole text at once, for any length and any chunks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from allyouneed.nn.patterns.core import Causal, KVWindow, Pattern
from allyouneed.nn.states import window
from allyouneed.nn.states.kv_cache import KVCache
from allyouneed.nn.states.window import WindowKVCache
from any_part import build, patterns

VOCAB = 11
WINDOWED = [
    "causal & window(1)",
    "causal & window(5)",
    "causal & (window(4) | prefix(2))",
    "causal & block(3)",
    "causal & dilated(3, 2)",
    "causal & prefix(3)",
    "causal & (block-window(2, 2) | global(1))",
    "causal & window(6) & ~prompt",
]


def model_of(pattern, **keys):
    mixer = {"kind": "attention", "heads": 3, "kv_heads": 1, "pattern": str(pattern)} | keys
    layer = {"repeat": 2, "mixer": mixer, "channel": {"kind": "ffn", "hidden": 14}, "wiring": "pre-norm"}
    tree = {"kind": "decoder", "vocab": VOCAB, "width": 12, "embed": {"positions": "sinusoidal"}, "decoder": [layer]}
    return build(tree)


def text(length, seed):
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def whole(model, tokens):
    with torch.no_grad():
        return model.logits(Batch(Rows(torch.tensor([tokens]))))[0]


def step(model, states, chunks):
    with torch.no_grad():
        found = model.head(model.advance(Rows.of(chunks, pad=7), states))
    return [found[row, : len(chunk)] for row, chunk in enumerate(chunks)]


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


@pytest.fixture
def tight(monkeypatch):
    """Windows that wrap around within a few tokens."""
    monkeypatch.setattr(window, "MAX_TRIM", 2)


@pytest.mark.parametrize("pattern", WINDOWED)
@pytest.mark.parametrize("keys", [{}, {"positions": "rotary"}, {"positions": "alibi"}], ids=["", "rotary", "alibi"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 40])
def test_chunks_of_every_size_equal_the_whole(tight, pattern, keys, size):
    model = model_of(pattern, **keys)
    assert all(isinstance(state, WindowKVCache) for layer in model.start(1).layers for state in layer.values())
    tokens = text(31, 0)
    states = model.start(1)
    found = [step(model, states, [tokens[at : at + size]])[0] for at in range(0, len(tokens), size)]
    close(torch.cat(found), whole(model, tokens))


bounded = patterns(4).map(lambda p: Causal() & p).filter(lambda p: p.kv_window is not None)


@settings(max_examples=60, deadline=None)
@given(bounded, st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=8), st.data())
def test_rows_with_unequal_chunks_trimmed_and_reordered(pattern, cuts, data):
    """For any windowed pattern: padding never overwrites a token, and trimmed tokens leave no trace."""
    before, window.MAX_TRIM = window.MAX_TRIM, 3
    try:
        model = model_of(pattern)
        states, rows, furthest = model.start(3), [[], [], []], [0, 0, 0]
        for number, sizes in enumerate(cuts):
            chunks = [text(size, 10 * number + row) for row, size in enumerate(sizes[: len(rows)])]
            if not any(chunks):
                continue
            found = step(model, states, chunks)
            rows = [row + chunk for row, chunk in zip(rows, chunks, strict=True)]
            furthest = [max(far, len(row)) for far, row in zip(furthest, rows, strict=True)]
            for row, chunk, logits in zip(rows, chunks, found, strict=True):
                if chunk:
                    close(logits, whole(model, row)[len(row) - len(chunk) :])
            move = data.draw(st.sampled_from(["none", "trim", "cut", "select"]))
            if move == "trim":
                length = data.draw(st.integers(max(1, max(furthest) - 3), max(furthest)))
                states.trim(length)
                rows = [row[:length] for row in rows]
            elif move == "cut":
                own = [data.draw(st.integers(max(0, far - 3), far)) for far in furthest]
                states.trim(own)
                rows = [row[:length] for row, length in zip(rows, own, strict=True)]
            elif move == "select":
                kept = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=len(rows), max_size=len(rows)))
                states.select(kept)
                rows, furthest = [list(rows[row]) for row in kept], [furthest[row] for row in kept]
    finally:
        window.MAX_TRIM = before


def test_size_is_constant_from_one_to_eight_thousand_tokens():
    model = model_of("causal & (window(32) | prefix(4))")
    states, sizes, tokens = model.start(1), [], text(8192, 1)
    for at in range(0, 8192, 512):
        last = step(model, states, [tokens[at : at + 512]])[0]
        sizes.append(states.bytes)
    assert len(set(sizes)) == 1
    cost = model.config.cost(8192)
    assert sizes[0] == 8 * cost.state_constant and cost.state_per_token == 0
    first = step(model, states, [[5]])[0]
    expected = whole(model, [*tokens, 5])
    close(last, expected[-513:-1])
    close(first, expected[-1:])


def test_a_short_text_needs_no_full_window():
    model = model_of("causal & window(4000)")
    states = model.start(1)
    step(model, states, [text(10, 0)])
    assert states.bytes == 8 * 2 * 2 * 4 * 10  # layers, keys and values, one head of 4, tokens


def test_repeated_rows_are_copies(tight):
    model = model_of("causal & window(3)")
    states, tokens = model.start(2), [text(9, 0), text(6, 1)]
    step(model, states, tokens)
    states.repeat_rows(2)
    rows = [[*row, n + 1] for n, row in enumerate([tokens[0], tokens[0], tokens[1], tokens[1]])]
    for found, row in zip(step(model, states, [row[-1:] for row in rows]), rows, strict=True):
        close(found, whole(model, row)[-1:])


def test_no_more_than_max_trim_tokens_can_be_trimmed():
    model = model_of("causal & window(3)")
    states = model.start(1)
    step(model, states, [text(200, 0)])
    states.trim(200 - window.MAX_TRIM)
    with pytest.raises(ValueError, match="can trim at most 64 tokens"):
        states.trim(199 - window.MAX_TRIM)
    short = model.start(1)
    step(model, short, [text(60, 0)])
    short.trim(1)  # nothing was overwritten yet


def test_patterns_without_a_window_keep_everything():
    states = model_of("causal & (window(4) | strided(4))").start(1)
    assert all(isinstance(state, KVCache) for layer in states.layers for state in layer.values())
    assert window.window_slots(KVWindow(4, 64)) == 4 + 64 + window.MAX_TRIM


# --- prompts --------------------------------------------------------------------------------------------------------


def prompted(sizes, rows):
    longest = max(map(len, rows))
    return torch.tensor([[place < size for place in range(longest)] for size in sizes])


@pytest.mark.parametrize("pattern", ["causal | prompt", "causal & (window(3) | prompt) | prompt", "causal & ~prompt"])
def test_a_prefix_language_model_decodes_after_its_prompt(pattern):
    """Prompts of unequal lengths are prefilled together, then decoded token by token; compared with each text alone."""
    model, rows, sizes = model_of(pattern), [text(9, 0), text(12, 1), text(7, 2)], [4, 6, 1]
    first = [row[:size] for row, size in zip(rows, sizes, strict=True)]
    given = Rows.of(first, pad=7)
    states = model.start(3)
    with torch.no_grad():
        head = model.head(model.advance(Rows(given.tokens, given.lengths, prompt=prompted(sizes, first)), states))
    found = [[head[row, :size]] for row, size in enumerate(sizes)]
    for at in range(8):
        chunks = [row[size + at : size + at + 1] for row, size in zip(rows, sizes, strict=True)]
        if any(chunks):
            for row, logits in enumerate(step(model, states, chunks)):
                found[row].append(logits)
    for row, size, logits in zip(rows, sizes, found, strict=True):
        mine = Rows(torch.tensor([row]), prompt=prompted([size], [row]))
        with torch.no_grad():
            close(torch.cat(logits), model.logits(Batch(mine))[0])
    changed = Rows(torch.tensor([rows[0]]), prompt=prompted([0], [rows[0]]))
    with torch.no_grad():
        assert not torch.allclose(model.logits(Batch(changed))[0, :4], torch.cat(found[0])[:4])


def test_a_prompt_in_two_chunks_is_rejected():
    model = model_of("causal | prompt")
    states = model.start(1)
    mark = torch.ones(1, 2, dtype=torch.bool)
    model.advance(Rows(torch.tensor([[1, 2]]), prompt=mark), states)
    with pytest.raises(ValueError, match="a prompt must be prefilled in one call"):
        model.advance(Rows(torch.tensor([[1, 2]]), prompt=mark), states)


def test_marks_move_with_their_rows():
    model = model_of("causal & (window(2) | chosen)")
    rows = [text(6, 0), text(6, 1)]
    chosen = torch.tensor([[True] + [False] * 5, [False, True] + [False] * 4])
    states = model.start(2)
    with torch.no_grad():
        model.advance(Rows(torch.tensor(rows), chosen=chosen), states)
        states.select([1, 0, 1])
        states.trim(5)
        found = step(model, states, [[4], [5], [6]])
        for row, token, logits in zip((1, 0, 1), (4, 5, 6), found, strict=True):
            alone = Rows(torch.tensor([[*rows[row][:5], token]]), chosen=chosen[row : row + 1])
            close(logits, model.logits(Batch(alone))[0, -1:])


def test_the_error_names_the_part_of_a_pattern_that_leaks():
    layer = {"mixer": {"kind": "attention", "heads": 3, "pattern": "causal & window(64) | global(0)"}}
    with pytest.raises(
        ConfigError, match=r"decoder\[0\]\.mixer: .*later tokens, but global\(0\) lets position 0 attend"
    ):
        parse(Model, {"kind": "decoder", "vocab": 5, "width": 12, "decoder": [layer]})


def test_a_prefix_language_model_is_not_causal_to_its_positions():
    """T5's buckets of a prefix language model cover later keys."""
    pattern = Pattern.from_text("causal | prompt")
    assert pattern.decodes and not pattern.causal
