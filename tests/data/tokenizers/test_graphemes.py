"""Graphemes: what a reader takes for one character."""

from __future__ import annotations

import pytest

from allyouneed.data.tokenizers.graphemes import group_pieces


@pytest.mark.parametrize(
    "graphemes",
    [
        ["👩\u200d👩\u200d👧", " ", "o", "k"],
        ["e\u0301", "a"],
        ["🇩🇪", "🇫🇷", "x"],
        ["👍🏽", "!"],
        ["न", "मि"],
        ["각", "\r\n", "你"],
        ["a", "\udcff", "\udce4", "\udcbd", "b"],  # bytes that form no character
    ],
)
def test_the_bytes_of_a_grapheme_have_one_number(graphemes: list[str]) -> None:
    whole = [one.encode("utf-8", "surrogateescape") for one in graphemes]
    pieces = [bytes([byte]) for raw in whole for byte in raw]
    assert group_pieces(pieces) == [number for number, raw in enumerate(whole) for _ in raw]
    assert group_pieces(whole) == list(range(len(whole)))
