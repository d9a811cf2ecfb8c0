"""LongNet's dilated segments in a captured step: which keys count, and how often, follows from the sizes of its
branches, in a whole cache and in a ring. The kernel is checked by bench/check/dilated.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import static_steps
from allyouneed.nn.common import Common
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.mixers.attention.longnet import LongNet
from allyouneed.nn.ops.attention.decode import BlockTable, define_decode_attention
from allyouneed.runtime.cuda import kernels
from allyouneed.runtime.cuda.attention_kernels import dilated_branches
from allyouneed.runtime.cuda.decode_step import DecodeStep
from allyouneed.runtime.cuda.kernels import StepSetup
from allyouneed.runtime.cuda.static_cache import StaticKVCache, StaticStates
from allyouneed.runtime.cuda.window_cache import StaticWindowKVCache
from any_part import VOCAB, build
from static_steps import decode_both, decode_many

SEGMENTS: list[dict[str, Any]] = [
    {"segments": [3, 12], "dilations": [1, 4]},
    {"segments": [4, 7, 10], "dilations": [2, 3, 5], "offsets": "blocks"},
    {"segments": [2, 5], "dilations": [3, 9]},  # some heads leave out whole segments
]


def model_with(mixer: dict[str, Any]) -> Any:
    return build({"kind": "decoder", "vocab": VOCAB, "width": 12, "decoder": [{"mixer": mixer}]})


@pytest.mark.parametrize("keys", SEGMENTS, ids=str)
def test_branches_count_keys_as_their_patterns_do(keys: dict[str, Any]) -> None:
    part: Any = LongNet(heads=6, **keys).build(Common(width=12))
    branches = dilated_branches(part, StepSetup(StaticStates(model_with({"kind": "identity"}), 1, 1, 30, 0)))
    positions = torch.arange(30)
    layout = TokenLayout(positions[None])
    exact = part.counts(layout, layout)[0].transpose(0, 1)  # (queries, heads, keys)
    found = branches.log_counts(positions, positions[None].expand(30, -1)).exp().round().long()
    past = positions <= positions[:, None, None]
    torch.testing.assert_close(found * past, exact)
    assert branches.most == max(-(-w // r) for w, r in zip(keys["segments"], keys["dilations"], strict=True))


@pytest.mark.parametrize("keys", SEGMENTS, ids=str)
def test_a_ring_gives_the_attention_of_a_whole_cache(keys: dict[str, Any]) -> None:
    torch.manual_seed(0)
    part: Any = LongNet(heads=6, **keys).build(Common(width=12))
    branches = dilated_branches(part, StepSetup(StaticStates(model_with({"kind": "identity"}), 1, 1, 40, 0)))
    ring, rows, blocks = max(keys["segments"]), 2, torch.arange(2)[:, None]
    whole, short = torch.zeros(2, rows, 6, 40, 4).double(), torch.zeros(2, rows, 6, ring + 1, 4).double()
    for position in range(40):
        q, k, v = torch.randn(3, rows, 6, 4).double()
        at = torch.full((rows,), position)
        found, wanted = (
            define_decode_attention(q, *stored, at, 0.5, table, (k, v), branches=branches)
            for stored, table in ((short, BlockTable(blocks, 0, 1, (0, ring))), (whole, BlockTable(blocks, 0, 1)))
        )
        torch.testing.assert_close(found, wanted)


LONGER = {"segments": [3, 90], "dilations": [1, 4]}  # than a row: a whole cache, which beams share


@pytest.mark.parametrize("keys", [*SEGMENTS, LONGER], ids=str)
def test_captured_steps_equal_the_plain_path(keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_steps, "STEPS", 11)
    monkeypatch.setattr(static_steps, "ROUNDS", 8)
    check(model_with({"kind": "longnet", "heads": 3} | keys), decode_both, decode_many)


@pytest.mark.parametrize("keys", [SEGMENTS[0], LONGER], ids=str)
def test_captured_steps_rotate_queries_and_keys(keys: dict[str, Any]) -> None:
    check(model_with({"kind": "longnet", "heads": 3, "positions": "rotary"} | keys), decode_both)


def check(model: Any, *ways: Any) -> None:
    with torch.no_grad():
        for decode in ways:
            decoded = decode(model, model, [], lambda step: step)
            torch.testing.assert_close(decoded.found, decoded.wanted, atol=1e-6, rtol=0)
            assert decoded.before == decoded.after


@pytest.mark.parametrize("capacity", [10, 64])
def test_caches_of_both_kinds_have_a_kernel(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long texts decoded without it: their cache is a ring."""
    monkeypatch.setattr(kernels, "plain_kernel", pytest.fail)
    model = model_with({"kind": "longnet", "heads": 3, "segments": [4, 12], "dilations": [1, 2]})
    states = StaticStates(model, 2, 1, capacity, 0)
    DecodeStep(model, states)
    (state,) = (state for layer in states.layers for state in layer.values())
    assert type(state) is (StaticKVCache if capacity == 10 else StaticWindowKVCache)
