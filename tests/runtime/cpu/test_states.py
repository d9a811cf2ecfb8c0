"""States that the interpreter updates in place: the same numbers as the model's over long texts, whatever happens to
the rows meanwhile and whichever executor computes the next token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from allyouneed.config import parse
from allyouneed.kernels.cpu import build as native
from allyouneed.nn.batch import Rows
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.precision import quantize
from allyouneed.nn.states.recurrent import TAIL
from allyouneed.runtime.cpu import bindings
from allyouneed.runtime.cpu.executor import CpuExecutor, cpu_executor

MIXERS: list[dict[str, Any]] = [
    {"kind": "retention", "heads": 3},
    {"kind": "gated-retention", "heads": 3},
    {"kind": "rwkv"},
    {"kind": "gru"},
    {"kind": "lstm", "bias": False},
    {"kind": "gru", "reset": "before"},
    {"kind": "convolution", "size": 3, "sees": "past", "gated": True, "activation": "sigmoid"},
    {"kind": "dynamic-convolution", "heads": 3, "size": 4, "sees": "past"},
    {"kind": "mamba", "hidden": 37, "state": 5},
    {"kind": "mamba2", "heads": 4, "head_width": 9, "groups": 2, "state": 5},
    {"kind": "s4", "state": 38},
    {"kind": "performer", "heads": 3, "features": 19},
    {"kind": "mixed-chunk", "chunk": 7, "key_width": 6, "hidden": 70},
    {"kind": "mixed-chunk", "chunk": 1, "key_width": 20, "positions": "rotary", "length": 9},
    {"kind": "infini", "heads": 3, "segment": 7, "positions": "rotary"},
    {"kind": "attention", "heads": 3, "kv_heads": 1, "pattern": "causal & window(5)", "positions": "buckets"},
    {"kind": "attention", "heads": 3, "pattern": "causal & (window(4) | global(1))"},
]


LOCATION = {"kind": "location", "length": 130}
FACTORISED: dict[str, Any] = {"kind": "synthesizer", "heads": 3, "length": 130, "pattern": "causal"}
ATTENTIVE: list[dict[str, Any]] = [
    {"kind": "attention", "heads": 3, "pattern": "causal", "positions": {"kind": "transformer-xl", "clamp": 20}},
    {"kind": "attention", "heads": 4, "kv_heads": 2, "pattern": "causal", "scores": "additive"},
    {"kind": "attention", "heads": 3, "pattern": "causal & strided(3)", "soft_cap": 0.5, "positions": "transformer-xl"},
    {"kind": "gau", "key_width": 4, "pattern": "causal & window(9)"},
    {"kind": "gau", "key_width": 6, "pattern": "causal & strided(2)", "positions": "bias", "length": 9},
    {"kind": "mssa", "heads": 3, "pattern": "causal & window(7)", "out": "tied"},
    {"kind": "longnet", "heads": 4, "segments": [5, 18], "dilations": [1, 3], "positions": "alibi"},
    {"kind": "lsra", "heads": 2, "size": 4, "pattern": "causal", "far_width": 8},
    {
        "kind": "branches",
        "left": {"kind": "attention", "heads": 3, "pattern": "causal & window(5)"},
        "right": {"kind": "glu", "hidden": 20},
        "join": "product",
        "then": {"kind": "gru"},
    },
    {"kind": "synthesizer", "heads": 3, "length": 130, "pattern": "causal & strided(2)", "dot": True},
    {"kind": "synthesizer", "heads": 4, "length": 130, "pattern": "causal & window(9)", "synthesis": "random"},
    {"kind": "synthesizer", "heads": 3, "length": 130, "pattern": "causal", "synthesis": "factorised-dense"},
    {
        "kind": "synthesizer",
        "heads": 3,
        "length": 130,
        "pattern": "causal & window(9)",
        "synthesis": "factorised-dense",
        "dot": True,
    },
    {
        "kind": "synthesizer",
        "heads": 3,
        "length": 130,
        "pattern": "causal",
        "synthesis": "factorised-random",
        "dot": True,
    },
    {"kind": "tensorized", "rank": 5, "length": 130, "pattern": "causal & strided(3)"},
    {"kind": "tensorized", "rank": 5, "length": 130, "pattern": "causal & window(6)"},
    {
        "kind": "attention",
        "heads": 4,
        "kv_heads": 2,
        "pattern": "causal",
        "scores": {"kind": "location", "length": 130},
    },
]
HASHED: list[dict[str, Any]] = [  # rounding decides about buckets, and these about much
    {"kind": "lsh", "heads": 3, "buckets": 4, "rounds": 2, "whole": 59},
    {"kind": "lsh", "heads": 2, "buckets": 1},
]
GROUPS = {"recurrent": MIXERS, "attentive": ATTENTIVE, "hashed": HASHED}


@pytest.fixture(autouse=True)
def _without_gradients():
    native.wait_for_build()
    with torch.inference_mode():
        yield


def build(stored: str, group: str = "recurrent") -> Any:
    channels: list[dict[str, Any]] = [{"kind": "ffn", "hidden": 30}, {"kind": "rwkv-channel", "hidden": 30}]
    mixers = enumerate(GROUPS[group])
    layers = [{"wiring": "pre-norm", "mixer": mixer, "channel": channels[n % 2]} for n, mixer in mixers]
    torch.manual_seed(0)
    model: Any = parse(Model, {"kind": "decoder", "vocab": 31, "width": 24, "decoder": layers}).build().eval()  # type: ignore[type-abstract]
    return model if stored == "single" else quantize(model, stored)


def decode(executors: list[Any], steps: int) -> list[Tensor]:
    """Hidden states of a long text, with rows joined, reordered, repeated and trimmed. Of several executors, each runs
    some steps; the model itself is called with two tokens, and one is trimmed."""
    states = executors[0].start(2)
    prompt = torch.arange(60)[None] * torch.tensor([[3], [5]]) % 31
    found = [executors[0].advance(Rows(prompt, lengths=torch.tensor([60, 57])), states)[:, 0].float()]
    for step in range(steps):
        now = executors[step // 4 % len(executors)]
        if step == 3:
            others = now.start(1)
            now.advance(Rows.of([[7, 8]]), others)
            states.join(others)
        if step in (6, 40):
            states.select([2, 0, 1])
        if step in (9, 50, steps - 3):
            states.trim([length - 2 - row for row, length in enumerate(states.lengths)])
        if step == 14:
            states.select([0, 0, 1])
        rows = len(states.lengths)
        new = (torch.arange(rows)[:, None] * 7 + step * 3) % 31
        if step % 4 == 3 and len(executors) > 1:  # more than one token: not by the interpreter
            now.advance(Rows(new.repeat(1, 2)), states)
            states.trim([length - 2 for length in states.lengths])
        found.append(now.advance(Rows(new), states)[:, -1].float())
    return found


@pytest.mark.parametrize("group", GROUPS)
def test_long_texts_give_the_same_numbers(group: str) -> None:
    model = build("single", group)
    executor = cpu_executor(model)
    if not isinstance(executor, CpuExecutor):
        return
    assert not executor.decoder.calls
    for executors, steps in (([executor], TAIL - 40 if group == "recurrent" else 56), ([executor, model], 24)):
        for ours, theirs in zip(decode(executors, steps), decode([model], steps), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=3e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("group", ["recurrent", "attentive"])
@pytest.mark.parametrize("stored", ["bf16", "int8"])
def test_long_texts_give_the_same_numbers_in_quantized_models(stored: str, group: str) -> None:
    """The plain model rounds more often in bf16; the states change their type with who computes."""
    model = build(stored, group)
    executor = cpu_executor(model)
    if not isinstance(executor, CpuExecutor):
        return
    for ours, theirs in zip(decode([executor, executor], 20), decode([model], 20), strict=True):
        assert (ours - theirs).abs().max() < 0.1 * theirs.abs().max()


def test_copied_rows_do_not_change_with_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where carries are in huge pages."""
    monkeypatch.setattr(bindings, "SETTLED", 1)
    monkeypatch.setattr(bindings, "LARGE", 1)
    model = build("single")
    executor = cpu_executor(model)
    states = executor.start(2)
    executor.advance(Rows.of([[1], [2]]), states)
    executor.advance(Rows.of([[3], [4]]), states)
    copied = states.copy_rows([1, 0])
    for _ in range(3):
        executor.advance(Rows.of([[5], [6]]), states)
    found = executor.advance(Rows.of([[7], [8]]), copied)
    again = executor.start(2)
    for tokens in ([[2], [1]], [[4], [3]]):
        executor.advance(Rows.of(tokens), again)
    torch.testing.assert_close(found, executor.advance(Rows.of([[7], [8]]), again), rtol=1e-5, atol=1e-5)


def test_large_carries_lie_where_the_system_gives_huge_pages() -> None:
    """Private memory: of shared memory it gives none."""
    copy, maps = bindings.in_huge_pages(torch.ones(bindings.LARGE // 4)), Path("/proc/self/maps")
    assert copy.equal(torch.ones_like(copy)) and copy.data_ptr() % bindings.HUGE == 0
    for line in maps.read_text("utf-8").splitlines() if maps.exists() else []:
        place, access, *_ = line.split()
        first, last = (int(end, 16) for end in place.split("-"))
        assert not first <= copy.data_ptr() < last or access == "rw-p"


@pytest.mark.parametrize("large", [bindings.LARGE, 1])
def test_a_long_text_is_never_folded_again(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots come from carries that the interpreter passes by; rows reach them at different times. Then tokens can
    be trimmed as ever. Also where carries are in huge pages."""
    monkeypatch.setattr(bindings, "LARGE", large)
    layers = [
        {"wiring": "pre-norm", "mixer": mixer, "channel": {"kind": "ffn", "hidden": 8}}
        for mixer in MIXERS[:6] + MIXERS[8:14]
    ]
    torch.manual_seed(0)
    model: Any = parse(Model, {"kind": "decoder", "vocab": 31, "width": 24, "decoder": layers}).build().eval()  # type: ignore[type-abstract]
    executor = cpu_executor(model)
    if not isinstance(executor, CpuExecutor):
        return
    lengths, steps = [70, 3], 2 * TAIL + 5
    text = torch.arange(90 + steps)[None] * torch.tensor([[3], [5]]) % 31
    states = executor.start(2)
    for layer in states.layers:
        for state in layer.values():
            monkeypatch.setattr(state, "fold", None)
    executor.advance(Rows(text[:, :70], torch.tensor(lengths)), states)
    for step in range(steps):
        new = torch.stack([row[length + step] for row, length in zip(text, lengths, strict=True)])
        found = executor.advance(Rows(new[:, None]), states)[:, -1]
    ends = [length + steps for length in lengths]

    def whole(row: int, end: int) -> Tensor:
        return model.advance(Rows(text[row : row + 1, :end]), model.start(1))[0, -1]

    for row, end in enumerate(ends):
        torch.testing.assert_close(found[row], whole(row, end), rtol=1e-4, atol=1e-4)
    monkeypatch.undo()
    states.trim([end - 9 for end in ends])
    new = torch.stack([row[end - 9] for row, end in zip(text, ends, strict=True)])
    found = executor.advance(Rows(new[:, None]), states)[:, -1]
    for row, end in enumerate(ends):
        torch.testing.assert_close(found[row], whole(row, end - 8), rtol=1e-4, atol=1e-4)
