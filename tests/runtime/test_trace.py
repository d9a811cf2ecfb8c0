"""The forward of a stack exists once: traced and run operation by operation it gives the same bits, for every part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from allyouneed.nn.batch import Rows
from allyouneed.nn.context import Context
from allyouneed.nn.models.base import advance
from allyouneed.runtime import eager
from allyouneed.runtime.fuse import AddNorm, fuse_add_norm, summands
from allyouneed.runtime.program import Add, Call, Function, Program, Scale, Unsupported, Value
from allyouneed.runtime.trace import trace
from any_part import MOST_CASES, WIDTH, build, case, tree

SOURCES, TARGETS = [[1, 2, 3], [4, 5, 6, 7, 8]], [[1, 2, 3, 4], [5, 6]]


@pytest.mark.parametrize("name", MOST_CASES)
@torch.no_grad()
def test_a_traced_program_computes_what_the_stack_computes(name: str) -> None:
    """Without states over whole sequences, with states chunk after chunk and token by token."""
    model: Any = case(name)
    reading, writing = (
        trace(stack, WIDTH, states, torch.float64) for stack, states in ((model.encoder, False), (model.decoder, True))
    )
    embed = model.embed if model.source_embed is None else model.source_embed
    source = Rows.of(SOURCES)
    layout = embed.layout(source)
    x = embed(source, layout)
    found = eager.run(reading, x, Context(layout, inputs=x))
    assert torch.equal(found, model.encoder(x, Context(layout, inputs=x)))
    ours, theirs = model.start(source), model.start(source)
    for new in (Rows.of(TARGETS), Rows.of([[3], [4]]), Rows.of([[5], [6]])):
        stack: Callable[..., Tensor] = lambda x, context, layers: eager.run(writing, x, context, layers)  # noqa: E731
        # a copy head appends columns to what the stack returns
        assert torch.equal(advance(model.embed, stack, new, ours), model.advance(new, theirs)[..., :WIDTH])


def test_a_wiring_that_uses_other_torch_functions_is_recorded() -> None:
    formulas: list[Callable[[Any], Any]] = [
        lambda x: x - x / 3,
        torch.tanh,
        lambda x: torch.cat([x, -x], -1),
        lambda x: x.relu() * x,
        lambda x: 2.0 * x + sum([x, x]),
        lambda x: x[..., :2],
    ]
    x = torch.randn(2, 5, 4)
    for formula in formulas:
        program = Program()
        program.output = formula(program.input(4)).number
        assert torch.equal(eager.run(program, x, None), formula(x))  # type: ignore[arg-type]


def test_a_wiring_that_mixes_tokens_or_depends_on_numbers_is_refused() -> None:
    value = Program().input(4)
    formulas: list[Callable[[Any], Any]] = [lambda x: x.mean(), lambda x: x[0], bool, list, float, lambda x: x.shape]
    for formula in formulas:
        with pytest.raises(Unsupported):
            formula(value)
    assert isinstance(value, Value)


def fused(wiring: str, **keys: Any) -> tuple[Program, list[Any]]:
    model: Any = build(tree(wiring={"kind": wiring, **keys}))
    program = trace(model.decoder, WIDTH, states=True, dtype=torch.float64)
    norms = {type(norm) for norm in model.decoder.blocks[0].wiring.norms}
    return program, fuse_add_norm(program, lambda part: type(part) in norms)


@pytest.mark.parametrize("wiring", ["pre-norm", "post-norm", "deepnorm"])
def test_every_addition_of_a_chain_is_fused_with_a_norm(wiring: str) -> None:
    program, ops = fused(wiring)
    assert not any(isinstance(op, Add) for op in ops)
    assert sum(isinstance(op, AddNorm) for op in ops) == 6 + (wiring == "pre-norm")
    added = {op.right for op in ops if isinstance(op, AddNorm)} - {None}
    assert summands(ops, program.output) == added and len(added) == 6
    assert sum(op.keep for op in ops if isinstance(op, AddNorm)) == (5 if wiring == "pre-norm" else 0)


@pytest.mark.parametrize("wiring", ["resi-dual", "sandwich", "parallel", "res-post-norm"])
def test_other_wirings_keep_the_additions_that_no_norm_reads_first(wiring: str) -> None:
    program, ops = fused(wiring)
    plain = sum(isinstance(op, Add) for op in program.ops)
    moved = sum(isinstance(op, AddNorm) and op.right is not None for op in ops)
    assert plain == moved + sum(isinstance(op, Add) for op in ops)
    assert moved > 0 and all(isinstance(op, Call | Add | Scale | Function | AddNorm) for op in ops)
    made = {0}
    for op in ops:  # operands come before they are read
        assert set(op.inputs) <= made
        made |= {op.output, op.total} if isinstance(op, AddNorm) and op.keep else {op.output}
    assert program.output in made
