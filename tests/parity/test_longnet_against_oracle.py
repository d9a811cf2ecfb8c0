"""LongNet against its equations written out, branch by branch (Ding et al. 2023, dilated attention)."""

import pytest
import torch

from allyouneed.nn.batch import Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.mixers.attention.longnet import LongNet
from parity import TOLERANCE, difference

HEADS, HEAD_WIDTH = 4, 3


def equations(q, k, v, branches, past):
    """One head: O = Σ_i α_i O_i, α_i = s_i / Σ_j s_j, s_i the sum of exponentials of branch i; loops over tokens."""
    time, rows = len(q), []
    for t in range(time):
        numerator, denominator = 0.0, 0.0
        for w, r, shift in branches:
            segment = range(t // w * w, min(time, t // w * w + w))
            taken = [place for place in segment if (place - segment.start) % r == shift]
            if t not in taken:
                continue
            keys = [place for place in taken if place <= t or not past]
            scores = (k[keys] @ q[t] / HEAD_WIDTH**0.5).exp()
            branch, s = scores @ v[keys] / scores.sum(), scores.sum()
            numerator, denominator = numerator + s * branch, denominator + s
        rows.append(numerator / denominator if isinstance(denominator, torch.Tensor) else torch.zeros_like(v[t]))
    return torch.stack(rows)


@pytest.mark.parametrize("sees", ["past", "around"])
@pytest.mark.parametrize(("segments", "dilations"), [((4, 12), (1, 3)), ((5,), (2,)), ((3, 6, 10), (1, 2, 4))])
@pytest.mark.parametrize("time", [1, 12, 31])  # 31 is no multiple of any segment
def test_matches_the_papers_equations(sees, segments, dilations, time, record_difference):
    compared("modulo", lambda head, r: head % r, sees, segments, dilations, time, record_difference)


def taken_by_the_authors_code(head, dilation):
    """torchscale, `dense_to_sparse`: heads, padded to a multiple of r, are cut into r groups; group g takes token g."""
    grid = torch.arange(HEADS + -HEADS % dilation).view(dilation, -1)
    return int((grid == head).nonzero()[0, 0])


@pytest.mark.parametrize("dilations", [(1, 2), (2, 3)])
def test_offsets_of_the_authors_code(dilations, record_difference):
    compared("blocks", taken_by_the_authors_code, "past", (5, 10), dilations, 31, record_difference)


def compared(offsets, offset, sees, segments, dilations, time, record_difference):
    torch.manual_seed(0)
    sizes = dict(heads=HEADS, head_width=HEAD_WIDTH, segments=segments, dilations=dilations)
    config = LongNet(**sizes, sees=sees, offsets=offsets)
    module = config.build(Common(width=12))
    x = torch.randn(2, time, 12)
    context = Context(TokenLayout.of(Rows(torch.zeros(1, time, dtype=torch.long))))
    q, k, v = (part.detach().requires_grad_() for part in module.project(x, context))
    found = module.attend(q, k, v, context, context.queries)
    branches = [[(w, r, offset(head, r)) for w, r in zip(segments, dilations, strict=True)] for head in range(HEADS)]
    expected = torch.stack(
        [
            torch.stack([equations(q[b, h], k[b, h], v[b, h], branches[h], sees == "past") for h in range(HEADS)])
            for b in range(2)
        ]
    )
    weight = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), [q, k, v]) for out in (found, expected))
    outputs = difference(found, expected)
    gradients = max(difference(one, other) for one, other in zip(ours, theirs, strict=True) if other.any())
    record_difference("LongNet", "oracle from the paper", outputs, gradients)
    assert outputs < TOLERANCE and gradients < TOLERANCE
