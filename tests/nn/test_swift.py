"""A model run by orders says what the model itself says, alone or in company, and steps aside where it cannot."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import anypart
from allyouneed.config import parse
from allyouneed.errors import UserError
from allyouneed.infer.decoding import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.kernels import native
from allyouneed.nn import swift as swift_file
from allyouneed.nn.batch import Rows
from allyouneed.nn.flat import Orders, Untold, Value
from allyouneed.nn.model import Model
from allyouneed.nn.quantized import to_int8
from allyouneed.nn.swift import Swift, swift
from anypart import CASES

SOURCES = [[1, 2, 3], [4, 5, 6, 7, 8], [3]]
STARTS = [[1, 2], [3], [4, 5, 6]]


@pytest.fixture(autouse=True, scope="module")
def _machine() -> None:
    native.wait()


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.inference_mode():
        yield


def made(name: str) -> nn.Module:
    return to_int8(anypart.build(CASES[name]).float())


def writer(**keys: object) -> nn.Module:
    """A language model of Llama's kind, with heads that share keys."""
    tree = {
        "kind": "decoder",
        "vocab": 31,
        "width": 24,
        "norm": {"kind": "rms"},
        "embed": {"scale": "none", **keys},
        "decoder": [
            {
                "repeat": 2,
                "wiring": "pre-norm",
                "mixer": {
                    "kind": "attention",
                    "heads": 6,
                    "kv_heads": 2,
                    "pattern": "causal",
                    "bias": False,
                    "positions": {"kind": "rotary"},
                },
                "channel": {"kind": "glu", "hidden": 40},
            }
        ],
    }
    torch.manual_seed(0)
    return to_int8(parse(Model, tree).build())  # type: ignore[type-abstract]


def decoded(model: object, given: object, starts: list[list[int]]) -> list[Tensor]:
    """Hidden states after each step, and the last scores."""
    states = model.start(given)  # type: ignore[attr-defined]
    found = [model.advance(Rows.of(starts), states, last=True)[:, 0]]  # type: ignore[attr-defined]
    for token in (4, 7, 2):
        found.append(model.advance(Rows(torch.full((len(starts), 1), token)), states)[:, -1])  # type: ignore[attr-defined]
    return [*found, model.head(found[-1])]  # type: ignore[attr-defined]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """To the last digits; but where these decide to which whole number an input is rounded, a token moves by a step."""
    for ours, theirs in zip(found, expected, strict=True):
        size, apart = theirs.abs().max(), (ours - theirs).abs()
        assert apart.median() < 2e-6 * size and apart.max() < 0.03 * size


def test_there_is_a_machine_where_there_is_a_compiler() -> None:
    wanted = native.able() and shutil.which("g++") is not None
    assert (native.wait() is not None) == wanted
    assert isinstance(swift(writer()), Swift) == wanted


FEW = [name for name in CASES if "mixer" not in name or ("mixer attention" in name and "pattern" not in name)]


@pytest.mark.parametrize("name", FEW)
def test_every_model_says_the_same_by_orders(name: str) -> None:
    model = made(name)
    assert_same(
        decoded(swift(model), Rows.of(SOURCES), STARTS), decoded(copy.deepcopy(model), Rows.of(SOURCES), STARTS)
    )


def test_one_that_only_writes_does_too() -> None:
    model = writer()
    assert_same(decoded(swift(model), 3, STARTS), decoded(model, 3, STARTS))


def test_to_the_last_bit_alone_and_among_strangers_with_one_thread_and_with_two() -> None:
    model = made("wiring pre-norm")
    together = decoded(swift(model), Rows.of(SOURCES * 5), STARTS * 5)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for row, (source, start) in enumerate(zip(SOURCES, STARTS, strict=True)):
            alone = decoded(swift(model), Rows.of([source]), [start])
            for one, all_rows in zip(alone, together, strict=True):
                if isinstance(swift(model), Swift):
                    assert torch.equal(one[0], all_rows[row]) and torch.equal(one[0], all_rows[row + 12])
    finally:
        torch.set_num_threads(before)


def test_rows_may_be_reordered_leave_and_share_their_source() -> None:
    model = made("wiring post-norm")
    found = []
    for one in (swift(model), model):
        states = one.start(Rows.of(SOURCES))
        one.advance(Rows.of(STARTS), states)
        states.fan(2)
        one.advance(Rows(torch.tensor([[n] for n in range(1, 7)])), states)
        states.select([5, 4, 1, 1])
        found.append([one.advance(Rows(torch.tensor([[3], [4], [5], [6]])), states)[:, -1]])
        assert states.lengths == [5, 5, 4, 4]
    assert_same(*found)


def test_steps_by_orders_and_by_the_model_can_take_turns() -> None:
    model = made("wiring post-norm")
    (expected,) = decoded(model, Rows.of(SOURCES), STARTS)[3:4]
    for turns in ([0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 0]):
        ways = [(model, swift(model))[turn] for turn in turns]
        states = ways[0].start(Rows.of(SOURCES))
        found = ways[0].advance(Rows.of(STARTS), states, last=True)[:, 0]
        for way, token in zip(ways[1:], (4, 7, 2), strict=True):
            found = way.advance(Rows(torch.full((3, 1), token)), states)[:, -1]
        assert_same([found], [expected])


def test_a_long_text_grows_caches_and_tables() -> None:
    model = writer()
    states = swift(model).start(2)
    swift(model).advance(Rows.of([[n % 29 + 1 for n in range(20)]] * 2), states)
    for count in range(20, 150):
        new = Rows(torch.tensor([[count % 29 + 1], [count % 13 + 1]]))
        twin = states.pick([0, 1]) if count % 10 == 0 else None  # what was seen before is the same to the last bit
        found = swift(model).advance(new, states)[:, -1]
        if twin is not None:
            assert_same([found], [model.advance(new, twin)[:, -1]])


def test_a_text_beyond_the_last_position_is_refused_as_always() -> None:
    model = writer(positions={"kind": "learned", "length": 6})
    states = swift(model).start(1)
    swift(model).advance(Rows.of([[1, 2, 3, 4, 5, 6]]), states)
    with pytest.raises(UserError, match="6 learned positions"):
        swift(model).advance(Rows.of([[1]]), states)


def test_other_weights_are_other_orders() -> None:
    model, other = writer(), writer()
    before = decoded(swift(model), 3, STARTS)
    changed = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    changed["decoder.blocks.1.sublayers.channel.down.codes"] *= -1
    model.load_state_dict(changed)
    after = decoded(swift(model), 3, STARTS)
    assert (after[0] - before[0]).abs().max() > 0.1
    assert_same(after, decoded(model, 3, STARTS))


@pytest.mark.parametrize("name", ["linear bit", "norm scale", "wiring reversible"])
def test_a_part_without_orders_leaves_the_model_as_it_is(name: str) -> None:
    (found,) = [case for case in CASES if case == name or case.startswith(f"{name} ")][:1]
    model = made(found)
    assert swift(model) is model


def test_nor_has_a_model_that_trains_or_is_not_in_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = writer()
    assert swift(model.train()) is model
    plain = parse(Model, {**model.config.model_dump()}).build().eval()  # type: ignore[operator,type-abstract,union-attr]
    assert swift(plain) is plain
    monkeypatch.setattr(swift_file, "machine", lambda: None)
    alone = writer()
    assert swift(alone) is alone


def test_a_formula_of_other_words_has_no_orders() -> None:
    value = Orders().value(4)
    for formula in (lambda x: x - x, lambda x: x.mean(), torch.tanh, lambda x: torch.cat([x, x]), lambda x: x[0]):
        with pytest.raises(Untold):
            formula(value)
    assert isinstance(sum([value, value]), Value)


@pytest.fixture
def new_shop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As if nobody had ever asked for the machine."""
    monkeypatch.setattr(native, "Shop", type("Shop", (), {"found": None, "closed": False, "making": None}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_nobody_waits_for_it_to_be_made(new_shop: Path) -> None:
    model = writer()
    assert swift(model) is model
    if native.able() and shutil.which("g++") is not None:
        assert native.wait() is not None
        assert isinstance(swift(model), Swift)
        assert [path.suffix for path in (new_shop / "allyouneed").iterdir()] == [".so"]


@pytest.mark.parametrize(
    "why", ["no compiler", "a compiler that fails", "a place that cannot be written", "not wanted"]
)
def test_where_it_cannot_be_made_nobody_hears_of_it(
    why: str, new_shop: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if why == "no place to write":
        new_shop.write_text("a file, not a folder")
    elif why == "not wanted":
        monkeypatch.setenv("ALLYOUNEED_NATIVE", "off")
    else:
        monkeypatch.setenv("CXX", "/no/such/compiler" if why == "no compiler" else "false")
    model = writer()
    assert swift(model) is model and native.wait() is None and swift(model) is model
    assert capfd.readouterr() == ("", "")


def test_the_engine_decodes_by_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(made("wiring post-norm"), 1, 2, 0)
    for way in (Decoding(method="greedy", max_length=9), Decoding(beam=3, max_length=7)):
        found = engine.generate(SOURCES, way)
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "decoder", property(lambda self: self.model))
            expected = engine.generate(SOURCES, way)
        assert [[h.tokens for h in answers] for answers in found] == [[h.tokens for h in a] for a in expected]
