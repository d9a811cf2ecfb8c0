"""Dense maps with products that we choose give the results of the plain ones."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest
import torch

from allyouneed.config import parse, preset_names, preset_tree
from allyouneed.kernels import cublaslt
from allyouneed.kernels.cublaslt import Algorithm, Epilogue, Product
from allyouneed.nn.batch import Rows
from allyouneed.nn.channels.feedforward import FFN
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.init.depth import Depth
from allyouneed.nn.linear.dense import is_dense
from allyouneed.nn.mixers.attention.attention import Attention
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.block import Layer
from allyouneed.runtime.cuda import products
from allyouneed.runtime.cuda.fused_backward import fuse_backward
from allyouneed.runtime.cuda.products import FastLinear, use_fast_products
from allyouneed.runtime.float8 import Float8Linear, use_float8
from shrink import batch_for, shrink

COMMON = Common(width=16)
CONTEXT = Context(TokenLayout.of(Rows.of([[1, 2, 3, 4, 5], [6, 7, 8]])))
PARTS = [
    FFN(hidden=32, activation="gelu-tanh"),
    FFN(hidden=32, activation="relu"),
    FFN(hidden=32, activation="relu", norm=True),
    FFN(hidden=32, activation="silu"),
    Attention(heads=4, kv_heads=2),
]


def gradients(module: torch.nn.Module, x: torch.Tensor, compiled: bool = False) -> list[torch.Tensor]:
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    y = run(x, CONTEXT)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
    return [y, *torch.autograd.grad((y * weights).sum(), [x, *module.parameters()])]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_part_has_the_gradients_of_the_plain_one(part: Any, fused: bool, compiled: bool) -> None:
    torch.manual_seed(1)
    module: Any = part.build(COMMON).double()
    module.prepare(CONTEXT, 2)
    x = torch.randn(2, 5, 16, dtype=torch.double, requires_grad=True)
    wanted = gradients(module, x)
    names = use_fast_products(module)
    assert names and all(is_dense(module.get_submodule(name.strip("."))) for name in names)
    if fused:
        fuse_backward(module)
    for found, exact in zip(gradients(module, x, compiled), wanted, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("wiring", ["pre-norm", "post-norm"])
def test_a_block_has_the_gradients_of_the_plain_one(wiring: str, compiled: bool) -> None:
    """In pre-norm blocks the products of output maps add the residual."""
    torch.manual_seed(1)
    ffn = {"kind": "ffn", "hidden": 24, "activation": "gelu-tanh"}
    layer = parse(Layer, {"wiring": {"kind": wiring}, "mixer": {"kind": "attention", "heads": 4}, "channel": ffn})
    module: Any = layer.build(COMMON, Depth(0, 1, "decoder")).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    module.prepare(CONTEXT, 2)
    x = torch.randn(2, 5, 16, dtype=torch.double, requires_grad=True)
    wanted = gradients(module, x)
    use_fast_products(module)
    fuse_backward(module)
    for found, exact in zip(gradients(module, x, compiled), wanted, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-11)


def test_gradients_of_fp32_weights_are_not_rounded_to_bf16() -> None:
    torch.manual_seed(1)
    module: Any = FFN(hidden=32, activation="gelu-tanh").build(COMMON)
    use_fast_products(module)
    fuse_backward(module)
    x = torch.randn(3, 7, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found = module(x, CONTEXT)
    assert found.dtype == torch.bfloat16
    found.float().square().sum().backward()
    for name, weight in module.named_parameters():
        assert weight.grad.dtype == torch.float32, name
    assert not module.up.weight.grad.equal(module.up.weight.grad.bfloat16().float())


def test_frozen_weights_get_no_gradient() -> None:
    module: Any = FFN(hidden=32, activation="relu").build(COMMON)
    use_fast_products(module)
    fuse_backward(module)
    module.up.weight.requires_grad_(False)
    module(torch.randn(2, 5, 16), CONTEXT).sum().backward()
    assert module.up.weight.grad is None and module.down.weight.grad is not None


def test_evaluation_is_the_plain_map(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = FFN(hidden=32, activation="relu").build(COMMON).eval()
    x = torch.randn(2, 5, 16)
    wanted = module(x, CONTEXT)
    use_fast_products(module)
    fuse_backward(module)
    monkeypatch.setattr(products, "matmul", pytest.fail)
    assert module(x, CONTEXT).equal(wanted)


def test_maps_of_odd_sizes_are_left_alone() -> None:
    module: Any = FFN(hidden=20, activation="relu").build(COMMON)
    assert use_fast_products(module) == []


def test_maps_with_8_bit_products_keep_them() -> None:
    module: Any = FFN(hidden=32, activation="relu").build(COMMON)
    use_float8(module)
    assert use_fast_products(module) == [] and isinstance(module.up, Float8Linear)
    other: Any = FFN(hidden=32, activation="relu").build(COMMON)
    assert use_fast_products(other) == use_fast_products(other) and isinstance(other.up, FastLinear)


GIVEN = {
    "matmul": (torch.ones(6, 5), torch.ones(5, 4)),
    "linear_relu": (torch.ones(6, 5), torch.ones(4, 5), torch.ones(4)),
    "linear_gelu": (torch.ones(6, 5), torch.ones(4, 5), torch.ones(4)),
}


@pytest.mark.parametrize("name", GIVEN)
def test_fake_operators_give_the_real_shapes(name: str) -> None:
    torch.library.opcheck(getattr(products, name), GIVEN[name], test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
def test_factors_lie_in_memory_as_they_are_said_to(transposed: tuple[bool, bool], single: bool) -> None:
    x, y = torch.randn(3, 5, dtype=torch.bfloat16), torch.randn(5, 4, dtype=torch.bfloat16)
    stored = [one.t().contiguous() if turned else one for one, turned in zip((x, y), transposed, strict=True)]
    given = (*stored, *transposed, None, None, single)
    torch.library.opcheck(products.matmul, given, test_utils=("test_faketensor",))
    found = products.matmul(*given)
    assert found.dtype == (torch.float32 if single else torch.bfloat16)
    near = 1e-6 if single else 2**-8  # one rounding to bf16
    torch.testing.assert_close(found.double(), x.double() @ y.double(), rtol=near, atol=1e-6)


# --- choice of an algorithm -------------------------------------------------------------------------------------------


def test_records_have_the_size_of_the_header() -> None:
    assert ctypes.sizeof(Algorithm) == 96
    assert Epilogue.GELU_BIAS == 164


def test_the_version_of_the_library_is_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def cublasLtGetVersion() -> int:
            return 130205

    monkeypatch.setattr(cublaslt, "library", Library)
    assert cublaslt.version() == "13.2.5"
    monkeypatch.setattr(cublaslt, "library", lambda: None)
    assert cublaslt.version() is None


class Ranked:
    """Stands for the descriptors of a product with three algorithms."""

    def __init__(self, rows: int) -> None:
        self.product = Product(rows, 8, 8, False, False, Epilogue.NONE, False, False)
        self.ranked = [Algorithm(waves=number) for number in range(3)]

    def algorithms(self, device: int) -> list[Algorithm]:
        return self.ranked


def test_the_fastest_algorithm_is_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def fastest(calls: list[Any]) -> int:
        for call in calls:
            call()
        return 2

    monkeypatch.setattr(cublaslt, "_CHOSEN", {})
    monkeypatch.setattr(cublaslt, "_fastest", fastest)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    given: Any = Ranked(8)
    for _ in range(2):
        assert cublaslt.choose(given, 0, lambda one: asked.append(one.waves)) is given.ranked[2]
    assert asked == [0, 1, 2]  # each by its own algorithm, at the first use alone


def test_nothing_is_timed_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "_CHOSEN", {})
    monkeypatch.setattr(cublaslt, "_fastest", pytest.fail)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    given: Any = Ranked(16)
    assert cublaslt.choose(given, 0, pytest.fail) is given.ranked[0]
    assert not cublaslt._CHOSEN  # timed later


def test_shapes_that_never_repeat_are_not_timed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []
    monkeypatch.setattr(cublaslt, "_CHOSEN", {})
    monkeypatch.setattr(cublaslt, "_fastest", lambda calls: timed.append(len(calls)) or 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for number in range(cublaslt.MOST + 5):
        given: Any = Ranked(8 * number)
        chosen = cublaslt.choose(given, 0, pytest.fail)
        assert chosen is given.ranked[number < cublaslt.MOST]
    assert len(timed) == cublaslt.MOST


def test_deterministic_runs_take_the_library_s_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "_CHOSEN", {})
    monkeypatch.setattr(cublaslt, "_fastest", pytest.fail)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    given: Any = Ranked(24)
    assert cublaslt.choose(given, 0, pytest.fail) is given.ranked[0]


@pytest.mark.parametrize(("times", "best"), [([9, 9, 9], 0), ([9, 8.9, 9], 0), ([9, 8, 7], 2)])
def test_the_library_s_choice_stays_unless_another_is_clearly_faster(
    times: list[float], best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.time = 0.0

        def record(self) -> None:
            self.time = clock[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return end.time - self.time

    pauses = itertools.cycle([0, 5, 0, 0, 30, 0, 0])  # another process has the GPU

    def call(time: float) -> Any:
        return lambda: clock.__setitem__(0, clock[0] + time + next(pauses))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert cublaslt._fastest([call(time) for time in times]) == best


# --- every preset -----------------------------------------------------------------------------------------------------


def training_gradients(model: Any, batch: Any) -> list[torch.Tensor]:
    torch.manual_seed(2)  # of random features
    losses: list[torch.Tensor] = []
    model.zero_grad()
    hidden = model(batch, losses)
    hidden = hidden if isinstance(hidden, torch.Tensor) else torch.cat([part.flatten() for part in hidden])
    (hidden.sin().sum() + sum(losses)).backward()
    return [hidden.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_trains_as_without_fusions(name: str) -> None:
    config = shrink(parse(Model, preset_tree(name)))  # type: ignore[type-abstract]
    torch.manual_seed(0)
    model, batch = config.build().double().train(), doubled(batch_for(config))
    wanted = training_gradients(model, batch)
    use_fast_products(model)
    fuse_backward(model)
    for found, exact in zip(training_gradients(model, batch), wanted, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-7, atol=1e-8)


def doubled(batch: Any) -> Any:
    return batch.each(lambda x: x.double() if x.is_floating_point() else x)
