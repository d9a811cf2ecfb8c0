"""Packed rows in one tile: the same attention and gradients as the pattern's dense mask."""

import pytest
import torch

from allyouneed.nn.batch import Rows
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.ops.attention.dense import ScoreMod
from allyouneed.nn.ops.attention.select import dense
from allyouneed.nn.ops.attention.short_rows import ShortRows, attend, attend_backward, attend_qkv_backward
from allyouneed.nn.patterns.core import Causal, Full

QUERIES = torch.tensor([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 2, 3]])
KEYS = torch.tensor([[1, 1, 2, 2, 2], [1, 1, 2, 2, 0]])  # nothing for the third sentence of the second row


def layout(segments: torch.Tensor) -> TokenLayout:
    return TokenLayout.of(Rows(torch.ones_like(segments), segments=segments))


def run(function, q, k, v, seen):
    found = function(q, k, v) * seen[:, None, :, None]
    weights = torch.linspace(-1, 2, found.numel(), dtype=found.dtype).view(found.shape)
    return found, torch.autograd.grad((found * weights).sum(), [q, k, v])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("pattern", [Causal(), Full()], ids=str)
def test_a_tile_of_short_rows_equals_the_dense_mask(pattern, compiled):
    torch.manual_seed(1)
    causal = isinstance(pattern, Causal)
    queries = layout(QUERIES)
    keys = queries if causal else layout(KEYS)
    shapes = [(4, queries.time, 16), (2, keys.time, 16), (2, keys.time, 32)]
    q, k, v = (torch.randn(2, *shape, dtype=torch.double, requires_grad=True) for shape in shapes)
    plan, exact = ShortRows(queries, keys, causal, None), dense(pattern, queries, keys)

    def tile(q, k, v):
        return attend(q, k, v, *plan.tokens, causal, 0.3)[0]

    if compiled:
        tile = torch.compile(tile, backend="aot_eager", fullgraph=True)
    seen = (queries.segments > 0) & (queries.segments[:, :, None] == keys.segments[:, None]).any(-1)
    unseen = tile(q, k, v)[~seen[:, None].expand(2, 4, -1)]
    assert unseen.numel() and not unseen.any()
    found, slopes = run(tile, q, k, v, seen)
    wanted, gradients = run(lambda *x: exact(*x, 0.0, ScoreMod(0.3)), q, k, v, seen)
    for one, other in zip((found, *slopes), (wanted, *gradients), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def test_unsupported_inputs_use_the_fallback():
    queries = layout(QUERIES)
    plan = ShortRows(queries, queries, True, lambda: lambda *given: given)
    wide, odd = torch.ones(2, 2, 7, 16), torch.ones(2, 2, 7, 12).half()
    for x, v, dropout in (
        (wide, wide, 0.0),
        (odd, odd, 0.0),
        (wide.half(), wide.half(), 0.1),
        (wide.half(), wide, 0.0),
    ):
        assert plan(x, x, v, dropout, ScoreMod(1.0))[3] == dropout
    assert isinstance(plan(*[wide.half()] * 3, 0.0, ScoreMod(1.0)), torch.Tensor)


def test_fake_kernels_give_the_real_shapes():
    queries = layout(QUERIES)
    tokens = ShortRows(queries, queries, True, None).tokens
    q, k = torch.ones(2, 4, 7, 16), torch.ones(2, 2, 7, 16)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(attend, (q, k, k, *tokens, True, 0.5), test_utils=tests)
    given = (torch.ones_like(q), q, k, k, *tokens, True, 0.5, torch.zeros(2, 4, 7))
    torch.library.opcheck(attend_backward, given, test_utils=tests)
    given = (torch.ones_like(q), torch.ones(2, 7, 128), [4, 2, 2], tokens[0], tokens[2], True, 0.5, given[-1])
    torch.library.opcheck(attend_qkv_backward, given, test_utils=tests)
