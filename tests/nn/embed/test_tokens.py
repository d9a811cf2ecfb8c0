"""Embeddings of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allyouneed.nn.batch import Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.embed.tokens import TokenEmbed
from allyouneed.nn.positions.absolute import Sinusoidal

SEGMENTS = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 0], [1, 2, 2, 2, 2, 2, 3, 3], [1, 1, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize(
    "rows",
    [
        Rows(SEGMENTS, segments=SEGMENTS),
        Rows(SEGMENTS, torch.tensor([3, 8, 5])),
        Rows(SEGMENTS, torch.tensor([3, 8, 5]), side="left"),
    ],
    ids=["packed", "right", "left"],
)
def test_sinusoids_are_computed_once_for_each_position(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    embed: Any = TokenEmbed(positions=Sinusoidal(offset=1)).build(Common(width=6), 5)
    layout, asked = TokenLayout.of(rows), []
    found = embed(rows, layout)
    wanted = embed.tokens(rows.tokens) * embed.scale + embed.positions(layout.real_positions)
    assert found.equal(wanted)
    forward = embed.positions.forward
    monkeypatch.setattr(embed.positions, "forward", lambda given: (asked.append(given.numel()), forward(given))[1])
    embed(rows, layout)
    assert asked == [8]


def test_given_positions_may_be_any() -> None:
    embed: Any = TokenEmbed(positions=Sinusoidal()).build(Common(width=6), 5)
    rows = Rows(SEGMENTS, positions=SEGMENTS * 1000)
    layout = TokenLayout.of(rows)
    assert layout.position_bound is None
    assert embed(rows, layout).equal(embed.tokens(rows.tokens) * embed.scale + embed.positions(rows.positions))
