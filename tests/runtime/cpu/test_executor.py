"""A model run by orders says what the model itself says, alone or in company, and steps aside where it cannot."""

from __future__ import annotations

import copy
import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import any_part as anypart
from allyouneed.config import parse
from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.kernels.cpu import build as native
from allyouneed.nn.batch import Rows
from allyouneed.nn.context import Context
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.precision import quantize, to_int8
from allyouneed.nn.states.base import States
from allyouneed.runtime.cpu import executor as executor_module
from allyouneed.runtime.cpu.executor import CpuExecutor, cpu_executor
from any_part import CASES

SOURCES = [[1, 2, 3], [4, 5, 6, 7, 8], [3]]
STARTS = [[1, 2], [3], [4, 5, 6]]


@pytest.fixture(autouse=True, scope="module")
def _native_library() -> None:
    native.wait_for_build()


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.inference_mode():
        yield


def made(name: str, stored: str = "int8") -> nn.Module:
    """`single`: not stored in fewer bits at all."""
    model = anypart.build(CASES[name]).float()
    return model if stored == "single" else quantize(model, stored)


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
    wanted = native.is_supported() and shutil.which("g++") is not None
    assert (native.wait_for_build() is not None) == wanted
    assert isinstance(cpu_executor(writer()), CpuExecutor) == wanted


FEW = [name for name in CASES if "mixer" not in name or ("mixer attention" in name and "pattern" not in name)]


@pytest.mark.parametrize("stored", ["single", "bf16"])
@pytest.mark.parametrize("name", FEW[::2])
def test_weights_of_more_bits_are_multiplied_as_they_are(name: str, stored: str) -> None:
    """In single precision, whatever the weights were rounded to."""
    model = made(name, stored)
    judge, one = copy.deepcopy(model).float(), cpu_executor(model)
    if not isinstance(one, CpuExecutor) or (stored == "bf16" and one.decoder.calls):  # torch rounds what it computes
        return
    theirs = judge.start(Rows.of(SOURCES))  # type: ignore[operator]
    ours = States(judge.decoder.new_states(), 3, theirs.device, theirs.memory)  # type: ignore[operator,union-attr]
    for layer, twin in zip(theirs.layers, ours.layers, strict=True):
        if "cross" in layer:  # what the model makes of a source is rounded as it is
            part = judge.decoder.blocks[theirs.layers.index(layer)].sublayers["cross"]  # type: ignore[union-attr,index]
            twin["cross"].keys, twin["cross"].values = part.source(theirs.memory.hidden, Context(theirs.memory.layout))
    for token in (4, 7, 2, 9):
        new = Rows(torch.full((3, 1), token))
        found, expected = one.advance(new, ours)[:, -1], judge.advance(new, theirs)[:, -1]  # type: ignore[operator]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    scores = judge.head(expected)  # type: ignore[operator]
    torch.testing.assert_close(one.head(expected), scores, rtol=1e-5, atol=1e-5 * float(scores.abs().max()))


def test_what_is_kept_in_half_precision_goes_on_in_either_way() -> None:
    model = made("wiring pre-norm", "bf16")
    expected = decoded(model, Rows.of(SOURCES), STARTS)
    for turns in ([1, 0, 1], [0, 1, 1]):
        states = cpu_executor(model).start(Rows.of(SOURCES))
        cpu_executor(model).advance(Rows.of(STARTS), states)
        for turn, token in zip(turns, (4, 7, 2), strict=True):
            new = Rows(torch.full((3, 1), token))
            if turn:
                found = cpu_executor(model).advance(new, states)[:, -1]
            else:  # two at once are the model's own affair, and one of them is taken back
                cpu_executor(model).advance(Rows(torch.full((3, 2), token)), states)
                states.trim([length - 1 for length in states.lengths])
        assert (found.float() - expected[3].float()).abs().max() < 0.1


@pytest.mark.parametrize("name", FEW)
def test_every_model_says_the_same_by_orders(name: str) -> None:
    model = made(name)
    assert_same(
        decoded(cpu_executor(model), Rows.of(SOURCES), STARTS), decoded(copy.deepcopy(model), Rows.of(SOURCES), STARTS)
    )


def test_one_that_only_writes_does_too() -> None:
    model = writer()
    assert_same(decoded(cpu_executor(model), 3, STARTS), decoded(model, 3, STARTS))


def test_to_the_last_bit_alone_and_among_strangers_with_one_thread_and_with_two() -> None:
    model = made("wiring pre-norm")
    together = decoded(cpu_executor(model), Rows.of(SOURCES * 5), STARTS * 5)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for row, (source, start) in enumerate(zip(SOURCES, STARTS, strict=True)):
            alone = decoded(cpu_executor(model), Rows.of([source]), [start])
            for one, all_rows in zip(alone, together, strict=True):
                if isinstance(cpu_executor(model), CpuExecutor):
                    assert torch.equal(one[0], all_rows[row]) and torch.equal(one[0], all_rows[row + 12])
    finally:
        torch.set_num_threads(before)


def test_rows_may_be_reordered_leave_and_share_their_source() -> None:
    model = made("wiring post-norm")
    found = []
    for one in (cpu_executor(model), model):
        states = one.start(Rows.of(SOURCES))
        one.advance(Rows.of(STARTS), states)
        states.repeat_rows(2)
        one.advance(Rows(torch.tensor([[n] for n in range(1, 7)])), states)
        states.select([5, 4, 1, 1])
        found.append([one.advance(Rows(torch.tensor([[3], [4], [5], [6]])), states)[:, -1]])
        assert states.lengths == [5, 5, 4, 4]
    assert_same(*found)


def test_steps_by_orders_and_by_the_model_can_take_turns() -> None:
    model = made("wiring post-norm")
    (expected,) = decoded(model, Rows.of(SOURCES), STARTS)[3:4]
    for turns in ([0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 0]):
        ways = [(model, cpu_executor(model))[turn] for turn in turns]
        states = ways[0].start(Rows.of(SOURCES))
        found = ways[0].advance(Rows.of(STARTS), states, last=True)[:, 0]
        for way, token in zip(ways[1:], (4, 7, 2), strict=True):
            found = way.advance(Rows(torch.full((3, 1), token)), states)[:, -1]
        assert_same([found], [expected])


def test_a_long_text_grows_caches_and_tables() -> None:
    model = writer()
    states = cpu_executor(model).start(2)
    cpu_executor(model).advance(Rows.of([[n % 29 + 1 for n in range(20)]] * 2), states)
    for count in range(20, 150):
        new = Rows(torch.tensor([[count % 29 + 1], [count % 13 + 1]]))
        twin = states.copy_rows([0, 1]) if count % 10 == 0 else None  # what was seen before is the same to the last bit
        found = cpu_executor(model).advance(new, states)[:, -1]
        if twin is not None:
            assert_same([found], [model.advance(new, twin)[:, -1]])


@pytest.mark.parametrize("stored", ["int8", "bf16"])
def test_nothing_is_written_beyond_what_was_reserved(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows there are, and however long they have got."""
    make, guards = torch.empty, []

    def guarded(*sizes: int, dtype: torch.dtype = torch.float32, **options: object) -> Tensor:
        if options:  # not ours
            return make(*sizes, dtype=dtype, **options)
        count = math.prod(sizes)
        whole = make(count + 64, dtype=dtype).fill_(77)
        guards.append(whole[count:])
        return whole[:count].view(sizes)

    model = made("wiring post-norm", stored)
    monkeypatch.setattr(torch, "empty", guarded)
    for rows in (1, 2, 7, 3):
        one = cpu_executor(model)
        states = one.start(Rows.of([[n % 9 + 1 for n in range(2 * rows + 1)]] * rows))
        one.advance(Rows.of([[1, 2, 3][: row % 3 + 1] for row in range(rows)]), states)
        for _ in range(45):
            one.head(one.advance(Rows(torch.full((rows, 1), 5)), states)[:, -1])
    assert len(guards) > 100 * isinstance(cpu_executor(model), CpuExecutor)
    assert all(guard.eq(77).all() for guard in guards)


def test_a_text_beyond_the_last_position_is_refused_as_always() -> None:
    model = writer(positions={"kind": "learned", "length": 6})
    states = cpu_executor(model).start(1)
    cpu_executor(model).advance(Rows.of([[1, 2, 3, 4, 5, 6]]), states)
    with pytest.raises(UserError, match="6 learned positions"):
        cpu_executor(model).advance(Rows.of([[1]]), states)


@pytest.mark.parametrize("token", [31, 10**9, -1])
def test_what_is_no_token_is_refused(token: int) -> None:
    model = writer()
    one = cpu_executor(model)
    with pytest.raises(IndexError):
        one.advance(Rows(torch.tensor([[1, token]])), one.start(1))


def test_rows_that_are_not_there_are_refused() -> None:
    model = writer()
    one = cpu_executor(model)
    states = one.start(2)
    one.advance(Rows.of([[1], [2]]), states)
    with pytest.raises((RuntimeError, ValueError)):
        one.advance(Rows.of([[1], [2], [3]]), states)
    with pytest.raises(RuntimeError):
        one.head(torch.zeros(2, 23))


def test_other_weights_are_other_orders() -> None:
    model, other = writer(), writer()
    before = decoded(cpu_executor(model), 3, STARTS)
    changed = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    changed["decoder.blocks.1.sublayers.channel.down.codes"] *= -1
    model.load_state_dict(changed)
    after = decoded(cpu_executor(model), 3, STARTS)
    assert (after[0] - before[0]).abs().max() > 0.1
    assert_same(after, decoded(model, 3, STARTS))


@pytest.mark.parametrize("name", ["linear bit", "layers act"])
def test_a_model_without_a_native_sublayer_runs_in_torch(name: str) -> None:
    model = made(name)
    assert cpu_executor(model) is model


def decode_rows(model: object) -> list[Tensor]:
    """Hidden states of a prefill and of steps, with rows repeated, reordered, trimmed and joined between them."""
    found = []

    def advance(states: object, tokens: list[list[int]]) -> None:
        hidden = model.advance(Rows.of(tokens), states)  # type: ignore[attr-defined]
        found.extend(hidden[row, : len(new)].float() for row, new in enumerate(tokens))

    states = model.start(Rows.of(SOURCES[:2]))  # type: ignore[attr-defined]
    advance(states, [[1, 2, 3], [4]])
    advance(states, [[5], [6]])
    states.repeat_rows(2)
    advance(states, [[1], [2], [3], [4]])
    states.select([3, 2, 1, 1])
    advance(states, [[5], [6], [7], [8]])
    states.trim(3)
    advance(states, [[2], [3], [4], [5]])
    if states.joins:
        others = model.start(Rows.of(SOURCES[2:]))  # type: ignore[attr-defined]
        others.repeat_rows(2)
        advance(others, [[1], [2]])
        states.join(others)
        advance(states, [[n] for n in range(1, 7)])
    return found


@pytest.mark.parametrize("name", CASES)
def test_parts_without_instructions_run_inside_the_native_program(name: str) -> None:
    """Every registered part among native ones, in single precision: the same numbers as the model's."""
    model = made(name, "single")
    executor = cpu_executor(model)
    if not isinstance(executor, CpuExecutor):
        return
    for ours, theirs in zip(decode_rows(executor), decode_rows(model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5 * float(theirs.abs().max()))


MIXED = [name for name in CASES if name.startswith(("mixer retention", "mixer rwkv", "channel moe", "norm scale"))]


@pytest.mark.parametrize("stored", ["int8", "bf16"])
@pytest.mark.parametrize("name", [*MIXED[::4], "wiring reversible", "wiring reversible join=concat"])
def test_they_do_so_in_fewer_bits_as_well(name: str, stored: str) -> None:
    if name not in CASES:
        return
    model = made(name, stored)
    executor = cpu_executor(model)
    assert isinstance(executor, CpuExecutor) == (native.wait_for_build() is not None)
    for ours, theirs in zip(decode_rows(executor), decode_rows(model), strict=True):
        assert (ours - theirs).abs().max() < 0.08 * theirs.abs().max()


def one_layer(name: str, mixer: dict) -> nn.Module:
    """Attention layers with one other mixer among them."""
    attention = {"kind": "attention", "heads": 4, "pattern": "causal"}
    layers = [
        {"wiring": "pre-norm", "mixer": part, "channel": {"kind": "ffn", "hidden": 48}}
        for part in (attention, mixer, attention)
    ]
    torch.manual_seed(0)
    tree = {"kind": "decoder", "vocab": 31, "width": 24, "embed": {"scale": "none"}, "decoder": layers}
    return parse(Model, tree).build().eval()  # type: ignore[type-abstract]


OTHERS = {
    "retention": {"kind": "retention", "heads": 4},
    "alibi": {"kind": "attention", "heads": 4, "pattern": "causal", "positions": "alibi"},
    "window": {"kind": "attention", "heads": 4, "pattern": "causal & window(3)"},
    "rwkv": {"kind": "rwkv"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_one_such_layer_among_others_is_the_only_call(name: str) -> None:
    model = one_layer(name, OTHERS[name])
    executor = cpu_executor(model)
    if not isinstance(executor, CpuExecutor):
        return
    (call,) = executor.decoder.calls
    assert call.part is model.decoder.blocks[1].sublayers["mixer"] and call.reason  # type: ignore[union-attr, index]
    for found, expected in zip(decoded(executor, 3, STARTS), decoded(model, 3, STARTS), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_nor_has_a_model_that_trains_or_a_computer_without_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = writer()
    assert cpu_executor(model.train()) is model
    monkeypatch.setattr(executor_module, "native_library", lambda: None)
    assert cpu_executor(model.eval()) is model


def test_a_step_of_training_is_seen() -> None:
    model = parse(Model, writer().config.model_dump()).build().eval()  # type: ignore[type-abstract,operator,union-attr]
    before = decoded(cpu_executor(model), 3, STARTS)
    with torch.inference_mode(False):
        for weight in model.parameters():
            weight.data.mul_(1.5)
    after = decoded(cpu_executor(model), 3, STARTS)
    assert (after[1] - before[1]).abs().max() > 0.01
    for found, expected in zip(after, decoded(model, 3, STARTS), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def new_shop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As if nobody had ever asked for the machine."""
    monkeypatch.setattr(
        native, "NativeLibrary", type("NativeLibrary", (), {"loaded": None, "failure": None, "build": None})
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_nobody_waits_for_it_to_be_made(new_shop: Path) -> None:
    model = writer()
    assert cpu_executor(model) is model
    if native.is_supported() and shutil.which("g++") is not None:
        assert native.wait_for_build() is not None
        assert isinstance(cpu_executor(model), CpuExecutor)
        assert [path.suffix for path in (new_shop / "allyouneed").iterdir()] == [".so"]


def hurt(content: bytes, how: str) -> bytes:
    half = len(content) // 2
    return {
        "empty": b"",
        "cut": content[:half],
        "zeros": bytes(len(content)),
        "zeros at its end": content[:half] + bytes(len(content) - half),
        "unsealed": content[: -native.CHECKSUM],
        "another byte": content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :],
    }[how]


HURT = ["empty", "cut", "zeros", "zeros at its end", "unsealed", "another byte"]


def test_a_library_that_was_hurt_is_made_anew_and_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.wait_for_build() is None:
        assert not native.is_supported() or shutil.which("g++") is None
        return
    good = native.library_path()
    content, path = good.read_bytes(), tmp_path / good.name
    assert native.is_intact(good) and not native.is_intact(path)
    asked, idle = list[Path](), type("Idle", (), {"poll": lambda self: None})()
    monkeypatch.setattr(native, "library_path", lambda: path)
    monkeypatch.setattr(native, "start_build", lambda library: asked.append(library) or idle)
    for how in HURT:
        monkeypatch.setattr(
            native, "NativeLibrary", type("NativeLibrary", (), {"loaded": None, "failure": None, "build": None})
        )
        path.write_bytes(hurt(content, how))
        assert native.native_library() is None and asked.pop() == path, how
    monkeypatch.setattr(
        native, "NativeLibrary", type("NativeLibrary", (), {"loaded": None, "failure": None, "build": None})
    )
    path.write_bytes(content)
    assert native.native_library() is not None and not asked


def test_what_was_hurt_is_whole_again(new_shop: Path) -> None:
    if native.is_supported() and shutil.which("g++") is not None:
        path = native.library_path()
        path.parent.mkdir(parents=True)
        path.write_bytes(b"\x7fELF" + bytes(1000))
        assert native.wait_for_build() is not None and native.is_intact(path)


WHY = ["no compiler", "a compiler that fails", "no place to write", "no home", "somebody else's", "not wanted"]


@pytest.mark.parametrize("why", WHY)
def test_where_it_cannot_be_made_nobody_hears_of_it(
    why: str, new_shop: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if why == "no place to write":
        new_shop.write_text("a file, not a folder")
    elif why == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(native.os.path, "expanduser", lambda path: path)
    elif why == "somebody else's":
        native.wait_for_build()
        monkeypatch.setattr(
            native, "NativeLibrary", type("NativeLibrary", (), {"loaded": None, "failure": None, "build": None})
        )
        monkeypatch.setattr(native.os, "getuid", lambda: 12345)
    elif why == "not wanted":
        monkeypatch.setenv("ALLYOUNEED_NATIVE", "off")
    else:
        monkeypatch.setenv("CXX", "/no/such/compiler" if why == "no compiler" else "false")
    model = writer()
    assert cpu_executor(model) is model and native.wait_for_build() is None and cpu_executor(model) is model
    assert capfd.readouterr() == ("", "")


def test_the_engine_decodes_by_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(made("wiring post-norm"), 1, 2, 0)
    for way in (Decoding(method="greedy", max_length=9), Decoding(beam=3, max_length=7)):
        found = engine.generate(SOURCES, way)
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "decoder", property(lambda self: self.model))
            expected = engine.generate(SOURCES, way)
        assert [[h.tokens for h in answers] for answers in found] == [[h.tokens for h in a] for a in expected]
