"""Every part that exists decodes by a step of fixed shape, which a CUDA graph can capture: it never waits for the host,
allocates no state anew, and gives the logits of the plain path, for rows of unequal length in slots in any order and
beams that are reordered. On a GPU the same steps run with kernels (bench/check/gpu.py, bench/check/kernels.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from allyouneed.runtime.cuda.capture import step_blockers
from allyouneed.runtime.cuda.decode_step import DecodeStep
from allyouneed.runtime.cuda.static_cache import StaticStates
from any_part import CASES, VOCAB, build, case, first_of_each_kind
from host_sync import NoHostSync
from static_steps import SOURCES, decode_both, decode_many

# two directions at once are no request of their own: infer/whole_targets decodes them
NOT_CAPTURED = "mixer synchronous"
# where there is no kernel, experts run one after another, and the host reads how many tokens each has
WAITS_WITHOUT_KERNELS = "channel moe"
QUICK = [
    *first_of_each_kind(("mixer", "cross mixer")),
    "head copy",
    "context encoder",
    "layers act",
    "channel rwkv-channel hidden=9",
]


def guarded(step: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        with NoHostSync():
            step()

    return run


def check_steps(model: Any, sources: list[list[int]], prepare: Any = guarded) -> None:
    assert not list(step_blockers(model))
    with torch.no_grad():
        for decode in (decode_both, decode_many):
            decoded = decode(model, model, sources, prepare)
            torch.testing.assert_close(decoded.found, decoded.wanted, atol=1e-6, rtol=0)
            assert decoded.before == decoded.after and decoded.before


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in CASES
        if not name.startswith("encoder")
    ],
)
def test_a_captured_step_equals_the_plain_path(name: str) -> None:
    if name.startswith(NOT_CAPTURED):
        assert list(step_blockers(case(name)))
    else:
        check_steps(case(name), SOURCES, (lambda step: step) if name.startswith(WAITS_WITHOUT_KERNELS) else guarded)


def test_two_stacks_share_a_captured_cache() -> None:
    layer = {"wiring": "pre-norm", "channel": {"kind": "glu", "hidden": 10}}
    cross = {"kind": "attention", "heads": 2, "kv_heads": 1, "pattern": "causal", "positions": "rotary"}
    stacks = {
        "first": [layer | {"mixer": {"kind": "gated-retention", "heads": 3}}],
        "second": [layer | {"cross": cross}],
    }
    check_steps(build({"kind": "decoder-decoder", "vocab": VOCAB, "width": 12} | stacks), [])


def test_a_segment_longer_than_a_row_is_not_allocated() -> None:
    """Infini-attention whose rows end within their first segment."""
    mixer = {"kind": "infini", "heads": 3, "segment": 1000, "positions": "rotary"}
    check_steps(build({"kind": "decoder", "vocab": VOCAB, "width": 12, "decoder": [{"mixer": mixer}]}), [])


@pytest.mark.parametrize("read", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x * torch.tensor([2.0])])
def test_the_guard_finds_what_waits_for_the_host(read: Any) -> None:
    with pytest.raises(AssertionError, match="waits for the host"), NoHostSync():
        read(torch.ones(3))


@pytest.mark.parametrize("positions", [{"kind": "shaw", "distance": 2}, "transformer-xl"])
def test_tables_of_distances_follow_weights_that_change(positions: Any) -> None:
    mixer = {"kind": "attention", "heads": 3, "pattern": "causal", "positions": positions}
    model = build({"kind": "decoder", "vocab": VOCAB, "width": 12, "decoder": [{"mixer": mixer}]})
    states = StaticStates(model, 2, 1, 8, 0)
    step, slots = DecodeStep(model, states), torch.arange(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        states.refresh()
        states.reset_rows(slots, torch.zeros_like(slots))
        other = DecodeStep(model, StaticStates(model, 2, 1, 8, 0))
        for tokens in torch.tensor([[3, 4], [5, 6], [3, 7]]):
            torch.testing.assert_close(step(tokens), other(tokens), rtol=0, atol=0)
