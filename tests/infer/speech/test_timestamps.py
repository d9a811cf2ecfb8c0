"""What a window's tokens say was said when, and where the next window begins."""

import pytest

from allyouneed.infer.speech.timestamps import split_segments

TIME = 100
T = lambda frames: TIME + frames // 2  # noqa: E731  # a tick is two frames


@pytest.mark.parametrize(
    ("tokens", "expected", "step"),
    [
        # two whole pieces and one that was cut off: the next window begins with it
        ([T(0), 1, T(60), T(60), 2, 3, T(90), T(90), 4], [(0, 60), (60, 90)], 90),
        # a pause between two pieces
        ([T(0), 1, T(60), T(80), 2, T(90), T(94)], [(0, 60), (80, 90)], 90),
        # a single time at the end: all has been told
        ([T(10), 1, T(60), T(60), 2, T(90)], [(10, 60), (60, 90)], 200),
        # one piece
        ([T(0), 1, 2, T(50)], [(0, 50)], 200),
        # no end was said, or none at all
        ([T(0), 1, 2], [(0, 200)], 200),
        ([1, 2], [(0, 200)], 200),
        ([], [(0, 200)], 200),
    ],
)
def test_segments(tokens, expected, step):
    found, next_one = split_segments(tokens, TIME, 200)
    assert [(piece.begin, piece.end) for piece in found] == expected and next_one == step
    assert [token for piece in found for token in piece.tokens] == tokens[: sum(len(p.tokens) for p in found)]
