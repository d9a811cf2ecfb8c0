"""The way from a stack to the kernels is short, as in the model files that people quote."""

import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[3])


@pytest.fixture
def frames(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from bench.layers import frames

    yield frames
    for name in [name for name in sys.modules if name.split(".")[0] == "bench"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["gpt2", "transformer-base"])
def test_ten_frames_at_most_lead_from_a_stack_to_a_kernel(name, frames):
    found = frames.measure(name)
    assert {mode for mode, _ in found} == {"training", "decoding"}
    for kernel, path in found.items():
        assert len(path) <= 10, (kernel, path)
