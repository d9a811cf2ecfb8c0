"""Token layouts derived from batches, and what layers share."""

import pytest
import torch

from allyouneed.config import parse
from allyouneed.nn.batch import Rows
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.models.base import Model
from allyouneed.nn.sublayer import SubLayer

TOKENS = torch.zeros(2, 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("side", "positions", "segments"),
    [
        ("right", [[0, 1, 2, 3], [0, 1, 2, 3]], [[1, 1, 1, 1], [1, 1, 0, 0]]),
        ("left", [[0, 1, 2, 3], [0, 0, 0, 1]], [[1, 1, 1, 1], [0, 0, 1, 1]]),
    ],
)
def test_layout_from_lengths(side, positions, segments):
    layout = TokenLayout.of(Rows(TOKENS, lengths=torch.tensor([4, 2]), side=side))
    assert layout.positions.expand(2, 4).tolist() == positions
    assert layout.segments.tolist() == segments


def test_given_positions_are_used_with_lengths():
    given = torch.tensor([[7, 8, 9, 10], [3, 4, 99, 99]])
    layout = TokenLayout.of(Rows(TOKENS, lengths=torch.tensor([4, 2]), positions=given))
    assert layout.positions.tolist() == [[7, 8, 9, 10], [3, 4, 0, 0]]
    assert layout.start is None  # not one after another from a common start


def test_positions_restart_per_segment_and_padding_is_zero():
    layout = TokenLayout.of(Rows(TOKENS, segments=torch.tensor([[1, 1, 2, 0], [1, 2, 2, 2]])))
    assert layout.positions.tolist() == [[0, 1, 0, 0], [0, 0, 1, 2]]


class OfAPlugin(SubLayer):
    """Remembers a value under the name that recurrences use for their sentences."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x, context, state=None):
        return x * context.memoize(OfAPlugin, self.name, lambda: 2.0)


@pytest.mark.parametrize("first", [True, False])
def test_a_part_may_use_the_names_of_built_in_parts(first):
    torch.manual_seed(0)
    layer = {"mixer": {"kind": "rwkv"}, "channel": {"kind": "ffn", "hidden": 8}, "repeat": 2}
    model = parse(Model, {"kind": "decoder", "vocab": 11, "width": 8, "decoder": [layer]}).build().eval()
    rows, found = Rows.of([[1, 2, 3], [4, 5]]), []
    for name in ("sentences", "a name nobody else has"):
        model.decoder.blocks[0 if first else 1].sublayers["mixer"] = OfAPlugin(name)
        found.append(model.decode(rows))
    assert torch.equal(*found)
