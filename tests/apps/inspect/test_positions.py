"""Pictures of positions hold the numbers of the papers' formulas; any part that is registered can be drawn."""

import math

import pytest
import torch

from allyouneed.apps.inspect.pictures.canvas import draw
from allyouneed.apps.inspect.pictures.positions import Sizes, panels
from allyouneed.errors import UserError
from allyouneed.nn.positions.absolute import Positions
from allyouneed.nn.positions.relative import Relative

SIZES = Sizes(positions=9, width=16, heads=4)
KINDS = [kind for slot in (Positions, Relative) for kind in slot.registry if kind != "none"]


def one(text, sizes=SIZES):
    (found,) = panels([text], sizes)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_that_is_registered_can_be_drawn(kind):
    for found in panels([kind], SIZES):
        assert found.title.startswith(kind) and found.values.isfinite().all() and found.values.unique().numel() > 1
        assert draw([found], 80).plain.startswith(kind)


def test_without_a_name_all_are_drawn():
    assert sorted(found.title.split(",")[0] for found in panels([], SIZES)) == sorted(KINDS)


def test_sinusoids():
    found = one("sinusoidal")
    assert (found.shape, found.down, found.across) == ("matrix", "position", "dimension")
    expected = [[(math.sin, math.cos)[i % 2](p / 10000 ** ((i - i % 2) / 16)) for i in range(16)] for p in range(9)]
    torch.testing.assert_close(found.values, torch.tensor(expected))


def test_alibi_is_a_line_for_each_head():
    found = one("{kind: alibi, symmetric: true}")
    assert (found.shape, found.start, found.lines[0]) == ("curves", -8, "head 1")
    expected = [[-(2 ** (-2.0 * head)) * abs(step) for step in range(-8, 9)] for head in (1, 2, 3, 4)]
    torch.testing.assert_close(found.values, torch.tensor(expected))


def test_a_causal_only_part_is_drawn_causal():
    found = one("alibi")
    assert "for causal attention" in found.notes and found.values.shape == (4, 9) and found.start == -8
    assert "for causal attention" in one("{kind: alibi, symmetric: true}", Sizes(9, 16, 4, causal=True)).notes


def test_rotary_shows_the_cosines_of_its_angles():
    found = one("{kind: rotary, base: 100}", Sizes(positions=9, width=16, heads=2))
    planes = [100 ** (-2 * i / 8) for i in range(4)] * 2
    expected = [[math.cos((8 - key) * plane) for key in range(9)] for plane in planes]
    torch.testing.assert_close(found.values, torch.tensor(expected))


def test_learned_parts_are_drawn_with_reproducible_random_weights():
    for kind in ("learned", "buckets"):
        first, again = one(kind), one(kind)
        assert "learned: random weights" in first.notes
        assert torch.equal(first.values, again.values)
    assert not any("learned" in note for note in one("sinusoidal").notes)
    assert "for one random query" in one("shaw").notes


def test_the_random_state_of_the_caller_is_unchanged():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one("learned")
    assert torch.equal(torch.rand(1), expected)


def test_a_shorter_table_is_drawn_to_its_end():
    assert one("{kind: learned, length: 5}").values.shape == (5, 16)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sinusoidl", "unknown positions 'sinusoidl' (allowed: "),
        ("none", "nothing to draw"),
        ("{kind: rotary, bas: 3}", "did you mean 'base'?"),
        ("{kind: rotary, fraction: 0.3}", "must be an even, positive number"),
        ("{kind", "neither a name nor YAML"),
        ("3", "unknown positions '3'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(text, said):
    with pytest.raises(UserError) as caught:
        panels([text], SIZES)
    assert said in str(caught.value)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="--width 10 is not divisible by --heads 4"):
        panels(["alibi"], Sizes(9, 10, 4))
