"""A recurrence that writes its matrix once in several tokens equals the one that writes it after each."""

from __future__ import annotations

import pytest
import torch

from allyouneed.nn.ops.deferred import RECENT, begin_recent, deferred_step
from allyouneed.nn.ops.ssd import recurrent

STEPS = 2 * RECENT + 3


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 2), (3, 3)])
def test_outputs_equal_the_recurrence_wherever_rows_begin(heads: int, groups: int) -> None:
    torch.manual_seed(heads)
    rows, n, width = RECENT + 1, 5, 7
    q, k = torch.randn(2, rows, groups, STEPS, n, dtype=torch.double)
    v, log = torch.randn(rows, heads, STEPS, width, dtype=torch.double), -3 * torch.rand(rows, heads, STEPS).double()
    log[:, :, 4] = -1e30  # all that was before is forgotten, as under the first maximum of a Performer
    start = torch.randn(rows, heads, n, width, dtype=torch.double)
    expected, _ = recurrent(v, log, k, q, start)
    h, recent, begins = start.clone(), begin_recent(start, groups), torch.arange(rows)  # at all places
    for step in range(STEPS):
        given = (part[:, :, step] for part in (q, k, v, log))
        found = deferred_step(*given, h, recent, begins + step)  # type: ignore[call-arg]
        torch.testing.assert_close(found, expected[:, :, step], rtol=1e-12, atol=1e-12)


def test_matrices_are_written_at_the_last_place_only() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 1, RECENT + 1, 4, dtype=torch.double)
    log = torch.full((2, 1, RECENT + 1), -0.5, dtype=torch.double)
    h = torch.zeros(2, 1, 4, 4, dtype=torch.double)
    recent, begins, writes = begin_recent(h, 1), torch.tensor([0, 3]), []
    for step in range(RECENT + 1):
        before = h.clone()
        deferred_step(q[:, :, step], k[:, :, step], v[:, :, step], log[:, :, step], h, recent, begins + step)
        writes.append((h != before).flatten(1).any(1).tolist())
        if step == RECENT - 1:
            exact = recurrent(v[:1, :, :RECENT], log[:1, :, :RECENT], k[:1], q[:1], torch.zeros_like(h[:1]))[1]
            torch.testing.assert_close(h[:1], exact, rtol=1e-12, atol=1e-12)
    assert [step for step, (first, _) in enumerate(writes) if first] == [RECENT - 1]
    assert [step for step, (_, second) in enumerate(writes) if second] == [RECENT - 4]
