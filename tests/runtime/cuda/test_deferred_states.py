"""Recurrences whose matrices are written once in several tokens, over several writes: rows of unequal length, reordered
beams, drafts that are accepted in part. The plain path writes after each token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import static_steps
from allyouneed.nn.ops.deferred import RECENT
from allyouneed.runtime.cuda.constant_states import DeferredRecurrent
from allyouneed.runtime.cuda.decode_step import DecodeStep
from allyouneed.runtime.cuda.static_cache import StaticStates
from any_part import VOCAB, build
from static_steps import decode_both, decode_many

MIXERS: dict[str, dict[str, Any]] = {
    "mamba2": {"kind": "mamba2", "heads": 4, "groups": 2, "state": 5},
    "performer": {"kind": "performer", "heads": 3, "features": 7},
    "performer with ReLU": {"kind": "performer", "heads": 2, "features": 9, "kernel": "relu"},
    "in a branch": {
        "kind": "branches",
        "left": {"kind": "mamba2", "heads": 2, "state": 3},
        "right": {"kind": "performer", "heads": 2, "features": 5},
    },
}


def model_with(mixer: dict[str, Any]) -> Any:
    return build({"kind": "decoder", "vocab": VOCAB, "width": 12, "decoder": [{"mixer": mixer}]})


@pytest.mark.parametrize("name", MIXERS)
def test_steps_over_several_writes_equal_the_plain_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_steps, "STEPS", 11)  # what the capacities hold
    monkeypatch.setattr(static_steps, "ROUNDS", 8)
    model = model_with(MIXERS[name])
    with torch.no_grad():
        for decode in (decode_both, decode_many):
            decoded = decode(model, model, [], lambda step: step)
            torch.testing.assert_close(decoded.found, decoded.wanted, atol=1e-6, rtol=0)
            assert decoded.before == decoded.after


@pytest.mark.parametrize("name", ["mamba2", "performer"])
def test_matrices_are_read_only_between_writes(name: str) -> None:
    model = model_with(MIXERS[name])
    states = StaticStates(model, 2, 1, 2 * RECENT, 0)
    (state,) = (state for layer in states.layers for state in layer.values())
    assert isinstance(state, DeferredRecurrent)
    step, written = DecodeStep(model, states), []
    with torch.no_grad():
        for number in range(2 * RECENT):
            carry, _ = state.buffers(2, torch.zeros(2, 1, 12, dtype=states.dtype))
            matrices = next(x for x in carry if x.dim() == 4)[..., :-1]  # a Performer writes its last column each time
            before = matrices.clone()
            step(torch.tensor([3, 5]))
            if not torch.equal(matrices, before):
                written.append(number)
    assert written == [RECENT - 1, 2 * RECENT - 1]
