"""The native executor computes what the model computes, whatever else is in the batch, and falls back to it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from allyouneed.config import parse
from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.model_runner import ModelRunner
from allyouneed.kernels.cpu import build as native
from allyouneed.nn.batch import Rows
from allyouneed.nn.context import Context
from allyouneed.nn.models.base import Model
from allyouneed.nn.states.base import States
from allyouneed.nn.states.kv_cache import KVCache
from allyouneed.nn.states.paged import BlockPool, PagedStates
from allyouneed.runtime.cpu import executor as executor_module
from allyouneed.runtime.cpu.executor import CpuExecutor, cpu_executor
from any_part import CASES
from native_models import SOURCES, STARTS, assert_same, build_stored, decode, language_model


@pytest.fixture(autouse=True, scope="module")
def _native_library() -> None:
    native.wait_for_build()


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.inference_mode():
        yield


FEW = [name for name in CASES if "mixer" not in name or ("mixer attention" in name and "pattern" not in name)]


@pytest.mark.parametrize("stored", ["single", "bf16"])
@pytest.mark.parametrize("name", FEW[::2])
def test_float_weights_are_used_as_they_are(name: str, stored: str) -> None:
    """Products are in single precision, whatever the weights are stored in."""
    model = build_stored(name, stored)
    reference, executor = copy.deepcopy(model).float(), cpu_executor(model)
    if not isinstance(executor, CpuExecutor):
        return
    if stored == "bf16" and executor.decoder.calls:  # parts that torch computes round to bf16
        return
    theirs = reference.start(Rows.of(SOURCES))  # type: ignore[operator]
    ours = States(reference.decoder.new_states(), 3, theirs.device, theirs.memory)  # type: ignore[operator,union-attr]
    for layer, twin in zip(theirs.layers, ours.layers, strict=True):
        if "cross" in layer:  # keys and values of the source without rounding
            number = theirs.layers.index(layer)
            if model.decoder.blocks[number].sublayers["cross"] in [call.part for call in executor.decoder.calls]:  # type: ignore[union-attr,index]
                continue  # torch computes it, here from weights that are not rounded either
            part = reference.decoder.blocks[number].sublayers["cross"]  # type: ignore[union-attr,index]
            twin["cross"].keys, twin["cross"].values = part.source(theirs.memory.hidden, Context(theirs.memory.layout))
    for token in (4, 7, 2, 9):
        new = Rows(torch.full((3, 1), token))
        found, expected = executor.advance(new, ours)[:, -1], reference.advance(new, theirs)[:, -1]  # type: ignore[operator]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    scores = reference.head(expected)  # type: ignore[operator]
    torch.testing.assert_close(executor.head(expected), scores, rtol=1e-5, atol=1e-5 * float(scores.abs().max()))


def test_caches_in_half_precision_serve_both_executors() -> None:
    model = build_stored("wiring pre-norm", "bf16")
    expected = decode(model, Rows.of(SOURCES), STARTS)
    for turns in ([1, 0, 1], [0, 1, 1]):
        states = cpu_executor(model).start(Rows.of(SOURCES))
        cpu_executor(model).advance(Rows.of(STARTS), states)
        for turn, token in zip(turns, (4, 7, 2), strict=True):
            new = Rows(torch.full((3, 1), token))
            if turn:
                found = cpu_executor(model).advance(new, states)[:, -1]
            else:  # the model itself takes two tokens at once; one is trimmed
                cpu_executor(model).advance(Rows(torch.full((3, 2), token)), states)
                states.trim([length - 1 for length in states.lengths])
        assert (found.float() - expected[3].float()).abs().max() < 0.1


@pytest.mark.parametrize("name", FEW)
def test_the_executor_computes_what_the_model_computes(name: str) -> None:
    model = build_stored(name)
    assert_same(
        decode(cpu_executor(model), Rows.of(SOURCES), STARTS), decode(copy.deepcopy(model), Rows.of(SOURCES), STARTS)
    )


def test_the_executor_computes_what_the_model_computes_without_an_encoder() -> None:
    model = language_model()
    assert_same(decode(cpu_executor(model), 3, STARTS), decode(model, 3, STARTS))


def test_results_are_bit_identical_across_batches_and_thread_counts() -> None:
    model = build_stored("wiring pre-norm")
    together = decode(cpu_executor(model), Rows.of(SOURCES * 5), STARTS * 5)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for row, (source, start) in enumerate(zip(SOURCES, STARTS, strict=True)):
            alone = decode(cpu_executor(model), Rows.of([source]), [start])
            for one, all_rows in zip(alone, together, strict=True):
                if isinstance(cpu_executor(model), CpuExecutor):
                    assert torch.equal(one[0], all_rows[row]) and torch.equal(one[0], all_rows[row + 12])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("mixer", [None, "mla", "gau", "lsra", "location", "turned"])
def test_paged_caches_give_the_same_numbers(size: int, mixer: str | None) -> None:
    """Rows that share blocks, write to them and change places: the same bits, also where torch computes a part."""
    model: Any = language_model() if mixer is None else mixed_model(mixer)
    executor = cpu_executor(model)
    if not isinstance(executor, CpuExecutor):
        return
    assert bool(executor.decoder.calls) == (mixer == "turned")
    pool = BlockPool(60, size)
    plain = executor.start(3)
    paged = PagedStates(executor.start(3), pool)
    tokens = torch.tensor([[5], [9], [11]])
    for turn in range(15):
        if turn in (3, 8):  # a row twice, another one dropped
            for states in (plain, paged):
                states.select([2, 0, 2])
        new = Rows((tokens + 7 * turn) % 20 + 3)
        assert executor.supports(new, paged, turn + 1) and executor.bind(paged, 3, turn + 1) is not None
        assert torch.equal(executor.advance(new, paged), executor.advance(new, plain))
    assert isinstance(paged.unpaged_rows([1]).layers[0]["mixer"], KVCache)
    paged.close()
    assert not pool.used


MIXED = {
    "mla": {"kind": "mla", "heads": 4, "kv_rank": 9, "nope_width": 9, "rope_width": 4, "value_width": 9},
    "gau": {"kind": "gau", "key_width": 6},  # keys and values of different widths
    "lsra": {"kind": "lsra", "heads": 4, "size": 3},  # a cache inside another state is not paged
    "synthesizer": {"kind": "synthesizer", "heads": 4, "length": 6},
    "location": {"kind": "attention", "heads": 4, "scores": {"kind": "location", "length": 20}},
    "turned": {"kind": "attention", "heads": 4, "positions": {"kind": "rotary", "values": True}},  # torch computes it
}


def mixed_model(mixer: str) -> Any:
    """A language model with attention in one layer and another mixer in the next."""
    torch.manual_seed(0)
    layers = [
        {"wiring": "pre-norm", "mixer": part | {"pattern": "causal"}, "channel": {"kind": "ffn", "hidden": 48}}
        for part in ({"kind": "attention", "heads": 4}, MIXED[mixer])
    ]
    return parse(Model, {"kind": "decoder", "vocab": 31, "width": 32, "decoder": layers}).build().eval()  # type: ignore[type-abstract]


def test_rows_can_be_reordered_dropped_and_share_a_source() -> None:
    model = build_stored("wiring post-norm")
    found = []
    for executor in (cpu_executor(model), model):
        states = executor.start(Rows.of(SOURCES))
        executor.advance(Rows.of(STARTS), states)
        states.repeat_rows(2)
        executor.advance(Rows(torch.tensor([[n] for n in range(1, 7)])), states)
        states.select([5, 4, 1, 1])
        found.append([executor.advance(Rows(torch.tensor([[3], [4], [5], [6]])), states)[:, -1]])
        assert states.lengths == [5, 5, 4, 4]
    assert_same(*found)


def test_executor_and_model_can_alternate_on_the_same_states() -> None:
    model = build_stored("wiring post-norm")
    (expected,) = decode(model, Rows.of(SOURCES), STARTS)[3:4]
    for turns in ([0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 0]):
        executors = [(model, cpu_executor(model))[turn] for turn in turns]
        states = executors[0].start(Rows.of(SOURCES))
        found = executors[0].advance(Rows.of(STARTS), states, last=True)[:, 0]
        for executor, token in zip(executors[1:], (4, 7, 2), strict=True):
            found = executor.advance(Rows(torch.full((3, 1), token)), states)[:, -1]
        assert_same([found], [expected])


def test_a_long_text_grows_caches_and_tables() -> None:
    model = language_model()
    states = cpu_executor(model).start(2)
    cpu_executor(model).advance(Rows.of([[n % 29 + 1 for n in range(20)]] * 2), states)
    for count in range(20, 150):
        new = Rows(torch.tensor([[count % 29 + 1], [count % 13 + 1]]))
        twin = states.copy_rows([0, 1]) if count % 10 == 0 else None  # a copy of the same bits
        found = cpu_executor(model).advance(new, states)[:, -1]
        if twin is not None:
            assert_same([found], [model.advance(new, twin)[:, -1]])


@pytest.mark.parametrize("stored", ["int8", "bf16"])
def test_no_buffer_is_overrun(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of rows and any length."""
    make, guards = torch.empty, []

    def guarded(*sizes: int, dtype: torch.dtype = torch.float32, **options: object) -> Tensor:
        if options:  # not ours
            return make(*sizes, dtype=dtype, **options)
        count = math.prod(sizes)
        whole = make(count + 64, dtype=dtype).fill_(77)
        guards.append(whole[count:])
        return whole[:count].view(sizes)

    model = build_stored("wiring post-norm", stored)
    monkeypatch.setattr(torch, "empty", guarded)
    for rows in (1, 2, 7, 3):
        executor = cpu_executor(model)
        states = executor.start(Rows.of([[n % 9 + 1 for n in range(2 * rows + 1)]] * rows))
        executor.advance(Rows.of([[1, 2, 3][: row % 3 + 1] for row in range(rows)]), states)
        for _ in range(45):
            executor.head(executor.advance(Rows(torch.full((rows, 1), 5)), states)[:, -1])
    assert len(guards) > 100 * isinstance(cpu_executor(model), CpuExecutor)
    assert all(guard.eq(77).all() for guard in guards)


def test_a_text_beyond_the_last_position_is_refused() -> None:
    model = language_model(positions={"kind": "learned", "length": 6})
    states = cpu_executor(model).start(1)
    cpu_executor(model).advance(Rows.of([[1, 2, 3, 4, 5, 6]]), states)
    with pytest.raises(UserError, match="6 learned positions"):
        cpu_executor(model).advance(Rows.of([[1]]), states)
    model = mixed_model("synthesizer")
    states = cpu_executor(model).start(2)
    for _ in range(6):
        cpu_executor(model).advance(Rows.of([[1], [2]]), states)
    with pytest.raises(UserError, match="7 tokens exceeds the synthesizer's length 6"):
        cpu_executor(model).advance(Rows.of([[1], [2]]), states)


@pytest.mark.parametrize("token", [31, 10**9, -1])
def test_a_token_id_outside_the_vocabulary_is_refused(token: int) -> None:
    model = language_model()
    executor = cpu_executor(model)
    with pytest.raises(IndexError):
        executor.advance(Rows(torch.tensor([[1, token]])), executor.start(1))


def test_a_wrong_number_of_rows_is_refused() -> None:
    model = language_model()
    executor = cpu_executor(model)
    states = executor.start(2)
    executor.advance(Rows.of([[1], [2]]), states)
    with pytest.raises((RuntimeError, ValueError)):
        executor.advance(Rows.of([[1], [2], [3]]), states)
    with pytest.raises(RuntimeError):
        executor.head(torch.zeros(2, 23))


def test_loaded_weights_are_lowered_again() -> None:
    model, other = language_model(), language_model()
    before = decode(cpu_executor(model), 3, STARTS)
    changed = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    changed["decoder.blocks.1.sublayers.channel.down.codes"] *= -1
    model.load_state_dict(changed)
    after = decode(cpu_executor(model), 3, STARTS)
    assert (after[0] - before[0]).abs().max() > 0.1
    assert_same(after, decode(model, 3, STARTS))


@pytest.mark.parametrize("name", ["layers with coordinates", "layers act"])
def test_a_model_without_a_native_sublayer_runs_in_torch(name: str) -> None:
    model = build_stored(name)
    assert cpu_executor(model) is model


def test_a_training_model_or_a_missing_library_falls_back_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model()
    assert cpu_executor(model.train()) is model
    for name in ("native_library", "wait_for_build"):
        monkeypatch.setattr(executor_module, name, lambda: None)
    assert cpu_executor(model.eval()) is model


def test_weights_changed_in_place_are_lowered_again() -> None:
    model = parse(Model, language_model().config.model_dump()).build().eval()  # type: ignore[type-abstract,operator,union-attr]
    before = decode(cpu_executor(model), 3, STARTS)
    with torch.inference_mode(False):
        for weight in model.parameters():
            weight.data.mul_(1.5)
    after = decode(cpu_executor(model), 3, STARTS)
    assert (after[1] - before[1]).abs().max() > 0.01
    for found, expected in zip(after, decode(model, 3, STARTS), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_engine_decodes_with_the_native_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(build_stored("wiring post-norm"), 1, 2, 0)
    for way in (Decoding(method="greedy", max_length=9), Decoding(beam=3, max_length=7)):
        found = engine.generate(SOURCES, way)
        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "decoder", property(lambda self: self.model))
            expected = engine.generate(SOURCES, way)
        assert [[h.tokens for h in answers] for answers in found] == [[h.tokens for h in a] for a in expected]
