"""Random layouts with all marks set."""

import random

import torch

from allyouneed.nn.batch import Rows
from allyouneed.nn.context import TokenLayout


def random_layout(time, seed, packed=False):
    """Two rows with all marks."""
    draw = random.Random(seed)
    tokens = torch.zeros(2, time, dtype=torch.long)
    marks = [torch.tensor([[draw.random() < 0.2 for _ in range(time)] for _ in range(2)]) for _ in range(2)]
    order = torch.tensor([draw.sample(range(time), time) for _ in range(2)])
    order = torch.where(marks[0] & marks[1], -1 - order, order)  # some are query-stream tokens
    said = {"chosen": marks[0], "prompt": marks[1], "order": order}
    if packed:
        ends = [sorted(draw.randrange(time + 1) for _ in range(3)) for _ in range(2)]
        segments = [[sum(t >= end for end in row) % 4 for t in range(time)] for row in ends]
        return TokenLayout.of(Rows(tokens, segments=torch.tensor(segments), **said))
    return TokenLayout.of(Rows(tokens, lengths=torch.tensor([time, draw.randint(1, time)]), **said))
