"""Facts follow from what a batch says about itself."""

import pytest
import torch

from allyouneed.nn.batch import Rows
from allyouneed.nn.context import Facts

TOKENS = torch.zeros(2, 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("side", "positions", "segments"),
    [
        ("right", [[0, 1, 2, 3], [0, 1, 2, 3]], [[1, 1, 1, 1], [1, 1, 0, 0]]),
        ("left", [[0, 1, 2, 3], [0, 0, 0, 1]], [[1, 1, 1, 1], [0, 0, 1, 1]]),
    ],
)
def test_lengths_say_where_the_tokens_stand(side, positions, segments):
    facts = Facts.of(Rows(TOKENS, lengths=torch.tensor([4, 2]), side=side))
    assert facts.positions.expand(2, 4).tolist() == positions
    assert facts.segments.tolist() == segments


def test_positions_that_are_given_are_used_with_lengths_too():
    given = torch.tensor([[7, 8, 9, 10], [3, 4, 99, 99]])
    facts = Facts.of(Rows(TOKENS, lengths=torch.tensor([4, 2]), positions=given))
    assert facts.positions.tolist() == [[7, 8, 9, 10], [3, 4, 0, 0]]
    assert facts.start is None  # not one after another from a common start


def test_segments_begin_anew_and_padding_stands_nowhere():
    facts = Facts.of(Rows(TOKENS, segments=torch.tensor([[1, 1, 2, 0], [1, 2, 2, 2]])))
    assert facts.positions.tolist() == [[0, 1, 0, 0], [0, 0, 1, 2]]
