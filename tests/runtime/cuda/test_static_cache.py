"""States of a fixed shape follow the protocol of `States`, within their slots."""

from __future__ import annotations

import pytest
import torch

import allyouneed as ayn
from allyouneed.nn.states.base import States
from allyouneed.runtime.cuda.static_cache import StaticStates

LAYER = {"mixer": {"kind": "attention", "heads": 2, "pattern": "causal"}, "channel": {"kind": "ffn", "hidden": 16}}


def static_states(slots: int, group: int) -> StaticStates:
    model = ayn.build({"kind": "decoder", "vocab": 11, "width": 8, "decoder": [LAYER]})
    return StaticStates(model.decoder, slots, group, capacity=5, sources=0)


def test_static_states_are_states() -> None:
    states: States = static_states(2, 3)
    assert isinstance(states, States) and not states.joins
    assert (states.lengths, states.group, states.has_sources) == ([0] * 6, 3, False)
    assert states.bytes == 2 * 6 * 8 * 5 * 4  # keys and values, rows, width, capacity, float32
    states.lengths = [1, 2, 3, 4, 5, 5]
    states.trim(3)
    assert states.lengths == [1, 2, 3, 3, 3, 3]
    assert states.slot_layout(2).positions.tolist() == [[0, 1, 2, 3, 4]]


def test_select_reorders_rows_within_their_slots_only() -> None:
    states = static_states(2, 3)
    states.lengths = [1, 2, 3, 4, 5, 5]
    before = states.block_table.clone()
    states.select([2, 0, 0, 3, 5, 4])
    assert states.lengths == [3, 1, 1, 4, 5, 5]
    assert torch.equal(states.block_table, before[[2, 0, 0, 3, 5, 4]])
    with pytest.raises(NotImplementedError, match="the shape of static states is fixed"):
        states.select([3, 0, 0, 3, 5, 4])
    with pytest.raises(NotImplementedError, match="the shape of static states is fixed"):
        states.repeat_rows(2)
    with pytest.raises(NotImplementedError, match="the shape of static states is fixed"):
        states.copy_rows([0])
