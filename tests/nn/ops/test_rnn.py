"""LSTM and GRU over whole rows: the definition against torch, and the native kernel against both."""

import pytest
import torch
from torch import nn

from allyouneed.kernels.cpu.build import wait_for_build
from allyouneed.nn.ops.rnn import Maps, fused_rnn, run_cells

THEIRS = {"lstm": nn.LSTM, "gru": nn.GRU}
CELLS = [*THEIRS, "gru-reset-first"]


def network(cell, hidden, bias=True):
    torch.manual_seed(hidden)
    return THEIRS.get(cell, nn.GRU)(6, hidden, bias=bias, batch_first=True)


def inputs(cell, rows, time, hidden):
    dice = torch.Generator().manual_seed(time)
    carry = [torch.randn(rows, hidden, generator=dice).requires_grad_() for _ in range(2 if cell == "lstm" else 1)]
    return torch.randn(rows, time, 6, generator=dice).requires_grad_(), tuple(carry)


def total(y, carry):
    """Which all outputs count in."""
    return y.sin().sum() + sum(part.cos().sum() for part in carry)


def assert_equal(found, expected, leaves, exact):
    """Outputs, last states and gradients are equal; the gradients in double precision."""
    y, carry = found
    torch.testing.assert_close((y.double(), [part.double() for part in carry]), (expected[0], list(expected[1])),
                               atol=1e-5, rtol=1e-5)  # fmt: skip
    own = torch.autograd.grad(total(y, carry), leaves, retain_graph=True)
    again = torch.autograd.grad(total(y, carry), leaves)
    theirs = torch.autograd.grad(total(*expected), exact)
    for one, same, other in zip(own, again, theirs, strict=True):
        assert one.equal(same)
        torch.testing.assert_close(one.double(), other, atol=1e-5 * float(other.abs().max().clamp(min=1)), rtol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", THEIRS)
def test_the_definition_is_that_of_torch(cell, bias):
    rnn = network(cell, 5, bias).double()
    x, carry = inputs(cell, 3, 9, 5)
    x, carry = x.detach().double(), tuple(part.detach().double() for part in carry)
    y, last = run_cells(cell, x, Maps.of(rnn), carry, None)
    begin = tuple(part[None] for part in carry)
    expected, after = rnn(x, begin if cell == "lstm" else begin[0])
    after = after if cell == "lstm" else (after,)
    torch.testing.assert_close((y, list(last)), (expected, [part[0] for part in after]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "time", "hidden"), [(1, 1, 5), (1, 37, 64), (3, 12, 70), (7, 9, 129), (16, 5, 16)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", CELLS)
def test_the_native_kernel_gives_the_outputs_states_and_gradients_of_the_definition(
    cell, bias, rows, time, hidden, threads, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    if wait_for_build() is None:
        pytest.skip("no native library")
    rnn, (x, carry) = network(cell, hidden, bias), inputs(cell, rows, time, hidden)
    precise = network(cell, hidden, bias).double()
    exact_x, exact_carry = x.detach().double(), tuple(part.detach().double().requires_grad_() for part in carry)
    exact_x.requires_grad_()
    padded = (torch.arange(rows) * 5 + time) % (time + 1)  # some rows have no tokens, some have all
    for lengths in (None, padded):
        real = None if lengths is None else torch.arange(time) < lengths[:, None]
        found = fused_rnn(cell, x, Maps.of(rnn), carry, real)
        expected = run_cells(cell, exact_x, Maps.of(precise), exact_carry, real)
        assert found is not None
        if real is not None:
            assert not found[0][~real].any()
        leaves, exact = [x, *carry, *rnn.parameters()], [exact_x, *exact_carry, *precise.parameters()]
        assert_equal(found, expected, leaves, exact)


@pytest.mark.parametrize("cell", CELLS)
def test_a_row_gives_the_same_numbers_alone_and_with_any_number_of_threads(cell, monkeypatch):
    if wait_for_build() is None:
        pytest.skip("no native library")
    rnn, (x, carry) = network(cell, 70), inputs(cell, 13, 11, 70)
    lengths = torch.arange(13) % 11 + 1
    with torch.no_grad():
        seen = []
        for threads in (1, 2, 3):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            real = torch.arange(11) < lengths[:, None]
            seen.append(fused_rnn(cell, x, Maps.of(rnn), carry, real)[0])
    assert seen[0].equal(seen[1]) and seen[0].equal(seen[2])


@pytest.mark.parametrize("cell", CELLS)
def test_weights_used_twice_get_the_sum_of_both_gradients(cell):
    rnn, (x, carry) = network(cell, 12), inputs(cell, 2, 10, 12)
    maps = Maps.of(rnn)

    def both(run, x, maps, carry):
        y, after = run(cell, x, maps, carry, None)
        return run(cell, x.flip(1) + y.mean(), maps, after, None)[0].sin().sum()

    if fused_rnn(cell, x, maps, carry, None) is None:
        pytest.skip("no native library")
    own = torch.autograd.grad(both(fused_rnn, x, maps, carry), [x, *rnn.parameters()])
    plain = torch.autograd.grad(both(run_cells, x, maps, carry), [x, *rnn.parameters()])
    torch.testing.assert_close(own, plain, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("cell", CELLS)
def test_inputs_that_are_not_numbers_are_passed_on(cell):
    rnn, (x, carry) = network(cell, 7), inputs(cell, 2, 9, 7)
    x = x.detach()
    x[0, 4] = torch.nan
    if (found := fused_rnn(cell, x, Maps.of(rnn), carry, None)) is None:
        pytest.skip("no native library")
    bad = found[0].isnan()
    assert bad[0, 4:].all() and not bad[0, :4].any() and not bad[1].any()


def test_short_inputs_and_other_dtypes_use_torch():
    rnn, (x, carry) = network("gru", 5), inputs("gru", 2, 4, 5)
    with torch.no_grad():
        assert fused_rnn("gru", x, Maps.of(rnn), carry, None) is None
    assert fused_rnn("gru", x.double(), Maps.of(rnn.double()), carry, None) is None
    assert fused_rnn("gru", x[:, :0], Maps.of(rnn), carry, None) is None
