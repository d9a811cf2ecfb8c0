"""A picture of a pattern shows its mask: exactly where it fits, by shares where it does not."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allyouneed.apps.inspect.pictures.canvas import HALVES, draw
from allyouneed.apps.inspect.pictures.pattern import fitting_size, panel, panels, read
from allyouneed.errors import UserError
from any_part import atoms, patterns


def picture(pattern, size, width=200):
    """Title, drawn lines, the rest."""
    title, *lines = draw([panel(pattern, size)], width).plain.split("\n")
    count = next(n for n, line in enumerate(lines) if not set(line) <= set("·▄▀█░▒▓"))
    return title, lines[:count], lines[count:]


@given(patterns(), st.integers(1, 21))
def test_half_blocks_are_the_mask(pattern, size):
    _, lines, _ = picture(pattern, size)
    values = torch.tensor([[HALVES.index(mark) for mark in line] for line in lines])
    rows = torch.stack([values // 2, values % 2], 1).flatten(0, 1)[:size]
    assert torch.equal(rows.bool(), panel(pattern, size).values)


@pytest.mark.parametrize("pattern", atoms(), ids=str)
def test_a_pattern_independent_of_the_batch_is_drawn_by_its_mask(pattern):
    drawn = panel(pattern, 13)
    if not any(note.startswith("here ") for note in drawn.notes):
        assert torch.equal(drawn.values, pattern.mask(13, 13))


def test_the_notes_describe_the_example_batch():
    assert "here the first 4 tokens are the prompt" in panel(read("causal | prompt"), 16).notes
    assert "here one token in 4 is chosen" in panel(read("window(2) | chosen"), 16).notes
    assert any("random order" in note for note in panel(read("permuted"), 16).notes)
    assert panel(read("causal | prompt"), 16).values[0, :5].tolist() == [True] * 4 + [False]


@given(patterns(), st.integers(65, 200))
def test_shades_are_shares(pattern, size):
    """Nothing is a dot, everything is full, in between is in between: a thin line never disappears."""
    _, lines, rest = picture(pattern, size)
    across = math.ceil(size / 64)
    assert rest[0] == f"one character is {2 * across} × {across} tokens"
    seen = panel(pattern, size).values
    for number, line in enumerate(lines):
        for column, mark in enumerate(line):
            spot = seen[2 * across * number :, across * column :][: 2 * across, :across]
            assert mark == "·" if not spot.any() else mark == "█" if spot.all() else mark in "░▒▓"


def test_the_notes_are_the_properties_of_the_pattern():
    text = "causal & window(6) | causal & prefix(2)"
    title, _, notes = picture(read(text), 16)
    assert title == text
    assert notes == ["causal, reach −∞ to 0", "decoding keeps the first 2 and the last 6", "6.25 keys per query, of 16"]
    assert picture(read("causal & window(3)"), 4)[2][:2] == ["causal, reach −2 to 0", "decoding keeps the last 3"]
    assert picture(read("full"), 4)[2] == ["not causal, reach −∞ to ∞", "cannot decode", "4 keys per query, of 4"]
    assert "causal after the prompt" in picture(read("causal | prompt"), 8)[2][0]


def test_the_size_shows_the_largest_number():
    assert fitting_size(read("causal")) == 32
    assert fitting_size(read("causal & window(64) | global(0)")) == 256
    assert fitting_size(read("window(100000)")) == 512


def test_several_pictures_are_side_by_side_where_they_fit():
    found = panels(["causal", "full", "window(2)"], 8)
    wide, narrow = (draw(found, width).plain for width in (200, 20))
    assert wide.split("\n")[0].split() == ["causal", "full", "window(2)"]
    assert [line for line in narrow.split("\n") if line in ("causal", "full", "window(2)")] == [
        "causal",
        "full",
        "window(2)",
    ]
    assert all(line == line.rstrip() for line in wide.split("\n"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("causl & window(6)", "unknown pattern 'causl'; did you mean 'causal'? (allowed: "),
        ("causal & window(0)", "size: must be greater than 0, not 0, in 'causal & window(0)'"),
        ("causal & window(3", "missing ')': the '(' at character 16"),
        ("causal causal", "unexpected 'causal'"),
        ("", "missing pattern at the end"),
    ],
)
def test_an_invalid_pattern_is_refused_once(text, said):
    with pytest.raises(UserError) as caught:
        read(text)
    assert said in str(caught.value) and str(caught.value).count(f"in {text!r}") == 1
