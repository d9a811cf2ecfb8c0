"""Every native operation takes inputs without rows or without tokens, and gives what torch gives where it can."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import pytest
import torch
from torch import Tensor

from allyouneed.kernels.cpu import build as native
from allyouneed.kernels.cpu.rnn import CELLS, rnn_layer
from allyouneed.kernels.cpu.selective_scan import selective_scan
from allyouneed.nn.batch import Rows
from allyouneed.runtime.cpu.executor import CpuExecutor, cpu_executor
from any_part import CASES
from native_models import build_stored


@pytest.fixture(autouse=True, scope="module")
def library() -> Any:
    found = native.wait_for_build()
    if found is None:
        pytest.skip(str(native.status()))
    return found


def kind_of(name: str) -> str:
    return " ".join(takewhile(lambda word: "=" not in word, name.split()))


ONE_OF_EACH_KIND = list({kind_of(name): name for name in reversed(CASES)}.values())


def tokens(rows: int, time: int) -> Tensor:
    return torch.ones(rows, time, dtype=torch.long)


def none_of(rows: Rows) -> Rows:
    return Rows(rows.tokens, torch.zeros(len(rows.tokens), dtype=torch.long))


# the source and the new tokens
INPUTS = {
    "no rows": (Rows(tokens(0, 3)), Rows(tokens(0, 1))),
    "a source without tokens": (Rows(tokens(2, 0)), Rows(tokens(2, 1))),
    "only padding": (none_of(Rows(tokens(2, 3))), none_of(Rows(tokens(2, 3)))),
    "no new tokens": (Rows(tokens(2, 3)), Rows(tokens(2, 0))),
}


def shapes(model: Any, source: Rows, new: Rows) -> list[torch.Size] | None:
    """Hidden states and scores; None where a part that torch computes cannot do without tokens."""
    try:
        states = model.start(source if hasattr(model, "encoder") else len(source.tokens))
        hidden = model.advance(new, states)
    except (RuntimeError, ValueError, ZeroDivisionError, IndexError):
        return None
    return [hidden.shape, model.head(hidden.flatten(0, 1)).shape]


class _WithEncoder:
    """An executor, with the mark by which `shapes` knows encoder-decoders."""

    def __init__(self, executor: Any, model: Any) -> None:
        self.start, self.advance, self.head = executor.start, executor.advance, executor.head
        if hasattr(model, "encoder"):
            self.encoder = model.encoder


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
@torch.inference_mode()
def test_a_native_program_takes_empty_inputs(name: str) -> None:
    try:
        model: Any = build_stored(name).eval()
    except ValueError:  # nothing to quantize
        return
    executor = cpu_executor(model)
    if not isinstance(executor, CpuExecutor) or not model.config.generates:
        return
    for source, new in INPUTS.values():
        found, expected = shapes(_WithEncoder(executor, model), source, new), shapes(model, source, new)
        assert found == expected or expected is None  # a process that crashes says neither


SIZES = [(0, 3), (2, 0), (0, 0)]


@pytest.mark.parametrize(("rows", "time"), SIZES)
def test_a_selective_scan_of_nothing_keeps_the_state(rows: int, time: int) -> None:
    width, states = 5, 4
    x, steps = (torch.randn(rows, time, width, requires_grad=True) for _ in range(2))
    b, c = (torch.randn(rows, time, states, requires_grad=True) for _ in range(2))
    bias, skip = (torch.randn(width, requires_grad=True) for _ in range(2))
    a, state = torch.randn(states, width), torch.randn(rows, states, width, requires_grad=True)
    found = selective_scan(x, steps, bias, a, b, c, skip, state, None)
    assert found is not None
    y, last = found
    assert y.shape == (rows, time, width) and last.equal(state)
    (y.sum() + last.sum()).backward()
    assert state.grad is not None and state.grad.equal(torch.ones_like(state))


@pytest.mark.parametrize(("rows", "time"), SIZES)
@pytest.mark.parametrize("cell", CELLS)
def test_a_recurrent_layer_takes_nothing(library: Any, cell: str, rows: int, time: int) -> None:
    hidden, gates = 5, 4 if cell == "lstm" else 3
    seen = torch.randn(rows, time, gates * hidden, requires_grad=True)
    weight = torch.randn(gates * hidden, hidden, requires_grad=True)
    bias = None if cell == "lstm" else torch.randn(hidden, requires_grad=True)
    carry = tuple(torch.randn(rows, hidden, requires_grad=True) for _ in range(2 if cell == "lstm" else 1))
    found = rnn_layer(library, cell, seen, weight, bias, carry, None)
    assert {part.shape for part in found} == {(rows, time, hidden)}
    sum(part.sum() for part in found).backward()  # type: ignore[union-attr]
    assert weight.grad is not None and not weight.grad.any()


def test_the_best_tokens_of_no_rows_are_none() -> None:
    found = native.top_k(torch.empty(0, 7), 3, torch.tensor([1]))
    assert found is not None and found[0].shape == found[1].shape == (0, 3)
